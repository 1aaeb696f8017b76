"""Explorers in processes of their own give the run of one process, also when they are killed on the way."""

from pathlib import Path

import pytest
import torch
from forks import Forks

from solrl_lightning.artifacts.files import read_checkpoint

OPTIONS = (
    "experiment=smoke seed=7 logger=none callbacks.sample_grid.every=0 hydra.run.dir=run explorers.timeout=60".split()
)


@pytest.mark.parametrize(
    ("count", "pause", "options"),
    [(2, 0, ["family=race"]), (4, 0.1, ["precision=nvfp4", "iterations=3", "model.rollout_batch=2"])],
    ids=["two", "four_killed"],
)
def test_explorers_give_the_run_of_one_process(
    forks: Forks, tmp_path: Path, count: int, pause: float, options: list[str]
) -> None:
    states = []
    for arguments, target in (([], "solrl_lightning.__main__:main"), ([str(count), str(pause)], "explorers/fleet:run")):
        folder = tmp_path / target.replace("/", "-")
        folder.mkdir()
        ended = forks.run(folder, *arguments, *OPTIONS, *options, target=target)
        assert ended.status == 0, ended.output
        states.append(read_checkpoint(folder / "run/checkpoints/last.ckpt")["state_dict"])
    assert "is lost" in ended.output or not pause
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
