"""Loads the files of task=export with diffusers alone."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from nano import PROMPTS, save_nano
from omegaconf import DictConfig
from safetensors.torch import load_file
from test_generate import write_checkpoint
from torch import Tensor

from solrl_lightning.build import build_model, load_adapters
from solrl_lightning.config import ConfigTree, application_config
from solrl_lightning.module import SolRLModule
from solrl_lightning.tasks.export import export
from solrl_lightning.tasks.generate import without_training

STEPS = 3
SEEDS = torch.tensor([[11, 12]])


class Exported(NamedTuple):
    """A finished export, and the module whose weights it wrote."""

    folder: Path
    pipeline: str
    module: SolRLModule


def composed(folder: Path, *arguments: str) -> DictConfig:
    with ConfigTree() as tree:
        return application_config(tree.compose(arguments), folder)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_nano(tmp_path_factory.mktemp("pipeline"))


def exported(folder: Path, pipeline: str, dtype: str) -> Exported:
    # What is not needed is not looked at: neither the run's prompts nor a compiler.
    small = ("experiment=smoke", "trainer=cpu", f"model.pretrained='{pipeline}'", f"model.dtypes.transformer={dtype}")
    checkpoint = write_checkpoint(composed(folder, *small), folder / "last.ckpt")
    cfg = composed(
        folder, *small, "task=export", f"ckpt='{checkpoint}'", "data.train=nowhere.txt", "family.compile=true"
    )
    export(cfg)
    module = build_model(without_training(cfg), torch.device("cpu"))
    load_adapters(module, checkpoint)
    return Exported(folder, pipeline, module)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory, pipeline: str) -> Exported:
    """An export in float32, where our images equal those of diffusers up to the last digits."""
    return exported(tmp_path_factory.mktemp("export"), pipeline, "float32")


def images_of(pipeline: FluxPipeline, module: SolRLModule) -> Tensor:
    """Images [2, 3, H, W] in [0, 1] of our seeds, sampled by diffusers alone."""
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        prompt=PROMPTS[0],
        num_images_per_prompt=2,
        latents=module.policy.noise(SEEDS[0]),
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        height=32,
        width=32,
        max_sequence_length=10,
        output_type="pt",
    )
    return images.images


def ours(module: SolRLModule, weights: str) -> Tensor:
    return module.sample(PROMPTS[:1], SEEDS, weights=weights, steps=STEPS)[0]


def test_merged_transformer_gives_our_images_in_diffusers(exact: Exported) -> None:
    transformer = FluxTransformer2DModel.from_pretrained(exact.folder / "transformer", dtype=torch.float32)
    found = images_of(FluxPipeline.from_pretrained(exact.pipeline, transformer=transformer), exact.module)
    torch.testing.assert_close(found, ours(exact.module, "ema"), rtol=0, atol=1e-4)
    assert (found - ours(exact.module, "base")).abs().max() > 0.1


@pytest.mark.parametrize(("folder", "weights"), [("lora_ema", "ema"), ("lora_trained", "default")])
def test_each_lora_gives_our_images_in_diffusers(exact: Exported, folder: str, weights: str) -> None:
    plain = FluxPipeline.from_pretrained(exact.pipeline)
    plain.load_lora_weights(exact.folder / folder)
    found = images_of(plain, exact.module)
    torch.testing.assert_close(found, ours(exact.module, weights), rtol=0, atol=1e-4)
    assert (found - ours(exact.module, "base")).abs().max() > 0.1


def test_merged_folder_has_exactly_the_names_and_the_dtype_of_the_base(tmp_path: Path, pipeline: str) -> None:
    folder, _, module = exported(tmp_path, pipeline, "bfloat16")
    merged = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    base = load_file(Path(pipeline) / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {x.dtype for x in base.values()} == {torch.bfloat16}
    assert {name: (x.shape, x.dtype) for name, x in merged.items()} == {
        name: (x.shape, x.dtype) for name, x in base.items()
    }
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {f"{name}.weight" for name in module.samplers.lora_layers}
    config = json.loads((folder / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "FluxTransformer2DModel"
