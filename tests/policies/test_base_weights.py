"""A policy with stored weights computes what a BF16 policy with the dequantised weights computes."""

from collections.abc import Callable

import pytest
import torch
from nano import PROMPTS, load_policy, lora_config, random_state
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.policies import adapters, base_weights
from solrl_lightning.policies.adapters import OLD, TRAINED
from solrl_lightning.policies.base_weights import block_linears, dense
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.quantization import QuantizationRule, resolve
from solrl_lightning.sizing.plan_memory import stored_bytes
from solrl_lightning.training.samplers import Samplers

CPU = torch.device("cpu")


def make_samplers(policy: Flux1) -> Samplers:
    """With an old and a trained adapter that differ."""
    rule = QuantizationRule(["single_transformer_blocks.*"], {})
    backend = resolve("nvfp4", "emulated", CPU)
    samplers = Samplers(policy, lora_config(), 0, 4, False, False, True, backend, rule)
    for seed, name in enumerate((TRAINED, OLD)):
        state = random_state(samplers.adapter_state(name), seed, size=0.05)
        adapters.load_state(samplers.lora_layers, name, state)
    samplers.sync()
    return samplers


def outputs(samplers: Samplers) -> dict[str, Tensor]:
    """The velocity of every sampler, the adapters' gradient, and the norms that the run logs."""
    policy = samplers.policy
    conditioning, x = policy.encode(PROMPTS), policy.noise(torch.arange(3))

    def velocity(transformer: nn.Module) -> Tensor:
        return policy.velocity(transformer, x, torch.full((3,), 0.5), conditioning)

    found = {}
    for name in ("policy", "merged", "shadow", "reference"):
        with torch.no_grad(), samplers.use(name) as transformer:
            found[name] = velocity(transformer)
    velocity(samplers.transformer).square().sum().backward()
    gradients = [p.grad.flatten() for p in samplers.transformer.parameters() if p.grad is not None]
    return found | {"gradient": torch.cat(gradients)} | samplers.distances()


@pytest.mark.parametrize(("storage", "error"), [("int8", 0.01), ("nf4", 0.12)])
def test_stored_weights_are_those_of_every_sampler_and_gradient(storage: str, error: float) -> None:
    whole, stored = load_policy("tiny"), load_policy("tiny", base_weights=storage)
    linears, found = block_linears(whole.transformer), block_linears(stored.transformer)
    assert linears.keys() == found.keys() and len(linears) == 32
    size = 0
    for name, layer in linears.items():
        weight = dense(found[name].weight)
        assert 0 < torch.dist(weight.float(), layer.weight.float()) < error * layer.weight.float().norm()
        layer.weight.copy_(weight)
        names, _ = found[name].weight.__tensor_flatten__()
        size += sum(getattr(found[name].weight, inner).nbytes for inner in names)
    planned = stored_bytes(0, linears.values())
    assert abs(size - planned[storage] - 2 * sum(layer.weight.numel() for layer in linears.values())) < 0.05 * size
    samplers = make_samplers(stored)
    expected, actual = outputs(make_samplers(whole)), outputs(samplers)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert not torch.equal(actual["policy"], actual["merged"])
    mlp = "transformer_blocks.0.ff.net.2"
    shared = [module.get_submodule(mlp).weight for module in (samplers.reference, samplers.replicas["merged"])]
    assert all(weight is samplers.transformer.get_submodule(mlp).weight for weight in shared)


def test_layers_that_nf4_cannot_store_and_an_absent_library_are_errors(
    nano_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match="base_weights=nf4 is invalid: every layer .* multiple of 16384 weights; .* has"
    ):
        load_policy(nano_folder, base_weights="nf4")
    monkeypatch.setattr(base_weights, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="base_weights=int8 is invalid: it needs torchao. Install it: pip install"):
        load_policy(nano_folder, base_weights="int8")


def test_compilation_is_refused(compose: Callable[..., Run]) -> None:
    for key in ("family.compile", "compile_training"):
        with pytest.raises(UserError, match=f"base_weights=int8 is invalid: with {key}=true .* Set {key}=false."):
            compose("base_weights=int8", f"{key}=true")


def test_text_encoders_stay_on_the_cpu_where_that_is_asked_for(
    nano_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(nano_folder, encode_on="cpu")
    encode, devices = policy.encode_uncached, []

    def recorded(prompts: list[str], device: torch.device):
        devices.append((device.type, policy.pipeline.text_encoder.device.type))
        return encode(prompts, device)

    monkeypatch.setattr(policy, "encode_uncached", recorded)
    policy.device = torch.device("meta")
    assert policy.encode(PROMPTS)["pooled"].device.type == "meta" and devices == [("cpu", "cpu")]
