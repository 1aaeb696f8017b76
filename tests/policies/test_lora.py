"""Two adapters on one transformer: which one acts, which one trains, and what the merged weights are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import ModelMixin
from diffusers.loaders import PeftAdapterMixin
from nano import PROMPTS, WIDTH, load_nano, load_policy, lora_config, random_state
from peft import LoraConfig
from peft.tuners import lora as peft_lora
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.names import OLD, TRAINED
from solrl_lightning.policies import lora
from solrl_lightning.policies.bf16 import use_fp32_products
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.policies.lora import State
from solrl_lightning.training.transformers import AdaptedTransformer

ATTENTION = [f"transformer_blocks.0.attn.to_{part}" for part in ("k", "out.0", "q", "v")]
ADAPTED = [f"single_transformer_blocks.0.attn.to_{part}" for part in "kqv"] + ATTENTION


class Adapted(NamedTuple):
    policy: Flux1
    layers: dict[str, LoraLayer]
    conditioning: dict[str, Tensor]

    def velocity(self) -> Tensor:
        x = self.policy.noise(torch.tensor([1, 2, 3]))
        return self.policy.velocity(self.policy.transformer, x, torch.tensor(0.7), self.conditioning)

    def state(self, adapter: str) -> State:
        return lora.adapter_state(self.layers, adapter)

    def load(self, **seeds: int) -> dict[str, State]:
        """Gives the named adapters random weights and returns copies of them."""
        states = {adapter: random_state(self.state(adapter), seed) for adapter, seed in seeds.items()}
        for adapter, state in states.items():
            lora.load_state(self.layers, adapter, state)
        return states

    def trained(self) -> set[str]:
        return {name for name, parameter in self.policy.transformer.named_parameters() if parameter.requires_grad}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def adapted(nano_folder: str) -> Adapted:
    policy = load_policy(nano_folder)
    layers = lora.add_adapters(policy.transformer, lora_config(), seed=5)
    return Adapted(policy, layers, policy.encode(PROMPTS))


def test_adapters_start_equal_in_float32_and_without_effect(adapted: Adapted, nano_folder: str) -> None:
    assert sorted(adapted.layers) == ADAPTED
    old, trained = adapted.state(OLD), adapted.state(TRAINED)
    assert sorted(trained) == sorted(f"{name}.lora_{side}.weight" for name in ADAPTED for side in "AB")
    for name, value in trained.items():
        assert torch.equal(value, old[name]) and value.data_ptr() != old[name].data_ptr()
        assert ("lora_B" in name) == (not value.any())
        assert value.dtype == old[name].dtype == torch.float32
    assert {layer.get_base_layer().weight.dtype for layer in adapted.layers.values()} == {torch.bfloat16}
    assert adapted.policy.transformer.dtype == torch.bfloat16  # embeddings and latents are cast to it
    with torch.no_grad():
        base = adapted._replace(policy=load_policy(nano_folder)).velocity()
        assert torch.equal(adapted.velocity(), base)
        with lora.active_adapter(adapted.policy.transformer, adapted.layers, OLD):
            assert torch.equal(adapted.velocity(), base)


def test_initial_weights_depend_on_the_seed_only(nano_folder: str) -> None:
    def first(seed: int) -> Tensor:
        layers = lora.add_adapters(load_policy(nano_folder).transformer, lora_config(), seed)
        return lora.adapter_state(layers, TRAINED)[f"{ADAPTED[0]}.lora_A.weight"]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = first(7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first(7), one) and not torch.equal(first(8), one)


def test_active_adapter_lasts_as_long_as_the_block_and_only_default_trains(adapted: Adapted) -> None:
    expected = {f"{name}.lora_{side}.default.weight" for name in ADAPTED for side in "AB"}
    transformer = adapted.policy.transformer
    with torch.no_grad():
        base = adapted.velocity()
        adapted.load(default=1, old=2)
        trained = adapted.velocity()
        with lora.active_adapter(transformer, adapted.layers, OLD) as active:
            old = adapted.velocity()
            assert active is transformer and adapted.trained() <= expected
        assert torch.equal(adapted.velocity(), trained) and adapted.trained() == expected
        with pytest.raises(KeyError), lora.active_adapter(transformer, adapted.layers, OLD):
            raise KeyError
        assert torch.equal(adapted.velocity(), trained) and adapted.trained() == expected
    for one, other in ((trained, old), (trained, base), (old, base)):
        assert (one - other).abs().max() > 0.01
    (adapted.velocity() - old).square().mean().backward()
    for name, parameter in transformer.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == (".default." in name), name


@pytest.mark.parametrize("decay", [0.0, 0.25, 1.0])
def test_old_adapter_moves_towards_the_trained_one(adapted: Adapted, decay: float) -> None:
    states = adapted.load(default=1, old=2)
    places = {name: value.data_ptr() for name, value in adapted.state(OLD).items()}
    lora.follow(adapted.state(OLD), adapted.state(TRAINED), decay)
    for name, value in adapted.state(OLD).items():
        expected = decay * states[OLD][name].double() + (1 - decay) * states[TRAINED][name].double()
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-6)
        assert value.data_ptr() == places[name]
        assert torch.equal(adapted.state(TRAINED)[name], states[TRAINED][name])


def update(state: State, name: str) -> Tensor:
    """alpha / r times B A."""
    up, down = (state[f"{name}.lora_{part}.weight"].double() for part in "BA")
    return (8 / 4) * up @ down


def test_merged_weights_are_base_plus_update_as_in_peft(adapted: Adapted) -> None:
    states = adapted.load(default=1, old=2)
    for adapter, state in states.items():
        merged = {name.removesuffix(".weight"): weight for name, weight in lora.merged_weights(adapted.layers, state)}
        assert sorted(merged) == ADAPTED
        for name, weight in merged.items():
            layer = adapted.layers[name]
            base = layer.get_base_layer().weight
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, base.float() + layer.get_delta_weight(adapter), rtol=0, atol=1e-6)
            torch.testing.assert_close(weight.double(), base.double() + update(state, name), rtol=0, atol=1e-6)


def test_norms_of_updates_are_those_of_the_dense_matrices(adapted: Adapted) -> None:
    adapted.load(default=1, old=1)
    for value in adapted.state(OLD).values():
        value.mul_(1 + 1e-5)  # float32 cancellation would hide the difference

    def dense(adapter: str) -> Tensor:
        state = adapted.state(adapter)
        return torch.cat([update(state, name).flatten() for name in adapted.layers])

    norm, difference = lora.update_norms(adapted.layers)
    assert float(norm) == pytest.approx(float(dense(TRAINED).norm()), rel=1e-5)
    assert float(difference) == pytest.approx(float((dense(TRAINED) - dense(OLD)).norm()), rel=5e-3)
    base = torch.cat([layer.get_base_layer().weight.flatten() for layer in adapted.layers.values()])
    assert float(lora.base_norm(adapted.layers)) == pytest.approx(float(base.double().norm()), rel=1e-5)


def test_saved_lora_is_read_from_its_folder_and_its_file(adapted: Adapted, tmp_path: Path) -> None:
    (state,) = adapted.load(default=1).values()
    adapted.policy.save_lora(tmp_path, state, lora_config())
    for path in (tmp_path, tmp_path / "pytorch_lora_weights.safetensors"):
        saved = lora.read_lora(path, adapted.layers, Flux1.pipeline_class)
        assert same(saved, state)


def kohya(layer: str, out_features: int, alpha: float, generator: torch.Generator, rank: int = 4) -> dict[str, Tensor]:
    """A layer of a LoRA in the names of sd-scripts: the update is alpha / rank up @ down."""
    down = torch.randn(rank, WIDTH, generator=generator)
    up = torch.randn(out_features, rank, generator=generator)
    weights = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(alpha)}
    return {f"lora_unet_{layer}.{part}": value for part, value in weights.items()}


def test_lora_of_kohya_gives_its_updates(nano_folder: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = kohya("double_blocks_0_img_attn_qkv", 3 * WIDTH, 2.0, generator)
    tensors |= kohya("double_blocks_0_img_attn_proj", WIDTH, 8.0, generator)
    save_file(tensors, tmp_path / "kohya.safetensors")
    parts = [f"transformer_blocks.0.attn.to_{part}" for part in ("q", "k", "v", "out.0")]
    layers = lora.add_adapters(load_policy(nano_folder).transformer, lora_config(alpha=4, targets=parts), seed=0)
    state = lora.read_lora(tmp_path / "kohya.safetensors", layers, Flux1.pipeline_class)
    products = [
        factor
        * tensors[f"lora_unet_double_blocks_0_{name}.lora_up.weight"].double()
        @ tensors[f"lora_unet_double_blocks_0_{name}.lora_down.weight"].double()
        for name, factor in (("img_attn_qkv", 2.0 / 4), ("img_attn_proj", 8.0 / 4))
    ]
    for name, expected in zip(parts, [*products[0].chunk(3), products[1]], strict=True):
        actual = state[f"{name}.lora_B.weight"].double() @ state[f"{name}.lora_A.weight"].double()
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_lora_of_ai_toolkit_is_the_one_of_diffusers(folder_of: Callable[[str], str], tmp_path: Path) -> None:
    policy = load_nano("z_image", folder_of("z_image"))
    layers = lora.add_adapters(policy.transformer, lora_config(alpha=4, targets=["to_q", "to_v"]), seed=0)
    state = random_state(lora.adapter_state(layers, TRAINED), 1)
    save_file({f"diffusion_model.{name}": value for name, value in state.items()}, tmp_path / "a.safetensors")
    assert same(lora.read_lora(tmp_path / "a.safetensors", layers, policy.pipeline_class), state)
    alphas = {f"transformer.{name}.alpha": torch.tensor(8.0) for name in layers}  # an alpha of each layer
    save_file({f"transformer.{name}": value for name, value in state.items()} | alphas, tmp_path / "b.safetensors")
    doubled = {name: value * 2 if "lora_B" in name else value for name, value in state.items()}
    assert same(lora.read_lora(tmp_path / "b.safetensors", layers, policy.pipeline_class), doubled)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lora_unet_double_blocks_0_img_attn_qkv.dora_scale", "it is a DoRA"),
        ("lora_unet_nothing.alpha", "diffusers finds no LoRA of FluxPipeline in it"),
    ],
)
def test_lora_with_unknown_names_raises(adapted: Adapted, tmp_path: Path, name: str, message: str) -> None:
    save_file({name: torch.ones(4)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=message):
        lora.read_lora(tmp_path / "other.safetensors", adapted.layers, Flux1.pipeline_class)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 3}, "its rank is 3, and that of the run 4. Set model.lora.rank=3."),
        ({"alpha": 5}, "its alpha is 5, and that of the run 8. Set model.lora.alpha=5."),
        ({"targets": ["to_q"]}, "other layers; .*to_k.lora_A.weight is only in the run. Set model.lora.target"),
    ],
)
def test_lora_of_another_kind_raises(
    adapted: Adapted, nano_folder: str, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    policy, config = load_policy(nano_folder), lora_config(**change)
    layers = lora.add_adapters(policy.transformer, config, seed=0)
    policy.save_lora(tmp_path, lora.adapter_state(layers, TRAINED), config)
    with pytest.raises(UserError, match=f"model.init_lora={tmp_path} is invalid: .*{message}"):
        lora.read_lora(tmp_path, adapted.layers, Flux1.pipeline_class)


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
def test_lora_file_with_other_contents_raises(
    adapted: Adapted, tmp_path: Path, metadata: str | None, change: Any, message: str
) -> None:
    adapted.policy.save_lora(tmp_path, adapted.state(TRAINED), lora_config())
    file = tmp_path / "pytorch_lora_weights.safetensors"
    with safe_open(file, framework="pt") as saved:
        tensors, known = {name: saved.get_tensor(name) for name in saved.keys()}, saved.metadata()
    tensors = {name: value if change is None else change(value) for name, value in tensors.items()}
    save_file(tensors, file, known if metadata is None else known | {"lora_adapter_metadata": metadata})
    with pytest.raises(UserError, match=f"model.init_lora={tmp_path} is invalid: .*{message}"):
        lora.read_lora(tmp_path, adapted.layers, Flux1.pipeline_class)
    save_file({"transformer.proj_out.weight": torch.ones(2)}, file)
    with pytest.raises(UserError, match="proj_out.weight is no weight of a LoRA. Name a LoRA that diffusers has saved"):
        lora.read_lora(file, adapted.layers, Flux1.pipeline_class)
    file.write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=f"{file.name} cannot be read"):
        lora.read_lora(file, adapted.layers, Flux1.pipeline_class)


def test_rank_above_the_width_of_a_layer_raises(nano_folder: str) -> None:
    transformer, message = load_policy(nano_folder).transformer, "rank=33 is invalid: .* Set model.lora.rank=32 or less"
    with pytest.raises(UserError, match=message):
        lora.add_adapters(transformer, lora_config(33), seed=0)
    assert lora.add_adapters(transformer, lora_config(32), seed=0)


def test_old_adapter_has_other_weights_for_a_block_only(nano_folder: str) -> None:
    adapted = AdaptedTransformer(load_policy(nano_folder).transformer, lora_config(), seed=0)
    state = random_state(adapted.state(OLD), 1)
    old = {name: value.clone() for name, value in adapted.state(OLD).items()}
    with adapted.old(state):
        assert all(torch.equal(value, state[name]) for name, value in adapted.state(OLD).items())
    state.popitem()
    with pytest.raises(KeyError), adapted.old(state):
        pass
    with pytest.raises(KeyError):
        lora.load_state(adapted.lora_layers, TRAINED, state)
    assert all(torch.equal(value, old[name]) for name, value in adapted.state(OLD).items())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fp32_products", [True, False])
def test_fused_layer_matches_peft_in_value_and_gradients_up_to_rounding(bias: bool, fp32_products: bool) -> None:
    torch.manual_seed(0)

    class Model(ModelMixin, PeftAdapterMixin):
        def __init__(self) -> None:
            super().__init__()
            self.to_q = nn.Linear(24, 40, bias=bias)

    model = Model().bfloat16().requires_grad_(False)
    if fp32_products:
        use_fp32_products(model)
    layer = lora.add_adapters(model, LoraConfig(r=4, lora_alpha=8, target_modules=["to_q"]), seed=0)["to_q"]
    assert type(layer) is lora.FusedLoRALinear
    nn.init.normal_(layer.lora_B[TRAINED].weight)
    inputs, upstream = torch.randn(3, 5, 24).bfloat16(), torch.randn(3, 5, 40).bfloat16()
    tolerance = 2**-8 if fp32_products else 2**-6

    def outputs(layer_cls: type[LoraLayer], x: Tensor) -> list[Tensor]:
        layer.__class__ = layer_cls
        x = x.detach().requires_grad_()
        y = layer(x)
        weights = [layer.lora_A[TRAINED].weight, layer.lora_B[TRAINED].weight]
        return [y.detach(), *torch.autograd.grad(y, [x, *weights], upstream.to(y))]

    fused, expected = (outputs(cls, inputs) for cls in (lora.FusedLoRALinear, peft_lora.Linear))
    assert [value.dtype for value in fused] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for ours, theirs in zip(fused, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())
    if not fp32_products:  # in float32 the two differ in the order of sums only
        model.float()
        fused, expected = (outputs(cls, inputs.float()) for cls in (lora.FusedLoRALinear, peft_lora.Linear))
        for ours, theirs in zip(fused, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
