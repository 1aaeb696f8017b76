"""model.train=full: float32 weights are trained, and a rounded copy of them computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from nano import PROMPTS, load_nano, prompts_of, save_nano
from test_loop import train
from torch import Tensor

from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.training.full import FullTransformer

FULL = "model.train=full"
SEEDS = torch.tensor([1, 2, 3])


@pytest.fixture
def model(tmp_path: Path) -> PipelineAdapter:
    return load_nano("flux1", save_nano(tmp_path / "nano"))


def velocity(model: PipelineAdapter, transformer: Any) -> Tensor:
    return model.velocity(transformer, model.noise(SEEDS), torch.tensor(0.5), model.encode(prompts_of(PROMPTS)))


def test_a_step_is_that_of_float32_weights_with_gradients_of_the_bfloat16_model(model: PipelineAdapter) -> None:
    plain = FluxTransformer2DModel.from_config(model.transformer.config).to(torch.bfloat16)
    plain.load_state_dict(model.transformer.state_dict())
    for module, other in zip(plain.modules(), model.transformer.modules(), strict=True):
        module.__class__ = other.__class__  # the arithmetic of this machine
    velocity(model, plain).square().mean().backward()
    expected = {name: p.detach().float() - 1e-5 * p.grad.float() for name, p in plain.named_parameters()}  # type: ignore[union-attr]

    full = FullTransformer(model.transformer)
    optimizer = torch.optim.SGD([p for p in full.weights.parameters() if p.requires_grad], lr=1e-5)
    with full.current() as transformer:
        velocity(model, transformer).square().mean().backward()
    optimizer.step()
    trained = full.state("default")
    assert trained.keys() == expected.keys()
    moved = 0
    for name, value in trained.items():
        assert torch.equal(value, expected[name]), name
        moved += int((value != full.state("base")[name].float()).sum())
        assert torch.equal(full.state("old")[name], full.state("base")[name].float())
    lost = sum(int((value.bfloat16() == full.state("base")[name]).sum()) for name, value in trained.items())
    assert moved > 1000 and lost > moved / 2  # most steps would be lost in bfloat16


def test_the_old_policy_follows_in_float32_and_distances_are_relative_to_the_base(model: PipelineAdapter) -> None:
    full = FullTransformer(model.transformer)
    before = {name: value.clone() for name, value in full.state("default").items()}
    for value in full.state("default").values():
        value.mul_(1.25)
    distances = full.distances()
    assert float(distances["base_distance"]) == pytest.approx(0.25, rel=1e-5)
    assert float(distances["old_distance"]) == pytest.approx(0.25, rel=1e-5)
    full.update_old(0.75)
    for name, value in full.state("old").items():
        torch.testing.assert_close(value, 1.0625 * before[name], rtol=1e-6, atol=0)
    assert float(full.distances()["old_distance"]) == pytest.approx(0.1875, rel=1e-5)


def test_contexts_compute_with_the_weights_that_they_name(model: PipelineAdapter) -> None:
    full = FullTransformer(model.transformer)
    with torch.no_grad(), full.current() as transformer:
        base = velocity(model, transformer)
    for value in full.state("default").values():
        value.mul_(1.1)
    with torch.no_grad(), full.old() as transformer:
        assert torch.equal(velocity(model, transformer), base)
    with torch.no_grad(), full.current() as transformer:
        trained = velocity(model, transformer)
    with torch.no_grad(), full.old(full.state("default")) as transformer:
        assert torch.equal(velocity(model, transformer), trained) and not torch.equal(trained, base)


@pytest.mark.parametrize("family", ["naive_quant", "race"])
def test_families_train_and_replicas_follow(tmp_path: Path, family: str) -> None:
    rungs = ["family.explore.rungs=[{step:1,keep:4},{step:2,keep:3}]"] if family == "race" else []
    run = train(tmp_path, FULL, f"family={family}", "family.compile=false", "optimizer.lr=0.001", *rungs)
    module, trained = run.module, run.module.transformers.trained
    assert float(trained.distances()["base_distance"]) > 0
    module.requantize(version=9)
    merged = dict(module.transformers.replicas["merged"].named_parameters())
    assert merged.keys() == trained.state("old").keys()
    for name, value in trained.state("old").items():
        assert torch.equal(merged[name], value.to(merged[name].dtype))
