"""A model of a user's own is two files: a policy and its configuration."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

POLICY = """
from solrl_lightning.policies.sd3 import SD3


class Mirrored(SD3):
    decoded = 0

    def decode_latents(self, x, vae):
        Mirrored.decoded += len(x)
        return super().decode_latents(x, vae).flip(-1)
"""
CONFIG = """
# Mirrored pictures.
defaults: [sd3, _self_]
pretrained: {folder}
resolution: 32
max_sequence_length: 10
embeddings: null
policy:
  _target_: mirrored_policy.Mirrored
"""
SMALL = (
    "reward=shapes",
    "data=shapes",
    "trainer=cpu",
    "~logger",
    "iterations=1",
    "prompts_per_iteration=1",
    "family.pool=4",
    "family.keep=2",
    "model.full_steps=2",
    "model.preview_steps=2",
    "model.eval_steps=2",
    "data.eval_prompts=2",
    "callbacks.sample_grid.every=0",
)


def test_a_model_in_two_files_is_trained(
    command: Callable[..., Any], folder_of: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mirrored_policy.py").write_text(POLICY)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "mirrored.yaml").write_text(CONFIG.format(folder=folder_of("sd3")))
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = command("--config-dir", "mine", "model=mirrored", *SMALL, "hydra.run.dir=run")
    assert ended.status == 0, ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["iterations"] == 1
    assert sys.modules["mirrored_policy"].Mirrored.decoded > 0
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
