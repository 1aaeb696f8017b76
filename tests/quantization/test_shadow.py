"""Properties of all backends: requantised in place, compiled once, a candidate independent of its batch.

test_gpu checks their operands on a GPU.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from exact_formats import LAYERS
from nano import PROMPTS, load_model, prompts_of, relative_error
from torch import Tensor, nn
from torch._dynamo.utils import counters

from solrl_lightning.policies import replica
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.quantization import Backend, QuantizationRule, convert, plan, resolve, transformer_engine
from solrl_lightning.quantization.nvfp4 import fake_quantize, quantize
from solrl_lightning.quantization.scaled_linear import NVFP4Linear
from solrl_lightning.quantization.transformer_engine import ROLLOUT_RECIPE, TransformerEngineLinear
from solrl_lightning.rollout.chunks import BatchSize, iter_sampled_chunks
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.seeds import pool_seeds


class Block(nn.Module):
    """Uses linear layers as attention and convolutions do, with one input for several of them."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(64, 64), nn.Linear(64, 64)
        self.conv = nn.Conv2d(64, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.to_q(x) * self.to_k(x)
        return self.conv(tokens.unflatten(1, (4, -1)).permute(0, 3, 1, 2))


def block(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block().requires_grad_(False)


def shadow(layer_cls: Any, seed: int = 0) -> Block:
    converted, backend = block(seed), Backend("precision", "backend", layer_cls, "", 8)
    convert(converted, plan(converted, QuantizationRule(["*"]), backend), backend)
    return converted


@pytest.mark.parametrize("layer_cls", LAYERS)
def test_requantize_does_not_recompile(layer_cls: Any) -> None:
    torch._dynamo.reset()
    counters.clear()
    converted, x = shadow(layer_cls), torch.randn(2, 16, 64)
    compiled = torch.compile(converted, backend="eager", fullgraph=True, dynamic=False)
    results = [compiled(x)]
    for seed in (1, 2, 3):
        weights = [(name, parameter) for name, parameter in block(seed).named_parameters() if "weight" in name]
        for name, weight in weights[:seed]:  # one layer more each time
            replica.write_parameters(converted, [(name, weight)])
        results.append(compiled(x))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    fresh = shadow(layer_cls, seed=3)
    for name, module in fresh.named_modules():
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(converted.get_submodule(name).bias)  # requantize_ got the weight only
    torch.testing.assert_close(results[-1], fresh(x), rtol=2**-6, atol=2**-6)
    assert all(not one.equal(other) for one, other in zip(results[1:], results, strict=False))


@pytest.mark.parametrize("layer_cls", LAYERS)
def test_token_is_independent_of_batch(layer_cls: Any) -> None:
    layer, x = layer_cls(block().to_q), torch.randn(33, 64)
    together = layer(torch.cat((x, 100 * x)).unflatten(0, (2, 33)))
    for rows in (1, 16, 33):
        torch.testing.assert_close(together[0, :rows], layer(x[:rows]), rtol=2**-20, atol=2**-20)


@pytest.fixture(scope="module")
def tiny() -> Flux1:
    return load_model("tiny")


@pytest.mark.parametrize("precision", ["nvfp4", "int8"])
def test_candidate_is_independent_of_batch_and_position(tiny: Flux1, precision: str) -> None:
    backend = resolve(precision, "emulated", torch.device("cpu"))
    converted = replica.clone_sharing_weights(tiny.transformer)
    rule = QuantizationRule(["transformer_blocks.*", "single_*"])
    convert(converted, plan(converted, rule, backend), backend)
    prompts, stage = (
        EncodedPrompts(prompts_of(PROMPTS), tiny.encode(prompts_of(PROMPTS))),
        Stage(sampler="merged", steps=3, solver="euler"),
    )

    def latents(seeds: Tensor, batch: int) -> Tensor:
        chunks = iter_sampled_chunks(tiny, converted, BatchSize(batch, False), stage, prompts, seeds)
        return torch.cat([chunk.state.x for chunk in chunks]).unflatten(0, tuple(seeds.shape))

    seeds = pool_seeds(0, 0, PROMPTS, 4)
    together = latents(seeds, 12)
    # Another order of a BF16 sum may move a value by a step of its format; one scale for a batch would give 0.1.
    assert relative_error(latents(seeds, 5), together) < 0.03
    assert relative_error(latents(seeds.flip(1), 12).flip(1), together) < 0.03


# A fake Transformer Engine: the same calls, quantised by the emulation.


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Record calls of a fake Transformer Engine that raises where the real one does, by its source."""
    record = SimpleNamespace(recipes=[], rows=[], quantised=0, inside=None, initialising=None)

    class Quantised(nn.Parameter):
        """Parameter whose copy_ quantises."""

        def copy_(self, source: Tensor) -> Tensor:  # type: ignore[override]
            record.quantised += 1
            values, scale = fake_quantize(source, torch.float32)
            self.data.copy_(values * scale)
            return self

    class Linear(nn.Module):
        def __init__(
            self, in_features: int, out_features: int, bias: bool, init_method: Any, params_dtype: Any, device: Any
        ) -> None:
            assert record.initialising and not torch.is_grad_enabled()  # with gradients it would keep two copies
            super().__init__()
            self.use_bias = bias
            self.weight = Quantised(init_method(torch.empty(out_features, in_features, device=device)))
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else torch.Tensor()

        def forward(self, x: Tensor) -> Tensor:
            assert record.inside and x.dtype == torch.bfloat16 and x.is_contiguous()
            assert not torch.is_grad_enabled()
            if len(x) % 8 or x.shape[-1] % 16:
                raise ValueError("dimensions")
            record.rows.append(len(x))
            values, scale = fake_quantize(x, torch.float32)
            return nn.functional.linear(values * scale, self.weight, self.bias.float()).bfloat16()

    @contextmanager
    def during(name: str, value: Any) -> Iterator[None]:
        setattr(record, name, value)
        yield
        setattr(record, name, None)

    def recipe(**arguments: bool) -> dict[str, bool]:
        record.recipes.append(arguments)
        return arguments

    pytorch: Any = SimpleNamespace(
        Linear=Linear,
        autocast=lambda enabled, recipe: during("inside", enabled and recipe),
        quantized_model_init=lambda enabled, recipe: during("initialising", enabled),
    )
    package: Any = ModuleType("transformer_engine")
    package.pytorch = pytorch
    modules = {
        "transformer_engine": package,
        "transformer_engine.pytorch": pytorch,
        "transformer_engine.common": ModuleType("transformer_engine.common"),
        "transformer_engine.common.recipe": SimpleNamespace(NVFP4BlockScaling=recipe),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    transformer_engine.rollout_recipe.cache_clear()
    yield record
    transformer_engine.rollout_recipe.cache_clear()


def te_linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(64, 48).bfloat16().requires_grad_(False)


def test_transformer_engine_uses_rollout_recipe(te: SimpleNamespace) -> None:
    for _ in range(2):
        TransformerEngineLinear(te_linear())(torch.randn(4, 64))
    assert te.recipes == [ROLLOUT_RECIPE]
    assert ROLLOUT_RECIPE == dict.fromkeys(
        ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"), True
    )


def test_transformer_engine_pads_rows_and_drops_padding(te: SimpleNamespace) -> None:
    layer, inputs = TransformerEngineLinear(te_linear()), torch.randn(2, 33, 64).bfloat16()[:1]
    for rows, padded in ((33, 64), (32, 64), (31, 32), (1, 32)):
        te.rows.clear()
        x = inputs[:, :rows]
        y, exact = layer(x), te_linear()(x)
        assert te.rows == [padded] and y.shape == (1, rows, 48) and y.dtype == torch.bfloat16
        assert relative_error(y, exact) < 1.2 * relative_error(NVFP4Linear(te_linear())(x), exact)
        assert layer(x.float()).dtype == torch.float32
        assert layer(x.mT.contiguous().mT).equal(y)  # as of a convolution's channels


def test_transformer_engine_token_is_independent_of_batch_and_calibration(te: SimpleNamespace) -> None:
    layer, x = TransformerEngineLinear(te_linear()), torch.randn(33, 64).bfloat16()
    together, faint = layer(x), layer(x / 40)
    for rows in (1, 16, 33):
        assert layer(x[:rows]).equal(together[:rows])
        assert layer(torch.cat((x[:rows], 100 * x)))[:rows].equal(together[:rows])  # clamped
    for factor in (1 / 40, 1 / 3, 3, 40):
        other = TransformerEngineLinear(te_linear())
        other(factor * x)
        assert other.limit != layer.limit and other(x / 40).equal(faint)


def test_transformer_engine_limit_has_headroom_and_follows_the_weights(te: SimpleNamespace) -> None:
    layer, x = TransformerEngineLinear(te_linear()), torch.randn(8, 64).bfloat16()
    assert layer.limit is None
    assert not layer(torch.zeros_like(x)).isnan().any() and layer.limit is None  # nothing to go by
    layer(x)
    limit, amax = layer.limit, x.abs().max().item()
    assert limit is not None and 4 <= limit / amax < 8 and torch.tensor(limit).bfloat16() == limit
    assert math.frexp(limit / 2688)[0] == 0.5
    layer(10 * x)
    assert layer.limit == limit
    layer.requantize_(te_linear(seed=7).weight)
    layer(10 * x)
    assert layer.limit in (8 * limit, 16 * limit)


def test_transformer_engine_requantizes_same_parameter_once(te: SimpleNamespace) -> None:
    layer, x, other = TransformerEngineLinear(te_linear()), torch.randn(8, 64), te_linear(seed=7)
    addresses = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    assert te.quantised == 1 and not any(parameter.requires_grad for parameter in layer.parameters())
    layer(x), layer(x)
    assert te.quantised == 1
    merged = torch.randn(48, 64)
    layer.requantize_(merged)
    assert te.quantised == 2
    torch.testing.assert_close(layer.linear.weight.data, quantize(merged).dequantize())  # without rounding to BF16
    layer.requantize_(other.weight.float())
    other.bias = te_linear().bias
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == addresses
    assert layer(x).equal(TransformerEngineLinear(other)(x))
