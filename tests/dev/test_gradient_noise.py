"""The share of a gradient that is signal."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gradient_noise import table

from solrl_lightning.options.run import Run
from solrl_lightning.tasks.train import train


def test_what_gradients_have_in_common_is_the_square_of_their_signal() -> None:
    prompts, levels, draws = 4, 3, 2
    noise = 5.0 * torch.eye(prompts * levels * draws).unflatten(0, (prompts, levels, draws))  # all orthogonal
    signal = torch.full((*noise.shape[:-1], 1), 3.0)
    *_, last = table(torch.cat([noise, signal], -1)).splitlines()
    of_noise = 25 / (prompts * levels)  # in the mean of a draw
    assert last.split()[-3:] == [f"{9 + of_noise:.2g}", "9", "9"]


def test_callback_prints_the_table_of_an_iteration(
    compose: Callable[..., Run], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    noise = ("+callbacks.noise._target_=gradient_noise.GradientNoise", "+callbacks.noise.at=[0]")
    small = "experiment=smoke trainer=cpu iterations=1 family=diffusionnft family.pool=4 model.full_steps=2 ~logger"
    train(compose(*small.split(), "callbacks.sample_grid.every=0", *noise))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = (line for line in lines if line[:2] == ["all", "steps"])
    power, same, common = map(float, row[2:])
    assert power >= same > 0 and common < power
