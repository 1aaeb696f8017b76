"""Replicas share every tensor that they may share and own the rest."""

import pytest
import torch
from nano import PROMPTS, load_model, lora_config, prompts_of, random_state
from peft.tuners.lora import LoraLayer
from torch import nn

from solrl_lightning.names import OLD, TRAINED
from solrl_lightning.policies import lora, replica
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.quantization.scaled_linear import NVFP4Linear

QUANTISED = "transformer_blocks.0.attn.to_q"


@pytest.fixture
def model(nano_folder: str) -> Flux1:
    return load_model(nano_folder)


def places(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def adapted(layers: dict[str, LoraLayer]) -> list[str]:
    return [f"{name}.weight" for name in layers]


def test_replica_shares_all_memory_but_the_adapted_weights(model: Flux1) -> None:
    merged = replica.clone_sharing_weights(model.transformer)
    assert places(merged) == places(model.transformer)
    assert all(one is not other for one, other in zip(merged.modules(), model.transformer.modules(), strict=True))
    layers = lora.add_adapters(model.transformer, lora_config(), seed=0)
    replica.untie_parameters(merged, adapted(layers))
    shared, parameters = set(places(model.transformer).values()), dict(merged.named_parameters())
    separate = {name for name, place in places(merged).items() if place not in shared}
    assert separate == set(adapted(layers))
    assert sum(parameters[name].nbytes for name in separate) == 7 * 32 * 32 * 2  # 7 projections of 32 x 32 in bfloat16
    assert not any(parameter.requires_grad for parameter in parameters.values())
    assert not any(isinstance(module, LoraLayer) for module in merged.modules())

    before = {name: parameter.clone() for name, parameter in model.transformer.named_parameters()}
    positions, state = places(merged), random_state(lora.adapter_state(layers, OLD), seed=1)
    replica.write_parameters(merged, lora.merged_weights(layers, state))
    assert places(merged) == positions
    for name, weight in lora.merged_weights(layers, state):
        assert torch.equal(merged.get_parameter(name), weight.to(torch.bfloat16))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.transformer.named_parameters())


def test_merged_replica_computes_what_the_adapted_policy_computes(model: Flux1) -> None:
    model.transformer.float()
    merged = replica.clone_sharing_weights(model.transformer)
    layers = lora.add_adapters(model.transformer, lora_config(), seed=0)
    replica.untie_parameters(merged, adapted(layers))
    state = random_state(lora.adapter_state(layers, TRAINED), seed=1)
    lora.load_state(layers, TRAINED, state)
    conditioning, x, sigma = (
        model.encode(prompts_of(PROMPTS)),
        model.noise(torch.tensor([1, 2, 3])),
        torch.tensor(0.4),
    )
    with torch.no_grad():
        base = model.velocity(merged, x, sigma, conditioning)
        replica.write_parameters(merged, lora.merged_weights(layers, state))
        expected = model.velocity(model.transformer, x, sigma, conditioning)
        torch.testing.assert_close(model.velocity(merged, x, sigma, conditioning), expected, rtol=0, atol=1e-5)
    assert (base - expected).abs().max() > 0.01


def test_quantised_layer_keeps_its_buffers_and_is_quantised_from_the_float32_weight(model: Flux1) -> None:
    shadow = replica.clone_sharing_weights(model.transformer)
    shadow.set_submodule(QUANTISED, NVFP4Linear(shadow.get_submodule(QUANTISED)))
    layers = lora.add_adapters(model.transformer, lora_config(), seed=0)
    replica.untie_parameters(shadow, adapted(layers))
    layer = shadow.get_submodule(QUANTISED)
    assert isinstance(layer, NVFP4Linear) and not list(layer.parameters())  # no weight beside the quantised one
    positions = places(shadow)
    base = model.transformer.get_submodule(QUANTISED).get_base_layer()

    state = random_state(lora.adapter_state(layers, OLD), seed=1)
    replica.write_parameters(shadow, lora.merged_weights(layers, state))
    assert places(shadow) == positions
    expected = nn.Linear(32, 32)
    expected.weight.data = dict(lora.merged_weights(layers, state))[f"{QUANTISED}.weight"]
    expected.bias.data = base.bias.float()
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), NVFP4Linear(expected)(x))
