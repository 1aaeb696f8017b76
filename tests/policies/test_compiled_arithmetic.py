"""Operations of compiled blocks on a CPU against PyTorch's in float64, and which transformers have them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models import activations
from nano import load_nano, relative_error
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.policies import bf16, compiled_arithmetic
from solrl_lightning.policies.bf16 import FP32Attention
from solrl_lightning.policies.compilation import compile_blocks


def attention_and_gradients(attend: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
    leaves = [value.detach().clone().requires_grad_() for value in operands]
    y = attend(*leaves)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_bf16_attention_and_its_gradients_are_near_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of size 4 are rounded to multiples of 2^-6, which leaves errors of at most 2^-7 in the probabilities."""

    def attend(*operands: Tensor) -> Tensor:
        with compiled_arithmetic.BF16Attention():
            return F.scaled_dot_product_attention(*operands, attn_mask=None, dropout_p=0.0, is_causal=False)

    torch.manual_seed(0)
    shapes = (2, 3, 70, 16), (2, 3, 81, 16), (2, 3, 81, 24)
    operands = [(1.5 * torch.randn(shape)).bfloat16() for shape in shapes]
    exact = attention_and_gradients(F.scaled_dot_product_attention, *(value.double() for value in operands))
    whole = attention_and_gradients(attend, *operands)
    monkeypatch.setattr(compiled_arithmetic, "_SCORES", 4 * 70 * 81)  # two parts, of four and of two rows
    for how in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        for ours, others, theirs in zip(attention_and_gradients(how, *operands), whole, exact, strict=True):
            assert ours.dtype == torch.bfloat16 and torch.equal(ours, others)
            assert 2**-10 < relative_error(ours, theirs) < 2**-6


def test_bf16_attention_is_that_of_float32_with_a_mask_few_keys_or_other_arguments() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 80, 8).bfloat16() for _ in range(3))
    mask = torch.randn(80, 80).bfloat16()
    few = {"key": key[:, :, :63], "value": value[:, :, :63]}
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}, {"scale": 0.1}, few):
        arguments = {"query": query, "key": key, "value": value} | options
        results = []
        for mode in (FP32Attention(), compiled_arithmetic.BF16Attention()):
            with mode:
                results.append(F.scaled_dot_product_attention(**arguments))
        assert torch.equal(*results) == bool(options)


def test_logistic_gelu_is_the_tanh_approximation() -> None:
    x = torch.linspace(-30, 30, 4001)
    torch.testing.assert_close(
        compiled_arithmetic.logistic_gelu(x), F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6
    )
    assert compiled_arithmetic.logistic_gelu(x.bfloat16()).dtype == torch.bfloat16


def test_only_compiled_transformers_get_the_compiled_arithmetic(
    architecture: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16, "has_fast_bf16_attention", lambda: False)
    monkeypatch.setattr(compiled_arithmetic, "has_fast_bf16_products", lambda: True)
    policy = load_nano(architecture, folder)

    def count(kinds: Any) -> int:
        return sum(isinstance(module, kinds) for module in policy.transformer.modules())

    attentions = [module for module in policy.transformer.modules() if hasattr(module, "attention_mode")]
    gelus = count((nn.GELU, activations.GELU))
    assert attentions and {module.attention_mode for module in attentions} == {FP32Attention}
    assert count((compiled_arithmetic.LogisticGELU, compiled_arithmetic.ProjectedLogisticGELU)) == 0
    compile_blocks(policy.transformer, backend="eager")
    assert {module.attention_mode for module in attentions} == {compiled_arithmetic.BF16Attention}
    assert count((compiled_arithmetic.LogisticGELU, compiled_arithmetic.ProjectedLogisticGELU)) == gelus
