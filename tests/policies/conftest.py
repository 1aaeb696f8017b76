"""Two nano pipelines on disk, written once: one like the embedded model, one like FLUX.1-dev."""

import pytest
from nano import save_nano


@pytest.fixture(scope="session")
def nano_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_nano(tmp_path_factory.mktemp("nano"))


@pytest.fixture(scope="session")
def dev_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_nano(tmp_path_factory.mktemp("dev"), like_dev=True)
