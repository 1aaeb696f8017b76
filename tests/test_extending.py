"""Runs the examples of docs/extending.md."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
SMALL = (
    "trainer=cpu",
    "~logger",
    "iterations=1",
    "prompts_per_iteration=1",
    "model.full_steps=2",
    "model.preview_steps=1",
    "model.eval_steps=1",
    "data.eval_prompts=2",
    "data.eval_images=1",
    "callbacks.sample_grid.every=0",
    "callbacks.rank_correlation.probe_every=0",
)


def test_objective_reward_model_and_family_of_the_page_train(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
    assert len(examples) == 7
    for name, text in examples.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = ("objective=rwr", "reward=redness", "model=mirrored", "family=small")
    ended = command("--config-dir", "mine", *chosen, *SMALL, "hydra.run.dir=run")
    assert ended.status == 0, ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reward"], summary["iterations"]) == ("completed", "redness", 1)
    assert {"rwr", "redness", "mirrored"} <= sys.modules.keys()
