"""What a user reads when a pipeline cannot be loaded: what was asked for, what was found, what to do."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, SanaPipeline
from fake_hub import COMMIT, REPOSITORY, FakeHub, serving
from nano import BUILDERS, PROMPTS, load_nano, policy_class
from safetensors.torch import load_file, save_file

from solrl_lightning.errors import UserError
from solrl_lightning.policies.loading import load_pipeline


@pytest.fixture
def copied(nano_folder: str, tmp_path: Path) -> Path:
    """A pipeline folder to damage."""
    return Path(shutil.copytree(nano_folder, tmp_path / "copied"))


def message_of(
    named: str | Path, pipeline_class: type[DiffusionPipeline] = FluxPipeline, pretrained: str | Path | None = None
) -> str:
    """What a user reads who gives ``pretrained``; it names what is wrong."""
    with pytest.raises(UserError) as refused:
        load_pipeline(pipeline_class, str(pretrained or named))
    message = str(refused.value)
    assert str(named) in message and message.endswith(".") and ".." not in message.replace("../", "")
    return message


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def index_of(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "model_index.json").read_text())


def test_a_pipeline_folder_loads(nano_folder: str) -> None:
    assert isinstance(load_pipeline(FluxPipeline, nano_folder), FluxPipeline)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "give a local folder that save_pretrained wrote" in message_of(tmp_path / "missing")


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


@pytest.mark.parametrize("component", ["vae", "transformer", "text_encoder_2", "tokenizer", "scheduler"])
def test_a_component_without_its_subfolder_is_named_and_not_looked_for_on_the_hub(
    copied: Path, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *rest, **options: asked.append(host))
    shutil.rmtree(copied / component)
    message = message_of(copied)
    assert f"has no {component}/ (" in message and "save the pipeline again, whole." in message
    assert asked == []


def test_every_architecture_loads_with_every_component(architecture: str, folder: str) -> None:
    pipeline = load_pipeline(policy_class(architecture).pipeline_class, folder)
    named = {name for name, value in index_of(folder).items() if isinstance(value, list) and value[0] is not None}
    assert {name for name, part in pipeline.components.items() if part is not None} == named


def test_components_that_are_here_or_not_wanted_are_not_loaded(copied: Path) -> None:
    whole = load_pipeline(FluxPipeline, str(copied))
    for name in ("transformer", "vae", "scheduler"):
        shutil.rmtree(copied / name)
    rest = {name: whole.components[name] for name in ("transformer", "vae", "scheduler")}
    pipeline = load_pipeline(FluxPipeline, str(copied), components=rest)
    assert pipeline.transformer is whole.transformer and pipeline.text_encoder is not None
    shutil.rmtree(copied / "text_encoder_2")
    without = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    assert load_pipeline(FluxPipeline, str(copied), components=rest | without).text_encoder is None


@pytest.mark.parametrize("other", sorted(BUILDERS))
def test_a_folder_of_another_architecture_names_the_option_that_fits(
    architecture: str, folder: str, other: str
) -> None:
    pipeline_class = policy_class(other).pipeline_class
    if other == architecture:
        assert isinstance(load_pipeline(pipeline_class, folder), pipeline_class)
        return
    message = message_of(folder, pipeline_class)
    assert f"needs a {pipeline_class.__name__}" in message and f"Use model={architecture} with it." in message


@pytest.mark.parametrize("component, weights", [("transformer", "diffusion_pytorch_model"), ("text_encoder", "model")])
def test_weights_that_a_file_lacks_are_not_filled_with_random_numbers(
    copied: Path, component: str, weights: str
) -> None:
    file = copied / component / f"{weights}.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    message = message_of(copied / component, pretrained=copied)
    assert "lacks 1 of them" in message and name in message


def test_pickled_weights_are_not_read(copied: Path) -> None:
    file = copied / "vae" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    assert "safetensors" in message_of(copied)


def test_weights_of_the_variant_are_read_where_a_component_has_them(copied: Path) -> None:
    transformer = copied / "transformer" / "diffusion_pytorch_model.safetensors"
    shifted = {name: value + 1 for name, value in load_file(transformer).items()}
    save_file(shifted, transformer.with_suffix(".bf16.safetensors"), metadata={"format": "pt"})
    plain, variant = (load_pipeline(FluxPipeline, str(copied), variant=variant) for variant in (None, "bf16"))
    one, other = plain.transformer.state_dict(), variant.transformer.state_dict()
    assert all(torch.equal(value + 1, other[name]) for name, value in one.items())
    assert torch.equal(plain.vae.decoder.conv_in.weight, variant.vae.decoder.conv_in.weight)
    transformer.unlink()
    assert load_pipeline(FluxPipeline, str(copied), variant="bf16").transformer is not None


# The hub


@pytest.fixture
def hub(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    with serving(FakeHub(copied), tmp_path / "hub", monkeypatch) as hub:
        yield hub


def test_a_hub_id_is_downloaded_once_and_loads_as_its_folder_does(
    hub: FakeHub, nano_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub.folder / "flux1-dev.safetensors").write_bytes(b"the same weights in another layout")
    expected, found = load_pipeline(FluxPipeline, nano_folder), load_pipeline(FluxPipeline, REPOSITORY)
    assert Path(found.config._name_or_path).name == COMMIT
    assert all(torch.equal(v, found.vae.state_dict()[name]) for name, v in expected.vae.state_dict().items())
    assert len(hub.served) == len(set(hub.served)) and "flux1-dev.safetensors" not in hub.served
    hub.served.clear()
    load_pipeline(FluxPipeline, REPOSITORY)
    assert hub.served == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_pipeline(FluxPipeline, REPOSITORY).transformer is not None


def test_text_encoders_are_downloaded_only_when_a_prompt_needs_them(hub: FakeHub, tmp_path: Path) -> None:
    first = load_nano("flux1", REPOSITORY, embeddings=str(tmp_path / "embeddings"))
    assert not any(name.startswith(("text_encoder", "tokenizer")) for name in hub.served)
    hub.served.clear()
    first.encode(PROMPTS)
    assert {name.partition("/")[0] for name in hub.served} == set(first.encoders)
    second = load_nano("flux1", REPOSITORY, embeddings=str(tmp_path / "embeddings"))
    second.encode(PROMPTS)
    assert second.pipeline.text_encoder is None


def test_a_hub_repository_of_another_architecture_is_refused_before_its_weights_come(hub: FakeHub) -> None:
    assert "Use model=flux1 with it." in message_of(REPOSITORY, SanaPipeline)
    assert hub.served == ["model_index.json"]


@pytest.mark.parametrize("token, next_step", [(None, "give your token with `hf auth login`"), ("hf_x", "your token")])
def test_a_gated_model_says_where_to_accept_its_licence(
    hub: FakeHub, token: str | None, next_step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    hub.refusal = (401 if token is None else 403, "GatedRepo")
    message = message_of(REPOSITORY)
    assert f"accept its licence at https://huggingface.co/{REPOSITORY}" in message and next_step in message


def test_a_model_that_the_hub_does_not_know_may_be_misspelt_or_private(hub: FakeHub) -> None:
    hub.refusal = (401, "RepoNotFound")
    message = message_of(REPOSITORY)
    assert "neither a folder here nor a model that you may read" in message and "hf auth login" in message


def test_a_repository_that_is_no_diffusers_pipeline_is_refused(hub: FakeHub) -> None:
    (hub.folder / "model_index.json").unlink()
    assert "is no diffusers pipeline: it holds no model_index.json" in message_of(REPOSITORY)


def test_a_hub_that_fails_is_reported_with_its_answer(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.refusal = (503, "out of order")
    assert "the hub answered 503: try again later" in message_of(REPOSITORY)


def test_a_token_that_the_hub_does_not_accept_is_looked_at_first(hub: FakeHub) -> None:
    hub.refusal = (401, "Invalid credentials in Authorization header")
    message = message_of(REPOSITORY)
    assert "could not be loaded from the hub" in message and "hf auth whoami" in message


def test_a_download_that_breaks_off_goes_on_next_time(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("the connection was reset")

    with monkeypatch.context() as patched:
        patched.setattr(FluxPipeline, "download", broken)
        message = message_of(REPOSITORY)
    assert "the connection was reset" in message and "resumes where it stopped" in message
    assert load_pipeline(FluxPipeline, REPOSITORY).transformer is not None


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_id_without_network_says_how_to_go_on(
    offline: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if offline:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:  # nobody listens on this port, and there is nothing to wait for
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
        )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    message = message_of("solrl-nobody/no-such-model")
    assert ("HF_HUB_OFFLINE is set" if offline else "check the network") in message
    assert "hf auth login" in message and "give a local folder" in message


def test_text_that_is_no_hub_id_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Check the name" in message_of("no such model")


def test_of_a_repository_with_variants_only_the_wanted_files_come(
    hub: FakeHub, folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    pipeline = load_pipeline(SanaPipeline, folder_of("sana"))
    hub.folder = tmp_path / "as published"
    pipeline.save_pretrained(hub.folder)
    pipeline.transformer.save_pretrained(hub.folder / "transformer", variant="bf16")
    pipeline.text_encoder.save_pretrained(hub.folder / "text_encoder", variant="bf16", max_shard_size="100KB")
    (hub.folder / "transformer" / "diffusion_pytorch_model.int4.safetensors").write_bytes(b"of another tool")
    found = load_pipeline(SanaPipeline, REPOSITORY, variant="bf16")
    weights = {name for name in hub.served if name.endswith(".safetensors")}
    shards = {name for name in weights if name.startswith("text_encoder/model.bf16-0000")}
    assert len(shards) > 1
    assert weights - shards == {
        "transformer/diffusion_pytorch_model.bf16.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }
    for name, value in pipeline.text_encoder.state_dict().items():
        assert torch.equal(value, found.text_encoder.state_dict()[name])
