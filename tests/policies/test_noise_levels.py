"""Early stops by noise level: the step that a level means is that of the model's schedule."""

from collections.abc import Callable

import pytest
from nano import load_nano
from sigmas import shifted_sigmas, uniform_sigmas

from solrl_lightning.build import build_objective
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.rollout.stage import level_of, step_at, velocities_per_prompt

Compose = Callable[..., Run]


def test_a_level_of_the_schedule_is_reached_in_spite_of_rounding() -> None:
    sigmas = uniform_sigmas(10)
    assert float(sigmas[2]) > 0.8  # in float32
    assert [step_at(tenths / 10, sigmas) for tenths in range(9, 0, -1)] == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert [step_at(level, sigmas) for level in (0.05, 0.69, 0.71, 0.99)] == [11, 5, 4, 2]
    assert [step_at(level, shifted_sigmas(10, shift=3.0)) for level in (0.7, 0.874, 0.875)] == [7, 5, 4]


def test_a_step_is_named_by_a_short_level_that_leads_back_to_it() -> None:
    assert [level_of(step, uniform_sigmas(10)) for step in (1, 3, 4, 10)] == ["1.00", "0.80", "0.70", "0.10"]
    assert [level_of(step, shifted_sigmas(10, shift=3.0)) for step in (2, 3)] == ["0.97", "0.93"]  # of 0.964, 0.923
    fine = shifted_sigmas(50, shift=6.0)
    assert [step_at(float(level_of(step, fine)), fine) for step in range(1, 51)] == list(range(1, 51))
    assert len(level_of(2, fine)) > 4  # 0.9966


def test_equal_levels_are_other_steps_of_another_schedule(compose: Compose, folder_of: Callable[[str], str]) -> None:
    prefix = compose("family=prefix", "family.explore.stop_after=null", "family.explore.stop_below=0.7")
    race = compose("family=race", "family.explore.rungs=[{below:0.9,keep:48},{step:8,keep:24}]")
    for architecture, stops in {"flux1": (4, 2), "sd3": (7, 4)}.items():
        sigmas = load_nano(architecture, folder_of(architecture), weights="random", device="meta").sigmas
        stopped, last = prefix.family.stages(sigmas, build_objective(prefix.objective).solver)
        assert (stopped.stop_after, last.stop_after) == (stops[0], None) and stopped.continues_in(last)
        assert velocities_per_prompt([stopped, last], 96) == [96 * stops[0], 24 * (10 - stops[0])]
        first, second, _ = race.family.stages(sigmas, build_objective(race.objective).solver)
        assert [(first.stop_after, first.keep), (second.stop_after, second.keep)] == [(stops[1], 48), (8, 24)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "family=prefix family.explore.stop_after=null family.explore.stop_below=0.1",
            "family.explore.stop_below=0.1 is invalid: it stops at step 10 of 10, and must stop after step 1 and "
            "before step 10. Take one of these steps, or its noise level: 2 (0.90), 3 (0.80), 4 (0.70), 5 (0.60), ",
        ),
        (
            "family=race family.explore.rungs=[{below:0.75,keep:48},{below:0.7,keep:24}]",
            "family.explore.rungs.1={below:0.7, keep:24} is invalid: it stops at step 4 of 10, and must stop after "
            "step 4 and before step 10. Take one of these steps, or its noise level: 5 (0.60), 6 (0.50), 7 (0.40), ",
        ),
        (
            "family=sol_rl +family.explore.stop_below=0.5 family.explore.steps=2",
            "it stops at step 2 of 2, and must stop after step 1 and before step 2. Raise family.explore.steps.",
        ),
    ],
)
def test_a_level_that_is_no_early_stop_is_an_error(compose: Compose, arguments: str, message: str) -> None:
    cfg = compose(*arguments.split())
    with pytest.raises(UserError) as error:
        cfg.family.stages(uniform_sigmas, build_objective(cfg.objective).solver)
    assert message in str(error.value) and "\n" not in str(error.value)
