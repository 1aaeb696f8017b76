"""Nano pipelines on disk, each written once: one per architecture, and FLUX.1 both like the embedded model and -dev."""

from collections.abc import Callable

import pytest
from nano import BUILDERS, save_nano

FolderOf = Callable[[str], str]


@pytest.fixture(scope="session")
def nano_folder(folder_of: FolderOf) -> str:
    return folder_of("flux1")


@pytest.fixture(scope="session")
def dev_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_nano(tmp_path_factory.mktemp("dev"), like_dev=True)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """folder_of("sana") holds a SanaPipeline."""
    folders: dict[str, str] = {}

    def written(architecture: str) -> str:
        if architecture not in folders:
            folders[architecture] = save_nano(tmp_path_factory.mktemp(architecture), architecture)
        return folders[architecture]

    return written


@pytest.fixture(scope="session", params=sorted(BUILDERS))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def folder(architecture: str, folder_of: FolderOf) -> str:
    """The folder of each architecture, one after the other."""
    return folder_of(architecture)
