from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.optimization import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup
from torch.optim.lr_scheduler import LRScheduler

from solrl_lightning.errors import UserError
from solrl_lightning.training.schedules import Factor, constant, cosine, ema_decay, linear, old_policy_decay

STEPS = [0, 1, 75, 76, 500, 1000]


@pytest.mark.parametrize(
    ("decay_type", "expected"),
    [(0, [0, 0, 0, 0, 0, 0]), (1, [0, 0.001, 0.075, 0.076, 0.5, 0.5]), (2, [0, 0, 0, 0.0075, 0.999, 0.999])],
)
def test_published_decays_match_tables(decay_type: int, expected: list[float]) -> None:
    decay = old_policy_decay(decay_type)
    assert [decay(step) for step in STEPS] == pytest.approx(expected, abs=1e-12)


def test_decay_type_2_reaches_maximum_at_step_209() -> None:
    decay = old_policy_decay(2)
    assert decay(208) == pytest.approx(0.9975)
    assert decay(209) == 0.999


def test_default_is_decay_type_1() -> None:
    assert old_policy_decay() == old_policy_decay(1)


def test_decay_type_3_is_a_custom_ramp() -> None:
    decay = old_policy_decay(3, start=10, slope=0.05, maximum=0.8)
    assert [decay(step) for step in (0, 10, 11, 20, 26, 27)] == pytest.approx([0, 0, 0.05, 0.5, 0.8, 0.8])
    constant = old_policy_decay(3, start=-1, slope=0.9, maximum=0.9)
    assert [constant(step) for step in (0, 1, 1000)] == [0.9, 0.9, 0.9]


@pytest.mark.parametrize(
    ("decay_type", "ramp"),
    [(4, {}), (1, {"slope": 0.1, "maximum": 0.2}), (3, {"slope": 0.1})]
    + [(3, {"start": 0, "slope": slope, "maximum": m}) for slope, m in [(-0.1, 0.5), (0.1, 1.0), (0.1, -0.5)]],
)
def test_invalid_decay_error_names_values_and_rule(decay_type: int, ramp: dict[str, Any]) -> None:
    message = f"decay_type={decay_type} with .*maximum={ramp.get('maximum')} is invalid: .* or 3 with all"
    with pytest.raises(UserError, match=message):
        old_policy_decay(decay_type, **ramp)


def test_ema_decay_rises_to_its_maximum() -> None:
    assert [ema_decay(step) for step in (0, 1, 10, 80, 81, 1000)] == pytest.approx(
        [0.1, 2 / 11, 11 / 20, 0.9, 0.9, 0.9]
    )
    assert ema_decay(79) < 0.9


@pytest.mark.parametrize(
    ("ours", "theirs"), [(linear, get_linear_schedule_with_warmup), (cosine, get_cosine_schedule_with_warmup)]
)
def test_rates_without_warmup_are_those_of_diffusers(
    ours: Callable[..., Factor], theirs: Callable[..., LRScheduler]
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = theirs(optimizer, num_warmup_steps=0, num_training_steps=7)
    for step in range(8):  # up to the end; the cosine of diffusers rises again after it
        assert 0.5 * ours(7)(step) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("factor", [constant(3), linear(9, 3), cosine(9, 3)])
def test_the_rate_rises_over_the_warmup_and_is_never_zero_before_the_end(factor: Factor) -> None:
    assert [factor(step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert all(factor(step) > 0 for step in range(9))
