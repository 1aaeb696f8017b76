"""What a user reads when a pipeline cannot be loaded: what was asked for, what was found, what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import FluxPipeline

from solrl_lightning.errors import UserError
from solrl_lightning.policies.loading import load_pipeline


@pytest.fixture
def copied(nano_folder: str, tmp_path: Path) -> Path:
    """A pipeline folder to damage."""
    return Path(shutil.copytree(nano_folder, tmp_path / "copied"))


def message_of(pretrained: str | Path) -> str:
    with pytest.raises(UserError) as refused:
        load_pipeline(FluxPipeline, str(pretrained))
    message = str(refused.value)
    assert str(pretrained) in message and message.endswith(".") and ".." not in message.replace("../", "")
    return message


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_pipeline_folder_loads(nano_folder: str) -> None:
    assert isinstance(load_pipeline(FluxPipeline, nano_folder), FluxPipeline)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "Give the folder that save_pretrained wrote" in message_of(tmp_path / "missing")


@pytest.mark.parametrize("name", ["here", "./here", "../{cwd}/here"])
def test_a_relative_folder_without_an_index_is_not_taken_for_a_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    message = message_of(name.format(cwd=tmp_path.name))
    assert "holds no model_index.json" in message and "network" not in message


def test_a_folder_below_the_home_folder_is_found(
    nano_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(Path(nano_folder).parent))
    assert isinstance(load_pipeline(FluxPipeline, f"~/{Path(nano_folder).name}"), FluxPipeline)


def test_another_kind_of_pipeline_is_refused(copied: Path) -> None:
    edit(copied / "model_index.json", lambda index: index.update(_class_name="DDPMPipeline"))
    assert "needs a FluxPipeline" in message_of(copied) and "is a DDPMPipeline" in message_of(copied)


def test_an_index_that_names_no_pipeline_is_refused(copied: Path) -> None:
    edit(copied / "model_index.json", lambda index: index.pop("_class_name"))
    assert "needs a FluxPipeline" in message_of(copied)


@pytest.mark.parametrize("file", ["model_index.json", "transformer/config.json", "tokenizer_2/tokenizer.json"])
def test_a_damaged_description_is_refused(copied: Path, file: str) -> None:
    (copied / file).write_text('{"cut of')
    assert "could not be" in message_of(copied)


@pytest.mark.parametrize("weights", ["transformer/diffusion_pytorch_model", "text_encoder_2/model"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"these are no weights" * 100),
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
    ],
    ids=["garbage", "cut off", "empty", "missing"],
)
def test_damaged_weights_are_refused(copied: Path, weights: str, damage: Callable[[Path], object]) -> None:
    damage(copied / f"{weights}.safetensors")
    assert "download or save the pipeline again" in message_of(copied)


@pytest.mark.parametrize("component, key", [("transformer", "in_channels"), ("text_encoder_2", "d_ff")])
def test_weights_that_do_not_fit_their_configuration_are_refused(copied: Path, component: str, key: str) -> None:
    edit(copied / component / "config.json", lambda config: config.update({key: config[key] // 2}))
    assert "does not fit its config.json" in message_of(copied)


def test_a_component_that_the_pipeline_lacks_is_refused(copied: Path) -> None:
    edit(copied / "model_index.json", lambda index: index.update(text_encoder_2=[None, None]))
    assert "text_encoder_2" in message_of(copied)


@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning")  # diffusers' call of the hub
def test_a_hub_id_without_network_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    message = message_of("solrl-nobody/no-such-model")
    assert "network" in message and "hf auth login" in message and "local pipeline folder" in message


def test_text_that_is_no_hub_id_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert "Check the name" in message_of("no such model")
