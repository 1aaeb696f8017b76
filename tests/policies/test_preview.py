"""The tiny autoencoder of previews: what is refused, what it does when memory runs out, and made-up weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderTiny
from fake_hub import REPOSITORY, FakeHub, serving
from hydra.utils import instantiate
from nano import BUILDERS, load_nano, save_preview_decoder
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.policies.preview import load_preview_decoder, random_preview_decoder

FLUX1 = dict(channels=8, compression=4)  # the latents of the nano model
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_preview_decoder(tmp_path_factory.mktemp("decoder"), **FLUX1)


@pytest.fixture
def copied(decoder_folder: str, tmp_path: Path) -> Path:
    """A decoder to damage."""
    return Path(shutil.copytree(decoder_folder, tmp_path / "copied"))


def message_of(pretrained: str | Path) -> str:
    with pytest.raises(UserError) as refused:
        load_preview_decoder(str(pretrained), torch.float32, **FLUX1)
    return str(refused.value)


def test_it_is_as_it_was_saved_frozen_and_in_the_dtype_of_the_models_own(nano_folder: str, decoder_folder: str) -> None:
    dtypes = {"vae": "bfloat16", "default": "float32"}
    policy = load_nano("flux1", nano_folder, preview_decoder=decoder_folder, dtypes=dtypes)
    expected = AutoencoderTiny.from_pretrained(decoder_folder, dtype=torch.bfloat16).state_dict()
    assert policy.preview_decoder is not None
    found = policy.preview_decoder.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items()) and len(found) == len(expected)
    assert not any(parameter.requires_grad for parameter in policy.preview_decoder.parameters())
    assert policy.preview(policy.noise(torch.tensor([1]))).dtype == torch.float32
    assert load_nano("flux1", nano_folder).preview_decoder is None


def test_a_decoder_of_other_latents_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    for channels, compression, found in ((16, 4, "16 channels at 1/4"), (8, 8, "8 channels at 1/8")):
        folder = save_preview_decoder(tmp_path / found[:2].strip(), channels=channels, compression=compression)
        (Path(folder) / WEIGHTS).unlink()
        message = message_of(folder)
        assert f"8 channels at 1/4 of the side; {folder} decodes {found}" in message and "docs/models" in message


def test_another_kind_of_model_is_refused(nano_folder: str) -> None:
    folder = Path(nano_folder) / "vae"
    assert f"must be an AutoencoderTiny; {folder} is a AutoencoderKL" in message_of(folder)


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "diffusion_pytorch_model.bin")
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: shutil.rmtree(folder),
        lambda folder: (folder / "config.json").write_text('{"cut of'),
        lambda folder: (folder / WEIGHTS).unlink(),
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:2000]),
        pickle_weights,
    ],
    ids=["no folder", "damaged description", "no weights", "cut off", "pickled weights"],
)
def test_files_that_cannot_be_read_are_named_with_a_way_out(copied: Path, damage: Callable[[Path], object]) -> None:
    damage(copied)
    message = message_of(copied)
    assert f"model.preview_decoder={copied} " in message
    assert "model.preview_decoder=null" in message and ".. " not in message


def test_weights_that_a_file_lacks_are_not_filled_with_random_numbers(copied: Path) -> None:
    tensors = load_file(copied / WEIGHTS)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, copied / WEIGHTS, metadata={"format": "pt"})
    message = message_of(copied)
    assert "lacks 1 of them" in message and name in message


def test_a_hub_id_loads_as_its_folder_does(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(FakeHub(copied), tmp_path / "hub", monkeypatch) as hub:
        found = load_preview_decoder(REPOSITORY, torch.float32, **FLUX1).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in load_file(copied / WEIGHTS).items())
    assert sorted(hub.served) == ["config.json", WEIGHTS]


def test_a_hub_id_that_the_hub_does_not_know_or_that_is_something_else_is_named(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(FakeHub(copied), tmp_path / "hub", monkeypatch) as hub:
        hub.refusal = (401, "RepoNotFound")
        message = message_of(REPOSITORY)
        assert f"model.preview_decoder={REPOSITORY} is neither a folder here nor a model that you may read" in message
        hub.refusal = None
        (copied / "config.json").unlink()
        assert "is no AutoencoderTiny: it holds no config.json" in message_of(REPOSITORY)


def limit(policy: PipelineAdapter, images: int) -> list[int]:
    """The preview decoder runs out of memory above so many images at once; returns what it is asked."""
    asked: list[int] = []

    def check(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        asked.append(len(inputs[0]))
        if len(inputs[0]) > images:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert policy.preview_decoder is not None
    policy.preview_decoder.decoder.register_forward_pre_hook(check)
    return asked


def test_out_of_memory_it_decodes_fewer_images_at_once(nano_folder: str, decoder_folder: str) -> None:
    ample = load_nano("flux1", nano_folder, preview_decoder=decoder_folder, decode_batch=8)
    tight = load_nano("flux1", nano_folder, preview_decoder=decoder_folder, decode_batch=8)
    latents = ample.noise(torch.arange(5))
    asked = limit(tight, images=2)
    torch.testing.assert_close(tight.preview(latents), ample.preview(latents), rtol=0, atol=1e-5)
    assert asked == [5, 5, 4, 4, 2, 2, 1]


def test_one_preview_that_does_not_fit_is_an_error(nano_folder: str, decoder_folder: str) -> None:
    policy = load_nano("flux1", nano_folder, preview_decoder=decoder_folder)
    asked = limit(policy, images=0)
    with pytest.raises(torch.OutOfMemoryError):
        policy.preview(policy.noise(torch.arange(2)))
    assert asked == [2, 2, 1, 1] and not policy.pipeline.vae.use_tiling


def test_made_up_weights_have_the_shapes_of_the_published_ones() -> None:
    published = AutoencoderTiny(latent_channels=16)  # as the config files of taef1 and taesd3 have it
    made = random_preview_decoder(torch.device("cpu"), torch.float32, channels=16, compression=8)
    shapes = [{name: value.shape for name, value in one.state_dict().items()} for one in (published, made)]
    assert shapes[0] == shapes[1]
    images = made.decode(torch.randn(2, 16, 4, 4)).sample
    assert images.shape == (2, 3, 32, 32) and images.isfinite().all() and images.std() > 0.01


def test_a_random_model_needs_no_file_of_it(nano_folder: str) -> None:
    policy = load_nano("flux1", nano_folder, weights="random", preview_decoder="nobody/nothing")
    assert policy.preview(policy.noise(torch.arange(2))).shape == (2, 3, 32, 32)


def test_the_option_reaches_the_policy_where_a_model_has_it(
    nano_folder: str, decoder_folder: str, compose: Callable[..., Run]
) -> None:
    options: dict[str, Any] = {"model.pretrained": nano_folder, "model.preview_decoder": decoder_folder}
    options |= {"model.resolution": 32, "model.max_sequence_length": 10, "model.embeddings": "null"}
    cfg = compose("model=flux1", *(f"{key}={value}" for key, value in options.items()))
    assert instantiate(cfg.model.policy, device="cpu").preview_decoder is not None
    has_it = {name for name in (*BUILDERS, "tiny") if "preview_decoder" in compose(f"model={name}").model.policy}
    assert has_it == {"flux1", "sd3", "tiny"}
