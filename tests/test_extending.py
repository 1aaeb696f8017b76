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
    assert len(examples) == 9
    for name, text in examples.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, caption in {"train": "a dark street", "eval": "a dim room"}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": caption, "level": 0.1}))
    chosen = ("objective=rwr", "reward=[redness,dimness]", "model=mirrored", "family=small", "data.train=train.jsonl")
    without = command("--config-dir", "mine", *chosen, *SMALL, "data.eval=shapes-eval", "hydra.run.dir=run")
    assert without.status == 2 and "is invalid: its row must have" in without.err
    ended = command("--config-dir", "mine", *chosen, *SMALL, "data.eval=eval.jsonl", "hydra.run.dir=run")
    assert ended.status == 0, ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reward"], summary["iterations"]) == ("completed", "weighted_sum", 1)
    exported = command("task=export", "ckpt=run/checkpoints/last.ckpt", "hydra.run.dir=exported")
    assert exported.status == 0, exported.err
    assert "a custom class, `mirrored.Mirrored`. This code" in (tmp_path / "exported" / "README.md").read_text()
    assert {"rwr", "redness", "dimness", "mirrored"} <= sys.modules.keys()
