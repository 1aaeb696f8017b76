"""What the losses of velocities have in common, and their values computed by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from losses import batch

from solrl_lightning.objectives.awm import awm_loss
from solrl_lightning.objectives.nft import nft_loss
from solrl_lightning.objectives.pepg import pepg_loss
from solrl_lightning.objectives.ram import ram_loss

NFT = {"beta": 1.0, "kl_weight": 0.0, "advantage_clip": 5.0}
AWM = {"kl_weight": 0.0, "old_weight": 0.0, "advantage_clip": 5.0, "ratio_clip": 0.2}
PEPG = {"kl_weight": 0.0, "advantage_scale": 0.5}


@pytest.mark.parametrize(
    ("loss", "settings", "v", "v_old", "v_ref", "advantage", "expected"),
    [
        # v+ = 0.5, v- = -0.5: predictions 1.25 and 1.75, errors 0.25 and 0.75, and error^2 / |error| the same.
        # r = 0.75. Policy: 5 (0.75 * 0.25 + 0.25 * 0.75) = 1.875. KL 0.16.
        (nft_loss, NFT | {"kl_weight": 0.01}, 0.5, 0.0, 0.1, 2.5, [1.8766, 1.875, 0.16, 0.25, 0.75, 0.25, 0]),
        # Errors 0.25 and 1, so the ratio is e^0.75 = 2.117; at A/5 = 1/2 and clip 0.2 the clipped branch counts,
        # -0.5 * 1.2. KL to v_ref: 0.16; to v_old: 0.25.
        (
            awm_loss,
            AWM | {"kl_weight": 0.1, "old_weight": 1.0, "weighting": lambda error, sigma: error},
            *(0.5, 0.0, 0.1, 2.5),
            [-0.334, -0.6, 0.16, 0.25, 2.1170000166, 1.0],
        ),
        # Predictions of x0 1.25 and 1.5 have normalised errors 0.25 and 0.5, so D = 0.25; A = 2 * 0.5:
        # -e^0.25 (1 - 0.25) (-0.25) = 0.24075. KL 0.16.
        (pepg_loss, PEPG | {"kl_weight": 0.1}, *(0.5, 0.0, 0.1, 2.0), [0.2567548, 0.2407548, 0.16, 0.25, -0.25, 0.25]),
        # Target 0.25 - 6 * 0.5 = -2.75, at a distance of 3.5; v_ref is at 0.5.
        (ram_loss, {"strength": 3.0}, 0.75, 0.5, 0.25, -2.0, [12.25, 0.25, 9.0]),
    ],
)
def test_loss_matches_value_computed_by_hand(
    loss: Callable[..., Any],
    settings: dict[str, Any],
    v: float,
    v_old: float,
    v_ref: float,
    advantage: float,
    expected: list[float],
) -> None:
    """x0 = 1, eps = 2, sigma = 1/2: x_t = 1.5, and the target velocity is 1."""
    tensors = [torch.tensor([[value]]) for value in (v, v_old, v_ref, 1.0, 1.5)]
    result = loss(*tensors, torch.tensor(0.5), torch.tensor([advantage]), **settings)
    assert float(result.rows[0]) == float(result.loss)
    values = [float(value) for name, value in result._asdict().items() if name != "rows"]
    assert values == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (nft_loss, NFT | {"kl_weight": 0.1}),
        (awm_loss, AWM | {"kl_weight": 0.1, "old_weight": 0.1}),
        (pepg_loss, PEPG | {"kl_weight": 0.1}),
        (ram_loss, {"strength": 1.0}),
    ],
)
def test_only_velocity_has_gradients_and_loss_is_mean_of_independent_rows(
    loss: Callable[..., Any], settings: dict[str, float]
) -> None:
    inputs = batch()
    for name in ("old_velocity", "reference_velocity"):
        inputs[name] = inputs[name].clone().requires_grad_()
    result = loss(**inputs, **settings)
    result.loss.backward()
    assert inputs["velocity"].grad is not None
    assert inputs["old_velocity"].grad is None and inputs["reference_velocity"].grad is None
    assert not any(term.requires_grad for term in result[2:])
    assert torch.equal(result.rows.mean(), result.loss)
    alone = loss(**{name: value[2:3] for name, value in inputs.items()}, **settings)
    torch.testing.assert_close(alone.rows, result.rows[2:3], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("loss", "settings", "weight", "velocity", "words"),
    [
        (nft_loss, NFT, "kl_weight", "reference_velocity", "the reference velocity"),
        (awm_loss, AWM, "kl_weight", "reference_velocity", "the reference velocity"),
        (awm_loss, AWM, "old_weight", "old_velocity", "the old policy's velocity"),
        (pepg_loss, PEPG, "kl_weight", "reference_velocity", "the reference velocity"),
    ],
)
def test_velocity_is_needed_for_its_weight_only(
    loss: Callable[..., Any], settings: dict[str, float], weight: str, velocity: str, words: str
) -> None:
    without = batch(**{velocity: None})
    result = loss(**without, **settings)
    assert float(result.kl if weight == "kl_weight" else result.drift) == 0
    if weight == "kl_weight":
        assert torch.equal(result.rows, loss(**batch(), **settings).rows)
    with pytest.raises(ValueError, match=f"{weight}=0.1 needs {words}"):
        loss(**without, **settings | {weight: 0.1})
