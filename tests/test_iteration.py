"""The page ``solrl_lightning/iteration.py`` is what the command does: their trained weights are equal bit for bit."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from solrl_lightning import iteration
from solrl_lightning.options.run import Run
from solrl_lightning.tasks.train import train

RUNS = [
    "family=sol_rl",
    "family=sol_rl objective=flow_grpo",
    "family=prefix objective=awm objective.reference_every=2",
    "family=race",
    "family=diffusionnft objective=pepg prompts_per_iteration=3 optimizer_steps=3",
    "family=naive_quant",
    "family=naive_scaling objective=ram optimizer_steps=2 scheduler=cosine",
    "family=compile objective=dance_grpo",
]


@pytest.mark.parametrize(("group", "default"), [("family", "sol_rl"), ("objective", "nft")])
def test_every_family_and_objective_is_among_the_runs(group: str, default: str) -> None:
    names = {file.stem for file in Path(__file__).parents[1].joinpath("conf", group).glob("*.yaml")}
    assert {*re.findall(rf"{group}=(\w+)", " ".join(RUNS)), default} == names


@pytest.mark.parametrize("run", RUNS)
def test_the_page_trains_the_weights_that_the_command_trains(
    compose: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture, run: str
) -> None:
    small = "experiment=smoke trainer=cpu ~logger data.eval_prompts=1 data.eval_images=1 model.eval_steps=1 "
    small += "model.micro_batch=5 family.pool=6"
    names = "sample_grid rank_correlation guard summary export best".split()
    cfg = compose(*small.split(), *(f"~callbacks.{name}" for name in names), *run.split())
    of_page = iteration.train(cfg, torch.device("cpu")).state_dict()
    train(cfg)
    assert ("It is a control" in caplog.text) == ("naive_quant" in run)
    state = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert len(state) > 100 and state.keys() <= of_page.keys()
    assert all(torch.equal(value, of_page[name]) for name, value in state.items())


@pytest.mark.parametrize("option", ["family.explore.stop_below=5", "ckpt=last"])
def test_the_page_takes_an_option_that_is_in_no_file(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr(sys, "argv", [iteration.__file__, "experiment=smoke", option])
    with pytest.raises(SystemExit, match=f"^error: {option} is invalid"):
        runpy.run_path(iteration.__file__, run_name="__main__")
