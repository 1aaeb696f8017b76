"""A model with stored weights computes what a BF16 model with the dequantised weights computes."""

import sys

import pytest
import torch
from nano import PROMPTS, adapters, load_model, prompts_of, random_state
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.names import OLD, TRAINED
from solrl_lightning.policies import lora
from solrl_lightning.policies.base_weights import block_linears, dense
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.quantization import QuantizationRule, resolve
from solrl_lightning.sizing.footprint import stored_bytes
from solrl_lightning.training.transformers import Transformers, replicate

CPU = torch.device("cpu")


def make_transformers(model: Flux1) -> Transformers:
    """With an old and a trained adapter that differ."""
    rule = QuantizationRule(["single_transformer_blocks.*"], {})
    backend = resolve("nvfp4", "emulated", CPU)
    transformers = replicate(model, adapters(), 4, False, False, True, backend, rule)
    adapted = transformers.trained
    for seed, name in enumerate((TRAINED, OLD)):
        state = random_state(adapted.state(name), seed, size=0.05)
        lora.load_state(adapted.lora_layers, name, state)
    for sampler in transformers.samplers.values():
        sampler.sync(adapted.state(OLD), version=0)
    return transformers


def outputs(model: Flux1, transformers: Transformers) -> dict[str, Tensor]:
    """The velocity of every transformer, the adapters' gradient, and the norms that the run logs."""
    conditioning, x = model.encode(prompts_of(PROMPTS)), model.noise(torch.arange(3))

    def velocity(transformer: nn.Module) -> Tensor:
        return model.velocity(transformer, x, torch.full((3,), 0.5), conditioning)

    adapted, velocities = transformers.trained, {}
    with torch.no_grad():
        for name, velocity_model in transformers.velocity_models.items():
            with velocity_model() as transformer:
                velocities[name] = velocity(transformer)
        velocities |= {name: velocity(transformer) for name, transformer in transformers.replicas.items()}
    velocity(adapted.transformer).square().sum().backward()
    gradients = [p.grad.flatten() for p in adapted.transformer.parameters() if p.grad is not None]
    return velocities | {"gradient": torch.cat(gradients)} | adapted.distances()


@pytest.mark.parametrize(("storage", "error"), [("int8", 0.01), ("nf4", 0.12)])
def test_stored_weights_are_those_of_every_sampler_and_gradient(storage: str, error: float) -> None:
    whole, stored = load_model("tiny"), load_model("tiny", base_weights=storage)
    linears, packed = block_linears(whole.transformer), block_linears(stored.transformer)
    assert linears.keys() == packed.keys() and len(linears) == 32
    size = 0
    for name, layer in linears.items():
        weight = dense(packed[name].weight)
        assert 0 < torch.dist(weight.float(), layer.weight.float()) < error * layer.weight.float().norm()
        layer.weight.copy_(weight)
        names, _ = packed[name].weight.__tensor_flatten__()
        size += sum(getattr(packed[name].weight, inner).nbytes for inner in names)
    planned = stored_bytes(0, linears.values())
    assert abs(size - planned[storage] - 2 * sum(layer.weight.numel() for layer in linears.values())) < 0.05 * size
    transformers = make_transformers(stored)
    expected, actual = outputs(whole, make_transformers(whole)), outputs(stored, transformers)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert not torch.equal(actual["old"], actual["merged"])
    mlp = "transformer_blocks.0.ff.net.2"
    with transformers.velocity_models["reference"]() as reference:
        shared = [module.get_submodule(mlp).weight for module in (reference, transformers.replicas["merged"])]
    assert all(weight is transformers.trained.transformer.get_submodule(mlp).weight for weight in shared)


def test_layers_too_small_for_nf4_and_a_missing_library_raise(
    nano_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="=nf4 is invalid: every layer .* multiple of 16384 weights; .* has"):
        load_model(nano_folder, base_weights="nf4")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match="base_weights=int8 .* package torchao is not .* with pip install torchao,"):
        load_model(nano_folder, base_weights="int8")


def test_encode_on_cpu_keeps_text_encoders_there(nano_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(nano_folder, encode_on="cpu")
    encode, devices = model.encode_uncached, []

    def recorded(prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        devices.append((device.type, model.pipeline.text_encoder.device.type))
        return encode(prompts, device)

    monkeypatch.setattr(model, "encode_uncached", recorded)
    model.device = torch.device("meta")
    assert model.encode(prompts_of(PROMPTS))["pooled"].device.type == "meta" and devices == [("cpu", "cpu")]
