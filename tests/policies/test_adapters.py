"""Two adapters on one transformer: which one acts, which one trains, and what the merged weights are."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import ModelMixin
from diffusers.loaders import PeftAdapterMixin
from nano import PROMPTS, load_policy, lora_config, random_state
from peft import LoraConfig
from peft.tuners import lora as peft_lora
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.policies import adapters
from solrl_lightning.policies.adapters import OLD, TRAINED, State
from solrl_lightning.policies.bf16 import use_fp32_products
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.training.transformers import AdaptedTransformer

ADAPTED = [
    "single_transformer_blocks.0.attn.to_k",
    "single_transformer_blocks.0.attn.to_q",
    "single_transformer_blocks.0.attn.to_v",
    "transformer_blocks.0.attn.to_k",
    "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.to_v",
]


class Adapted(NamedTuple):
    policy: Flux1
    layers: dict[str, LoraLayer]
    conditioning: dict[str, Tensor]
    base: Tensor  # velocity before the adapters came

    def velocity(self, transformer: nn.Module | None = None) -> Tensor:
        return velocity(self.policy, self.conditioning, transformer)

    def load(self, **seeds: int) -> dict[str, State]:
        """Gives the named adapters random weights and returns copies of them."""
        states = {}
        for adapter, seed in seeds.items():
            states[adapter] = random_state(adapters.adapter_state(self.layers, adapter), seed)
            adapters.load_state(self.layers, adapter, states[adapter])
        return states

    def trained(self) -> set[str]:
        return {name for name, parameter in self.policy.transformer.named_parameters() if parameter.requires_grad}


def velocity(policy: Flux1, conditioning: dict[str, Tensor], transformer: nn.Module | None = None) -> Tensor:
    x = policy.noise(torch.tensor([1, 2, 3]))
    with torch.no_grad():
        return policy.velocity(transformer or policy.transformer, x, torch.tensor(0.7), conditioning)


@pytest.fixture
def adapted(nano_folder: str) -> Adapted:
    policy = load_policy(nano_folder)
    conditioning = policy.encode(PROMPTS)
    base = velocity(policy, conditioning)
    return Adapted(policy, adapters.add_adapters(policy.transformer, lora_config(), seed=5), conditioning, base)


def test_the_adapters_start_equal_and_without_effect(adapted: Adapted) -> None:
    assert sorted(adapted.layers) == ADAPTED
    old, trained = adapters.adapter_state(adapted.layers, OLD), adapters.adapter_state(adapted.layers, TRAINED)
    for name, value in trained.items():
        assert torch.equal(value, old[name]) and value.data_ptr() != old[name].data_ptr()
        assert ("lora_B" in name) == (not value.any())
    assert torch.equal(adapted.velocity(), adapted.base)
    with adapters.active_adapter(adapted.policy.transformer, adapted.layers, OLD) as transformer:
        assert torch.equal(adapted.velocity(transformer), adapted.base)


def test_adapters_are_float32_beside_a_bfloat16_base(adapted: Adapted) -> None:
    for adapter in (OLD, TRAINED):
        assert {value.dtype for value in adapters.adapter_state(adapted.layers, adapter).values()} == {torch.float32}
    assert {layer.get_base_layer().weight.dtype for layer in adapted.layers.values()} == {torch.bfloat16}
    assert adapted.policy.transformer.dtype == torch.bfloat16  # embeddings and latents are cast to it


def test_initial_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone(nano_folder: str) -> None:
    def first(seed: int) -> Tensor:
        layers = adapters.add_adapters(load_policy(nano_folder).transformer, lora_config(), seed)
        return adapters.adapter_state(layers, TRAINED)[f"{ADAPTED[0]}.lora_A.weight"]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = first(7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first(7), one) and not torch.equal(first(8), one)


def test_only_the_default_adapter_ever_trains(adapted: Adapted) -> None:
    expected = {f"{name}.lora_{side}.default.weight" for name in ADAPTED for side in "AB"}
    assert adapted.trained() == expected
    for adapter in (OLD, TRAINED):
        with adapters.active_adapter(adapted.policy.transformer, adapted.layers, adapter):
            assert adapted.trained() <= expected
        assert adapted.trained() == expected
        with pytest.raises(KeyError), adapters.active_adapter(adapted.policy.transformer, adapted.layers, adapter):
            raise KeyError
        assert adapted.trained() == expected


def test_using_an_adapter_lasts_as_long_as_the_block_even_when_it_raises(adapted: Adapted) -> None:
    adapted.load(default=1, old=2)
    trained = adapted.velocity()
    with adapters.active_adapter(adapted.policy.transformer, adapted.layers, OLD) as transformer:
        old = adapted.velocity(transformer)
    assert torch.equal(adapted.velocity(), trained)
    with pytest.raises(KeyError), adapters.active_adapter(adapted.policy.transformer, adapted.layers, OLD):
        raise KeyError
    assert torch.equal(adapted.velocity(), trained)
    for one, other in ((trained, old), (trained, adapted.base), (old, adapted.base)):
        assert (one - other).abs().max() > 0.01


def test_gradients_reach_the_default_adapter_and_nothing_else(adapted: Adapted) -> None:
    adapted.load(default=1, old=2)
    x, policy = adapted.policy.noise(torch.tensor([1, 2, 3])), adapted.policy
    with torch.no_grad(), adapters.active_adapter(policy.transformer, adapted.layers, OLD) as transformer:
        target = policy.velocity(transformer, x, torch.tensor(0.7), adapted.conditioning)
    output = policy.velocity(policy.transformer, x, torch.tensor(0.7), adapted.conditioning)
    (output - target).square().mean().backward()
    for name, parameter in policy.transformer.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == (".default." in name), name


@pytest.mark.parametrize("decay", [0.0, 0.25, 0.9, 1.0])
def test_the_old_adapter_moves_towards_the_trained_one(adapted: Adapted, decay: float) -> None:
    states = adapted.load(default=1, old=2)
    places = {name: value.data_ptr() for name, value in adapters.adapter_state(adapted.layers, OLD).items()}
    adapters.update_old_adapter(adapted.layers, decay)
    for name, value in adapters.adapter_state(adapted.layers, OLD).items():
        expected = decay * states[OLD][name].double() + (1 - decay) * states[TRAINED][name].double()
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-6)
        assert value.data_ptr() == places[name]
    for name, value in adapters.adapter_state(adapted.layers, TRAINED).items():
        assert torch.equal(value, states[TRAINED][name])


def test_merged_weights_are_those_that_peft_would_merge(adapted: Adapted) -> None:
    states = adapted.load(default=1, old=2)
    for adapter in (OLD, TRAINED):
        merged = dict(adapters.merged_weights(adapted.layers, states[adapter]))
        assert sorted(merged) == ADAPTED
        for name, weight in merged.items():
            layer = adapted.layers[name]
            expected = layer.get_base_layer().weight.float() + layer.get_delta_weight(adapter)
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)


def test_the_update_is_alpha_over_r_times_b_times_a(adapted: Adapted) -> None:
    (state,) = adapted.load(default=3).values()
    name = ADAPTED[0]
    base = adapted.layers[name].get_base_layer().weight.double()
    update = (8 / 4) * state[f"{name}.lora_B.weight"].double() @ state[f"{name}.lora_A.weight"].double()
    merged = dict(adapters.merged_weights(adapted.layers, state))[name]
    torch.testing.assert_close(merged.double(), base + update, rtol=0, atol=1e-6)


def test_norms_of_updates_are_those_of_the_dense_matrices(adapted: Adapted) -> None:
    states = adapted.load(default=1, old=1)
    for value in adapters.adapter_state(adapted.layers, OLD).values():
        value.mul_(1 + 1e-5)  # float32 cancellation would hide the difference
    states[OLD] = adapters.adapter_state(adapted.layers, OLD)

    def dense(adapter: str) -> Tensor:
        def update(name: str, layer: LoraLayer) -> Tensor:
            up, down = (states[adapter][f"{name}.lora_{part}.weight"].double() for part in "BA")
            return (layer.scaling[TRAINED] * up @ down).flatten()

        return torch.cat([update(name, layer) for name, layer in adapted.layers.items()])

    update, difference = adapters.update_norms(adapted.layers)
    assert float(update) == pytest.approx(float(dense(TRAINED).norm()), rel=1e-5)
    assert float(difference) == pytest.approx(float((dense(TRAINED) - dense(OLD)).norm()), rel=5e-3)
    base = torch.cat([layer.get_base_layer().weight.flatten() for layer in adapted.layers.values()])
    assert float(adapters.base_norm(adapted.layers)) == pytest.approx(float(base.double().norm()), rel=1e-5)


def test_a_saved_lora_is_read_from_its_folder_and_its_file(adapted: Adapted, tmp_path: Path) -> None:
    adapted.load(default=1)
    state = adapters.adapter_state(adapted.layers, TRAINED)
    adapted.policy.save_lora(tmp_path, state, lora_config())
    for path in (tmp_path, tmp_path / "pytorch_lora_weights.safetensors"):
        found = adapters.read_lora(path, adapted.layers)
        assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 3}, "its rank is 3, and that of the run 4. Set model.lora.rank=3."),
        ({"alpha": 5}, "its alpha is 5, and that of the run 8. Set model.lora.alpha=5."),
        (
            {"targets": ["to_q"]},
            "it adapts other layers; .*to_k.lora_A.weight is only in the run. Set model.lora.target",
        ),
    ],
)
def test_a_lora_of_another_kind_is_refused(
    adapted: Adapted, nano_folder: str, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    other = load_policy(nano_folder)
    config = lora_config(**change)
    layers = adapters.add_adapters(other.transformer, config, seed=0)
    other.save_lora(tmp_path, adapters.adapter_state(layers, TRAINED), config)
    with pytest.raises(UserError, match=f"model.init_lora={tmp_path} is invalid: {message}"):
        adapters.read_lora(tmp_path, adapted.layers)


@pytest.mark.parametrize(
    ("metadata", "change", "message"),
    [
        ("[]", None, "its lora_adapter_metadata must be a JSON object. Name a LoRA"),
        ("[" * 100_000, None, "cannot be read"),
        ('{"transformer.lora_alpha": "8"}', None, "its alpha must be a finite number; got '8'. Name a LoRA"),
        ('{"transformer.lora_alpha": true}', None, "its alpha must be a finite number; got True"),
        ('{"transformer.lora_alpha": NaN}', None, "its alpha must be a finite number; got nan"),
        (None, lambda value: value.to(torch.int8), r".*lora_A.weight .torch.int8. must have finite floating-point"),
        (None, lambda value: value / 0, r".*lora_A.weight .torch.float32. must have finite floating-point"),
    ],
)
def test_a_lora_file_that_holds_something_else_is_refused(
    adapted: Adapted, tmp_path: Path, metadata: str | None, change: Any, message: str
) -> None:
    state = adapters.adapter_state(adapted.layers, TRAINED)
    adapted.policy.save_lora(tmp_path, state, lora_config())
    file = tmp_path / "pytorch_lora_weights.safetensors"
    with safe_open(file, framework="pt") as saved:
        tensors, known = {name: saved.get_tensor(name) for name in saved.keys()}, saved.metadata()
    tensors = {name: value if change is None else change(value) for name, value in tensors.items()}
    save_file(tensors, file, known if metadata is None else known | {"lora_adapter_metadata": metadata})
    with pytest.raises(UserError, match=f"model.init_lora={tmp_path} is invalid: .*{message}"):
        adapters.read_lora(tmp_path, adapted.layers)


def test_a_rank_above_the_width_of_a_layer_is_refused(nano_folder: str) -> None:
    transformer = load_policy(nano_folder).transformer
    with pytest.raises(
        UserError, match="model.lora.rank=33 is invalid: it must be at most 32, .* Set model.lora.rank=32"
    ):
        adapters.add_adapters(transformer, lora_config(33), seed=0)
    assert adapters.add_adapters(transformer, lora_config(32), seed=0)


def test_old_adapter_takes_other_weights_and_gets_its_own_back(nano_folder: str) -> None:
    adapted = AdaptedTransformer(load_policy(nano_folder).transformer, lora_config(), seed=0)
    state = random_state(adapted.state(OLD), 1)
    old = {name: value.clone() for name, value in adapted.state(OLD).items()}
    with adapted.old(state):
        assert all(torch.equal(value, state[name]) for name, value in adapted.state(OLD).items())
    state.popitem()
    with pytest.raises(KeyError), adapted.old(state):
        pass
    assert all(torch.equal(value, old[name]) for name, value in adapted.state(OLD).items())


def test_a_damaged_lora_is_refused(adapted: Adapted, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="x.safetensors cannot be read"):
        adapters.read_lora(tmp_path / "x.safetensors", adapted.layers)


def test_a_state_loads_back_under_its_own_names(adapted: Adapted) -> None:
    (state,) = adapted.load(default=4).values()
    assert sorted(state) == sorted(f"{name}.lora_{side}.weight" for name in ADAPTED for side in "AB")
    adapters.load_state(adapted.layers, OLD, adapters.adapter_state(adapted.layers, TRAINED))
    for name, value in adapters.adapter_state(adapted.layers, OLD).items():
        assert torch.equal(value, state[name])


def test_a_state_lacking_a_layer_is_refused(adapted: Adapted) -> None:
    (state,) = adapted.load(default=4).values()
    del state[f"{ADAPTED[0]}.lora_A.weight"]
    with pytest.raises(KeyError, match=ADAPTED[0]):
        adapters.load_state(adapted.layers, OLD, state)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fp32_products", [True, False])
def test_a_fused_layer_is_peft_s_in_value_and_gradients_up_to_rounding(bias: bool, fp32_products: bool) -> None:
    torch.manual_seed(0)

    class Model(ModelMixin, PeftAdapterMixin):
        def __init__(self) -> None:
            super().__init__()
            self.to_q = nn.Linear(24, 40, bias=bias)

    model = Model().bfloat16().requires_grad_(False)
    if fp32_products:
        use_fp32_products(model)
    layer = adapters.add_adapters(model, LoraConfig(r=4, lora_alpha=8, target_modules=["to_q"]), seed=0)["to_q"]
    assert type(layer) is adapters.FusedLoRALinear
    nn.init.normal_(layer.lora_B[TRAINED].weight)
    x = torch.randn(3, 5, 24).bfloat16()
    upstream = torch.randn(3, 5, 40).bfloat16()

    def outputs(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = layer(x)
        found = torch.autograd.grad(y, [x, layer.lora_A[TRAINED].weight, layer.lora_B[TRAINED].weight], upstream.to(y))
        return [y.detach(), *found]

    fused = outputs(x)
    layer.__class__ = peft_lora.Linear
    expected = outputs(x)
    assert [value.dtype for value in fused] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    tolerance = 2**-8 if fp32_products else 2**-6
    for ours, theirs in zip(fused, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())
    model.float()
    layer.__class__ = adapters.FusedLoRALinear
    if not fp32_products:  # in float32 the two differ in the order of sums only
        fused = outputs(x.float())
        layer.__class__ = peft_lora.Linear
        for ours, theirs in zip(fused, outputs(x.float()), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
