"""Two adapters on one transformer: which one acts, which one trains, and what the merged weights are."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import Flux2KleinPipeline, ModelMixin
from diffusers.loaders import PeftAdapterMixin
from nano import PROMPTS, WIDTH, build_nano_sana, load_model, lora_config, prompts_of, random_state, relative_error
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners import lora as peft_lora
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from take_away import POINTER
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.names import LORA_FILES, OLD, TRAINED
from solrl_lightning.policies import lora
from solrl_lightning.policies.bf16 import use_fp32_products
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.policies.lora import State
from solrl_lightning.policies.lora_files import read_lora_file
from solrl_lightning.training.transformers import AdaptedTransformer

ATTENTION = [f"transformer_blocks.0.attn.to_{part}" for part in ("k", "out.0", "q", "v")]
ADAPTED = [f"single_transformer_blocks.0.attn.to_{part}" for part in "kqv"] + ATTENTION


class Adapted(NamedTuple):
    model: Flux1
    layers: dict[str, LoraLayer]
    conditioning: dict[str, Tensor]

    def velocity(self) -> Tensor:
        x = self.model.noise(torch.tensor([1, 2, 3]))
        return self.model.velocity(self.model.transformer, x, torch.tensor(0.7), self.conditioning)

    def state(self, adapter: str) -> State:
        return lora.adapter_state(self.layers, adapter)

    def load(self, **seeds: int) -> dict[str, State]:
        """Gives the named adapters random weights and returns copies of them."""
        states = {adapter: random_state(self.state(adapter), seed) for adapter, seed in seeds.items()}
        for adapter, state in states.items():
            lora.load_state(self.layers, adapter, state)
        return states

    def trained(self) -> set[str]:
        return {name for name, parameter in self.model.transformer.named_parameters() if parameter.requires_grad}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def adapted(nano_folder: str) -> Adapted:
    model = load_model(nano_folder)
    layers = lora.add_adapters(model.transformer, lora_config(), seed=5)
    return Adapted(model, layers, model.encode(prompts_of(PROMPTS)))


def test_adapters_start_equal_in_float32_and_without_effect(adapted: Adapted, nano_folder: str) -> None:
    assert sorted(adapted.layers) == ADAPTED
    old, trained = adapted.state(OLD), adapted.state(TRAINED)
    assert sorted(trained) == sorted(f"{name}.lora_{side}.weight" for name in ADAPTED for side in "AB")
    for name, value in trained.items():
        assert torch.equal(value, old[name]) and value.data_ptr() != old[name].data_ptr()
        assert ("lora_B" in name) == (not value.any())
        assert value.dtype == old[name].dtype == torch.float32
    assert {layer.get_base_layer().weight.dtype for layer in adapted.layers.values()} == {torch.bfloat16}
    assert adapted.model.transformer.dtype == torch.bfloat16  # embeddings and latents are cast to it
    with torch.no_grad():
        base = adapted._replace(model=load_model(nano_folder)).velocity()
        assert torch.equal(adapted.velocity(), base)
        with lora.active_adapter(adapted.model.transformer, adapted.layers, OLD):
            assert torch.equal(adapted.velocity(), base)


def test_initial_weights_depend_on_the_seed_only(nano_folder: str) -> None:
    def first(seed: int) -> Tensor:
        layers = lora.add_adapters(load_model(nano_folder).transformer, lora_config(), seed)
        return lora.adapter_state(layers, TRAINED)[f"{ADAPTED[0]}.lora_A.weight"]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = first(7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first(7), one) and not torch.equal(first(8), one)


def test_active_adapter_lasts_as_long_as_the_block_and_only_default_trains(adapted: Adapted) -> None:
    expected = {f"{name}.lora_{side}.default.weight" for name in ADAPTED for side in "AB"}
    transformer = adapted.model.transformer
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
    AdaptedTransformer.update_old(adapted, decay)  # type: ignore[arg-type]  # it has `state`
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
    bases = [layer.get_base_layer().weight for layer in adapted.layers.values()]
    whole = torch.cat([weight.flatten() for weight in bases]).double().norm()
    assert float(lora.norm_of_all(bases)) == pytest.approx(float(whole), rel=1e-5)


class Files(NamedTuple):
    """Adapters of rank 4 and alpha 8 in float32, and random weights that tests write into files; none changes them."""

    model: Flux1
    layers: dict[str, LoraLayer]
    state: State

    def read(self, path: Path) -> State:
        return lora.read_lora(path, self.model.transformer, self.layers, self.model.pipeline_class)


@pytest.fixture(scope="module")
def files(nano_folder: str) -> Files:
    model = load_model(nano_folder, dtypes={"default": "float32"})
    layers = lora.add_adapters(model.transformer, lora_config(), seed=5)
    return Files(model, layers, random_state(lora.adapter_state(layers, TRAINED), 1))


def metadata(**config: Any) -> dict[str, str]:
    """The header of diffusers."""
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in config.items()})}


def renamed(state: State, prefix: str, down: str = "lora_A", up: str = "lora_B") -> State:
    return {prefix + name.replace("lora_A", down).replace("lora_B", up): value for name, value in state.items()}


def of_rank(state: State, rank: int) -> State:
    return {name: (value[:rank] if "lora_A" in name else value[:, :rank]).contiguous() for name, value in state.items()}


FIRST = ATTENTION[0]  # a layer with a scale of its own
TEXT = {"text_encoder.layer.lora_A.weight": torch.ones(4, 8), "lora_te1_layer.lora_up.weight": torch.ones(8, 4)}
ALPHAS = {f"transformer.{name}.alpha": torch.tensor([2.0]) for name in ADAPTED}
FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("change", "header", "scale", "scale_of_first"),
    [
        (lambda state: renamed(state, "transformer."), metadata(r=4, lora_alpha=8), 2, 2),
        (lambda state: renamed(state, "transformer."), metadata(r=4, lora_alpha=5), 5 / 4, 5 / 4),
        (lambda state: renamed(state, "transformer."), metadata(lora_alpha=8, use_rslora=True), 4, 4),
        (lambda state: renamed(state, "transformer."), metadata(lora_alpha=8, init_lora_weights="eva"), 2, 2),
        (lambda state: renamed(state, "transformer."), metadata(lora_alpha=8, init_lora_weights="Gaussian"), 2, 2),
        (lambda state: renamed(state, "transformer."), metadata(lora_alpha=8, alpha_pattern={FIRST: 2}), 2, 0.5),
        (
            lambda state: renamed(state, "transformer._orig_mod."),
            metadata(lora_alpha=8, alpha_pattern={f"_orig_mod.{FIRST}": 2}),
            2,
            0.5,
        ),
        (lambda state: renamed(state, "transformer."), {"lora_adapter_metadata": '{"lora_alpha": 8}'}, 2, 2),
        (lambda state: renamed(state, "transformer.") | TEXT, metadata(lora_alpha=8), 2, 2),
        (lambda state: renamed(state, "transformer.") | ALPHAS, {}, 0.5, 0.5),
        (lambda state: renamed(state, "transformer.") | ALPHAS, metadata(lora_alpha=8), 0.5, 0.5),
        (lambda state: {n: v.to(FLOAT8) for n, v in (renamed(state, "transformer.") | ALPHAS).items()}, {}, 0.5, 0.5),
        (lambda state: renamed(state, "transformer.", "lora_down", "lora_up") | ALPHAS, {}, 0.5, 0.5),
        (lambda state: renamed(state, "transformer.", "lora.down", "lora.up"), {}, 1, 1),
        (lambda state: renamed(state, "diffusion_model."), {}, 1, 1),
        (lambda state: renamed(state, "", "lora_A.default", "lora_B.default"), {}, 1, 1),
        (lambda state: one_trainer(state) | TEXT, {}, 0.5, 0.5),
    ],
)
def test_a_file_has_the_strength_that_its_trainer_means(
    files: Files,
    tmp_path: Path,
    change: Callable[[State], State],
    header: dict[str, str],
    scale: float,
    scale_of_first: float,
) -> None:
    tensors = change(files.state)
    save_file(tensors, tmp_path / "a.safetensors", header)
    actual = files.read(tmp_path / "a.safetensors")
    tolerance = 0.1 if any(value.dtype == FLOAT8 for value in tensors.values()) else 1e-6
    for name in ADAPTED:
        expected = (scale_of_first if name == FIRST else scale) / 2 * update(files.state, name)
        assert relative_error(update(actual, name), expected) < tolerance


def one_trainer(state: State) -> State:
    """The names of OneTrainer, with an alpha of 2 for every layer."""
    tensors = {}
    for layer in ADAPTED:
        name = f"lora_transformer_{layer.replace('.', '_')}"
        tensors |= {f"{name}.lora_down.weight": state[f"{layer}.lora_A.weight"], f"{name}.alpha": torch.tensor(2.0)}
        tensors[f"{name}.lora_up.weight"] = state[f"{layer}.lora_B.weight"]
    return tensors


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"to_q": 5}, "rank_pattern": {"to_k": 2}}]
)
def test_files_of_peft_and_diffusers_give_the_policy_that_saved_them(
    nano_folder: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """By model.init_lora, where the rank of the run is higher, and by model.fused_lora."""
    exact: dict[str, Any] = dict(dtypes={"default": "float32"})
    options: dict[str, Any] = dict(r=3, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_k"])
    torch.manual_seed(0)
    saver = load_model(nano_folder, **exact)
    peft_model = get_peft_model(saver.transformer, LoraConfig(**options | settings))
    peft_model.save_pretrained(tmp_path / "peft")
    weights = {
        name.removeprefix("base_model.model."): value for name, value in get_peft_model_state_dict(peft_model).items()
    }
    Flux1.pipeline_class.save_lora_weights(
        tmp_path / "diffusers", weights, transformer_lora_adapter_metadata=peft_model.peft_config["default"].to_dict()
    )
    compiled = shutil.copytree(tmp_path / "peft", tmp_path / "compiled") / LORA_FILES[1]  # before peft wrapped it
    names = {name: name.replace("base_model.model.", "base_model.model._orig_mod.") for name in load_file(compiled)}
    save_file({names[name]: value for name, value in load_file(compiled).items()}, compiled)
    bare = shutil.copytree(tmp_path / "peft", tmp_path / "bare") / LORA_FILES[1]  # get_peft_model_state_dict's names
    save_file({name.removeprefix("base_model.model."): value for name, value in load_file(bare).items()}, bare)
    conditioning = saver.encode(prompts_of(PROMPTS))
    expected = Adapted(saver, {}, conditioning).velocity().detach()
    for folder in ("diffusers", "peft", "compiled", "bare"):
        file = LORA_FILES[folder != "diffusers"]
        model = load_model(nano_folder, **exact)
        before = Adapted(model, {}, conditioning).velocity()
        trained = AdaptedTransformer(model.transformer, lora_config(alpha=5), 0)  # also on layers that are not in it
        trained.start_from(tmp_path / folder, model.pipeline_class)
        fused = load_model(nano_folder, fused_lora=str(tmp_path / folder / file), **exact)
        for started in (model, fused):
            actual = Adapted(started, {}, conditioning).velocity().detach()
            assert relative_error(actual - before, expected - before) < 1e-4


def test_a_saved_lora_resumes_the_policy_and_needs_no_header(files: Files, tmp_path: Path) -> None:
    """Bit for bit where alpha / rank is a power of two; its alpha is the rank, which a loader without header takes."""
    files.model.save_lora(tmp_path, files.state, lora_config())
    assert same(files.read(tmp_path), files.state)
    with safe_open(tmp_path / LORA_FILES[0], framework="pt") as opened:
        header = json.loads(opened.metadata()["lora_adapter_metadata"])
    settings = {"r", "lora_alpha", "target_modules"}  # an older peft refuses any that it does not know
    settings |= {"rank_pattern", "alpha_pattern"}  # which diffusers 0.34 to 0.38 read
    assert header.keys() == {f"transformer.{name}" for name in settings}
    tensors = load_file(tmp_path / LORA_FILES[0])
    save_file(tensors, tmp_path / "bare.safetensors")
    assert same(files.read(tmp_path / "bare.safetensors"), files.state)
    for name in ADAPTED:
        up, down = (tensors[f"transformer.{name}.lora_{part}.weight"].double() for part in "BA")
        assert torch.equal(up @ down, update(files.state, name))
    files.model.save_lora(tmp_path, files.state, lora_config(alpha=3))
    for name, value in files.read(tmp_path).items():
        factor = 3 / 8 if "lora_B" in name else 1
        torch.testing.assert_close(value, factor * files.state[name], rtol=2**-23, atol=0)


def test_a_lower_rank_keeps_the_rest_of_a_trainable(files: Files, tmp_path: Path) -> None:
    save_file(renamed(of_rank(files.state, 3), "transformer."), tmp_path / "a.safetensors")
    state, initial = files.read(tmp_path / "a.safetensors"), lora.adapter_state(files.layers, TRAINED)
    down, up = (f"{FIRST}.lora_{part}.weight" for part in "AB")
    assert torch.equal(state[down][:3], files.state[down][:3]) and torch.equal(state[down][3:], initial[down][3:])
    assert torch.equal(state[up][:, :3], files.state[up][:, :3] / 2) and not state[up][:, 3:].any()


def kohya(layer: str, out_features: int, alpha: float, generator: torch.Generator, rank: int = 4) -> dict[str, Tensor]:
    """A layer of a LoRA in the names of sd-scripts: the update is alpha / rank up @ down."""
    down = torch.randn(rank, WIDTH, generator=generator)
    up = torch.randn(out_features, rank, generator=generator)
    weights = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(alpha)}
    return {f"lora_unet_{layer}.{part}": value for part, value in weights.items()}


def test_a_layer_that_diffusers_leaves_out_is_an_error(files: Files, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for layer in ("double_blocks_0_img_attn_proj", "double_stream_modulation_img_lin"):
        tensors |= kohya(layer, WIDTH, 4.0, torch.Generator().manual_seed(0))
    save_file(tensors, file := tmp_path / "kohya.safetensors")
    with pytest.raises(UserError, match="^a: by the names .* it keeps 32 of 64 outputs, so it leaves layers out. Name"):
        read_lora_file(file, files.model.transformer, Flux2KleinPipeline, "a")


def test_lora_of_kohya_gives_its_updates(files: Files, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = kohya("double_blocks_0_img_attn_qkv", 3 * WIDTH, 2.0, generator)
    tensors |= kohya("double_blocks_0_img_attn_proj", WIDTH, 8.0, generator)
    save_file(tensors | TEXT, tmp_path / "kohya.safetensors")
    state = files.read(tmp_path / "kohya.safetensors")
    products = [
        factor
        * tensors[f"lora_unet_double_blocks_0_{name}.lora_up.weight"].double()
        @ tensors[f"lora_unet_double_blocks_0_{name}.lora_down.weight"].double()
        for name, factor in (("img_attn_qkv", 2.0 / 4), ("img_attn_proj", 8.0 / 4))
    ]
    for part, expected in zip(("q", "k", "v", "out.0"), [*products[0].chunk(3), products[1]], strict=True):
        actual = update(state, f"transformer_blocks.0.attn.to_{part}")
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


A, B = (f"transformer.{FIRST}.lora_{part}.weight" for part in "AB")
ODD = "transformer.transformer_blocks.0.attn.to_add_out"
BROAD = {f"{ODD}.lora_A.weight": torch.ones(4, WIDTH), f"{ODD}.lora_B.weight": torch.ones(WIDTH, 4)}


@pytest.mark.parametrize(
    ("change", "header", "message"),
    [
        (lambda state: {}, {"format": "pt"}, "it has no weights of the layers of .* Name a LoRA of this model."),
        (lambda state: state | {f"transformer.{FIRST}.lora_magnitude_vector": torch.ones(4)}, {}, "neither A nor B"),
        (lambda state: state, metadata(init_lora_weights="pissa_niter_16"), "its init_lora_weights is pissa_niter_16"),
        (lambda state: state, metadata(alora_invocation_tokens=[1, 2]), "it is an aLoRA"),
        (
            lambda state: {n: v for n, v in state.items() if n != B},
            {},
            f"it has A .* of {FIRST}; A and B must be",
        ),
        (
            lambda state: {"base_model.model.blocks.0.lora_A.weight": torch.ones(4, 4)},
            {},
            "base_model.model.blocks.0.*",
        ),
        (
            lambda state: {n.replace(".0.", ".7."): v for n, v in state.items()},
            {},
            "by the names to which diffusers converts its own: .*blocks.7.*; .* layer of .*, none",
        ),
        (
            lambda state: state | {B: torch.ones(9, 4)},
            {},
            r"it has A \[4, 32\] and B \[9, 4\] of .*to_k; .* the size of that layer of .*, \(32, 32\)",
        ),
        (
            lambda state: state | {A: torch.ones(4, WIDTH, dtype=torch.int8)},
            {},
            r"lora_A.weight, torch.int8 .* is neither A nor B of a LoRA in floating",
        ),
        (lambda state: state, {"lora_adapter_metadata": "[]"}, "its peft configuration must be a JSON object"),
        (lambda state: state, {"lora_adapter_metadata": "[" * 100_000}, "its peft configuration must be a JSON object"),
        (
            lambda state: of_rank(state, 0),
            metadata(lora_alpha=8),
            r"torch.float32 \[0, 32\], is neither A nor B",
        ),
        (lambda state: state, metadata(lora_alpha="8"), "its peft configuration: .*TypeError"),
        (lambda state: state, metadata(alpha_pattern={FIRST: "8"}), "its peft configuration: .*TypeError"),
        (lambda state: state, metadata(lora_alpha=math.inf), "lora_B.weight, with its alpha, must have finite values"),
        (lambda state: state, metadata(alpha_pattern={"[": 8}), "its peft configuration: .*unterminated character set"),
        (
            lambda state: {
                "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": torch.ones(WIDTH, 4),
                "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": torch.ones(4, 3 * WIDTH),
            },
            {},
            "diffusers cannot convert it: .*split_sizes",
        ),
        (
            lambda state: {n.replace("transformer.", "base_model.model.", 1): v for n, v in state.items()},
            {},
            "adapter_config.json, which has the alpha of its layers, is missing",
        ),
    ],
)
def test_what_cannot_be_read_is_named(
    files: Files, tmp_path: Path, change: Callable[[State], State], header: dict[str, str], message: str
) -> None:
    save_file(change(renamed(files.state, "transformer.")), file := tmp_path / "a.safetensors", header)
    with pytest.raises(UserError, match=f"^model.init_lora={file} is invalid: .*{message}"):
        files.read(file)


def test_the_advice_of_an_error_is_one_that_works(files: Files, nano_folder: str, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(renamed(of_rank(files.state, 4), "transformer.") | BROAD, file)
    narrow = load_model(nano_folder)
    layers = lora.add_adapters(narrow.transformer, lora_config(2, targets=["to_q"]), seed=0)
    with pytest.raises(UserError, match=r"Set model.lora.target_modules=\[.*\] model.lora.rank=4.$") as raised:
        lora.read_lora(file, narrow.transformer, layers, narrow.pipeline_class)
    targets = str(raised.value).partition("[")[2].partition("]")[0].split(",")
    wide = load_model(nano_folder)
    layers = lora.add_adapters(wide.transformer, lora_config(4, targets=targets), seed=0)
    state = lora.read_lora(file, wide.transformer, layers, wide.pipeline_class)
    assert all(state[f"{name}.lora_B.weight"].any() for name in ADAPTED)
    file.write_bytes(POINTER)
    with pytest.raises(UserError, match=f"is invalid: .*{file.name} is a pointer of git-lfs"):
        files.read(file)


def test_convolution_with_groups_is_no_target() -> None:
    """Whose update is no product of two matrices, so it cannot be merged."""
    with pytest.raises(UserError, match="convolutions without groups, .* and it has none named conv_depth. Leave it"):
        lora.add_adapters(build_nano_sana().transformer, lora_config(1, targets=["to_q", "conv_depth"]), seed=0)


def test_rank_above_the_width_of_a_layer_raises(nano_folder: str) -> None:
    transformer, message = load_model(nano_folder).transformer, "rank=33 is invalid: .* Set model.lora.rank=32 or less"
    with pytest.raises(UserError, match=message):
        lora.add_adapters(transformer, lora_config(33), seed=0)
    assert lora.add_adapters(transformer, lora_config(32), seed=0)


def test_old_adapter_has_other_weights_for_a_block_only(nano_folder: str) -> None:
    adapted = AdaptedTransformer(load_model(nano_folder).transformer, lora_config(), seed=0)
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
