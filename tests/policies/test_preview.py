"""The tiny autoencoder of previews: loading, running out of memory, and random weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderTiny
from fake_hub import REPOSITORY, FakeHub, serving
from hydra.utils import instantiate
from nano import BUILDERS, load_nano, save_preview_decoder
from safetensors.torch import load_file
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
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
    with pytest.raises(UserError) as error:
        load_preview_decoder(str(pretrained), torch.float32, **FLUX1)
    return str(error.value)


def test_decoder_is_as_saved_frozen_and_in_the_dtype_of_the_vae(nano_folder: str, decoder_folder: str) -> None:
    dtypes = {"vae": "bfloat16", "default": "float32"}
    model = load_nano("flux1", nano_folder, preview_decoder=decoder_folder, dtypes=dtypes)
    expected = AutoencoderTiny.from_pretrained(decoder_folder, dtype=torch.bfloat16).state_dict()
    weights = model.preview_decoder.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in expected.items()) and len(weights) == len(expected)
    assert not any(parameter.requires_grad for parameter in model.preview_decoder.parameters())
    assert model.preview(model.noise(torch.tensor([1]))).dtype == torch.float32
    assert load_nano("flux1", nano_folder).preview_decoder is None


def test_decoder_has_files_of_a_variant(nano_folder: str, copied: Path) -> None:
    weights = load_nano("flux1", nano_folder, preview_decoder=str(copied)).preview_decoder.state_dict()
    (copied / WEIGHTS).rename((copied / WEIGHTS).with_suffix(".fp16.safetensors"))
    assert "with model.variant=null its weights must be in *.safetensors" in message_of(copied)
    of_variant = load_nano("flux1", nano_folder, preview_decoder=str(copied), variant="fp16").preview_decoder
    assert all(torch.equal(value, weights[name]) for name, value in of_variant.state_dict().items())


def test_decoder_of_other_latents_raises_before_its_weights_are_read(nano_folder: str, tmp_path: Path) -> None:
    for channels, compression, shape in ((16, 4, "16 channels at 1/4"), (8, 8, "8 channels at 1/8")):
        folder = save_preview_decoder(tmp_path / str(channels), channels=channels, compression=compression)
        (Path(folder) / WEIGHTS).unlink()
        message = message_of(folder)
        assert f"8 channels at 1/4 of the side; {folder} is a AutoencoderTiny of {shape}" in message
    vae = Path(nano_folder) / "vae"
    assert f"8 channels at 1/4 of the side; {vae} is a AutoencoderKL of 8 channels at 1/4." in message_of(vae)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").write_text('{"cut of'),
        lambda folder: (folder / WEIGHTS).rename(folder / "diffusion_pytorch_model.bin"),
    ],
    ids=["damaged description", "pickled weights"],
)
def test_unreadable_files_are_errors_with_a_way_out(copied: Path, damage: Callable[[Path], object]) -> None:
    damage(copied)
    message = message_of(copied)
    assert str(copied) in message and ".. " not in message
    assert "Download or save it again, whole." in message or "save_pretrained(<folder>)" in message


def test_hub_id_loads_as_its_folder_does(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(FakeHub(copied), tmp_path / "hub", monkeypatch) as hub:
        hub.refusal = (401, "RepoNotFound")
        assert f"model.preview_decoder={REPOSITORY} is neither a folder here nor" in message_of(REPOSITORY)
        hub.refusal = None
        weights = load_preview_decoder(REPOSITORY, torch.float32, **FLUX1).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in load_file(copied / WEIGHTS).items())
    assert sorted(hub.served) == ["config.json", WEIGHTS]


def test_out_of_memory_decodes_fewer_images_at_once(nano_folder: str, decoder_folder: str) -> None:
    ample, tight = (load_nano("flux1", nano_folder, preview_decoder=decoder_folder, decode_batch=8) for _ in range(2))
    most, batches = 2, []

    def check(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        batches.append(len(inputs[0]))
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    tight.preview_decoder.decoder.register_forward_pre_hook(check)
    latents = ample.noise(torch.arange(5))
    torch.testing.assert_close(tight.preview(latents), ample.preview(latents), rtol=0, atol=1e-5)
    assert batches == [5, 5, 4, 4, 2, 2, 1]
    most = 0
    batches.clear()
    with pytest.raises(torch.OutOfMemoryError):
        tight.preview(latents[:2])
    assert batches == [2, 2, 1, 1] and not tight.pipeline.vae.use_tiling


def test_random_weights_have_the_shapes_of_the_published_ones(nano_folder: str) -> None:
    published = AutoencoderTiny(latent_channels=16)  # as the config files of taef1 and taesd3 have it
    decoder = random_preview_decoder(torch.device("cpu"), torch.float32, channels=16, compression=8)
    shapes = [{name: value.shape for name, value in one.state_dict().items()} for one in (published, decoder)]
    assert shapes[0] == shapes[1]
    images = decoder.decode(torch.randn(2, 16, 4, 4)).sample
    assert images.shape == (2, 3, 32, 32) and images.isfinite().all() and images.std() > 0.01
    model = load_nano("flux1", nano_folder, weights="random", preview_decoder="nobody/nothing")
    assert model.preview(model.noise(torch.arange(2))).shape == (2, 3, 32, 32)


def test_option_reaches_the_policies_that_have_it(
    nano_folder: str, decoder_folder: str, compose: Callable[..., Run]
) -> None:
    options = (f"pretrained={nano_folder}", f"preview_decoder={decoder_folder}", "resolution=32", "embeddings=null")
    cfg = compose("model=flux1", "model.max_sequence_length=10", *(f"model.{option}" for option in options))
    assert instantiate(cfg.model.policy, device="cpu").preview_decoder is not None
    names = {name for name in (*BUILDERS, "tiny") if "preview_decoder" in compose(f"model={name}").model.policy}
    assert names == {"flux1", "sd3", "tiny", "z_image"}
