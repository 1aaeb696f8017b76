"""A new model is two files, a policy and its configuration; the package has no list of models."""

import ast
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from solrl_lightning.policies.config_files import ARCHITECTURES, INDEX

# Unlike those of the class that it extends, its latents are 5-D in a batch and its prompts have lengths of their own.
POLICY = """
from solrl_lightning.policies.sd3 import SD3


class OneFrame(SD3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        channels, *sides = self.latent_shape
        self.latent_shape = (channels, 1, *sides)

    def encode_uncached(self, prompts, device):
        whole = super().encode_uncached(prompts, device)
        lengths = [3 + len(prompt) % 5 for prompt in prompts]
        rows = zip(whole["prompt_embeds"], lengths)
        return whole | {"prompt_embeds": [row[:length] for row, length in rows]}

    def velocity(self, transformer, x, sigma, conditioning):
        assert x.ndim == 5
        return super().velocity(transformer, x.squeeze(2), sigma, conditioning).unsqueeze(2)

    def decode_latents(self, x, vae):
        return super().decode_latents(x.squeeze(2), vae)
"""
CONFIG = """
# Videos of one frame.
defaults: [sd3, _self_]
pretrained: {folder}
resolution: 32
max_sequence_length: 10
embeddings: embeddings
policy:
  _target_: one_frame_policy.OneFrame
"""
SMALL = (
    "reward=shapes data=shapes trainer=cpu ~logger prompts_per_iteration=2 family.pool=4 family.keep=2 iterations=1 "
    "model.full_steps=2 model.preview_steps=2 model.eval_steps=2 data.eval_prompts=2 callbacks.sample_grid.every=0 "
    "callbacks.rank_correlation.probe_every=0 --config-dir mine model=one_frame"
).split()


def test_model_in_two_files_trains_and_is_planned(
    command: Callable[..., Any], folder_of: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_frame_policy.py").write_text(POLICY)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "one_frame.yaml").write_text(CONFIG.format(folder=folder_of("sd3")))
    monkeypatch.syspath_prepend(str(tmp_path))
    trained = command(*SMALL, "hydra.run.dir=run")
    assert trained.status == 0, trained.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["iterations"] == 1
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
    planned = command(*SMALL, "task=plan", "hydra.run.dir=planned")
    assert planned.status == 0, planned.err
    assert json.loads((tmp_path / "planned" / "plan.json").read_text())["latents"] == [16, 1, 8, 8]


def test_package_names_no_model_outside_its_two_files() -> None:
    models = {file.name.removesuffix(".yaml") for file in (files("solrl_lightning.conf") / "model").iterdir()}
    names = models - {"tiny"}
    for file in ARCHITECTURES.rglob(INDEX):
        index = json.loads(file.read_text())
        names |= {index["_class_name"], index["transformer"][1], index["vae"][1]}
        names.add(str(file.parent.relative_to(ARCHITECTURES)))
    assert {"sd3", "FluxPipeline", "AutoencoderDC", "Qwen/Qwen-Image"} <= names
    for file in Path(str(files("solrl_lightning"))).rglob("*.py"):
        if file.parent.name == "policies" and any(file.stem.startswith(model) for model in models):
            continue
        words = set()
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Constant(value=str(word)) | ast.Name(id=word) | ast.Attribute(attr=word):
                    words.add(word)
        assert not words & names, file
