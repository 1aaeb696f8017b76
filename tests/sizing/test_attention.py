"""The rows about attention: shapes of real models, and kernels that are wrong or slow."""

from collections.abc import Callable

import pytest
import torch
from hydra.utils import instantiate

from solrl_lightning.artifacts.tables import OK, SLOW, WRONG
from solrl_lightning.options.run import Run
from solrl_lightning.sizing import attention as attention_module
from solrl_lightning.sizing.attention import attention_shapes, check_attention, judge_attention

CPU = torch.device("cpu")
FAST = {"sampling": {"chosen": 1.0, "flash": 1.0}, "training": {"chosen": 3.0, "flash": 3.0}}
RIGHT = {"chosen": 1e-3, "flash": 1e-3}, {"chosen": 1e-2, "flash": 1e-2}


@pytest.mark.parametrize(
    ("architecture", "shapes"),
    [
        # 24 heads of 128; 512 pixels are 32 x 32 tokens, and prompts have 128
        ("flux1", [(24, 1152, 1152, 128)]),
        # 12 heads; 33 frames are 9 of 20 x 20 tokens, which attend to each other and to the 512 of a prompt
        ("wan", [(12, 3600, 3600, 128), (12, 3600, 512, 128)]),
    ],
)
def test_shapes_are_those_of_the_published_model(
    compose: Callable[..., Run], architecture: str, shapes: list[tuple[int, int, int, int]]
) -> None:
    options = compose(f"model={architecture}").model.policy
    model = instantiate(options, weights="random", embeddings=None, device="meta")
    assert attention_shapes(model) == shapes


def test_kernels_are_compared_and_their_errors_are_those_of_bf16() -> None:
    (row,) = check_attention([(2, 96, 80, 32)], (3, 2), CPU)
    assert row.status in (OK, SLOW) and row.measured is not None
    assert {"chosen", "flash"} <= row.measured["errors"].keys() and "cudnn" not in row.measured["errors"]
    assert 0 < row.measured["errors"]["chosen"] < 2**-6
    assert 0 < row.measured["gradient_errors"]["chosen"] < 2**-6


def test_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention_module.scaled_dot_product_attention
    monkeypatch.setattr(attention_module, "scaled_dot_product_attention", lambda q, k, v: attend(q, k, 1.1 * v))
    (row,) = check_attention([(2, 96, 80, 32)], (3, 2), CPU)
    assert row.status == WRONG and "chosen" in row.result.rpartition(";")[2]


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    attend = attention_module.scaled_dot_product_attention

    def attend_with_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if k.requires_grad and torch.is_grad_enabled():
            k = k.clone()
            k.register_hook(lambda gradient: factor * gradient)
        return attend(q, k, v)

    monkeypatch.setattr(attention_module, "scaled_dot_product_attention", attend_with_gradients)
    (row,) = check_attention([(2, 96, 80, 32)], (3, 2), CPU)
    assert row.status == WRONG and row.measured is not None and row.measured["errors"]["chosen"] < 2**-6


def test_chosen_kernel_with_a_large_error_or_infinite_gradients_is_wrong() -> None:
    for error in (float("nan"), 0.5):
        wrong = {"chosen": error, "flash": 1e-3}
        assert judge_attention("attention", FAST, wrong, RIGHT[1]).status == WRONG
        assert judge_attention("attention", FAST, RIGHT[0], wrong).status == WRONG


def test_faster_kernel_counts_if_it_is_right() -> None:
    faster = {**FAST, "training": {"chosen": 3.0, "flash": 2.0}}
    assert judge_attention("attention", FAST, *RIGHT).status == OK
    assert judge_attention("attention", faster, *RIGHT).status == SLOW
    assert judge_attention("attention", faster, RIGHT[0], {"chosen": 1e-2, "flash": 1.0}).status == OK
    right = [{**errors, "cudnn": 1e-3} for errors in RIGHT]
    for what, status in (("sampling", SLOW), ("training", OK)):  # whose gradients are never cuDNN's
        assert judge_attention("attention", {**FAST, what: {"chosen": 3.0, "cudnn": 2.0}}, *right).status == status
