"""Images for given prompts, with a nano pipeline."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from nano import PROMPTS, prompts_of, save_nano
from PIL import Image

from solrl_lightning.artifacts.pictures import Row, draw_grid
from solrl_lightning.build import build_model
from solrl_lightning.options.run import Run
from solrl_lightning.run_prompts import requested_prompts
from solrl_lightning.seeds import evaluation_seeds
from solrl_lightning.tasks.generate import generate, without_training

Compose = Callable[..., Run]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = save_nano(tmp_path_factory.mktemp("pipeline"))
    return "experiment=smoke", "trainer=cpu", "model.eval_steps=2", f"model.pretrained='{folder}'"


def pixels(path: Path) -> torch.Tensor:
    with Image.open(path) as image:
        return torch.tensor(np.array(image))


def test_base_and_trained_use_the_seeds_of_evaluations(
    compose: Compose, tmp_path: Path, small: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "solrl_lightning")
    checkpoint = write_checkpoint(compose(*small), tmp_path / "last.ckpt")
    prompts = f'task.prompts=["{PROMPTS[0]}","{PROMPTS[1]}"]'
    options = ("task.images=3", "task.grid_images=2", "model.rollout_batch=3")  # one prompt at once
    cfg = compose(*small, "task=generate", f"ckpt='{checkpoint}'", prompts, *options)
    result = generate(cfg)
    assert "family.compile" not in caplog.text  # nothing is compiled, and there is no rollout to speak of

    seeds = evaluation_seeds(cfg.seed, PROMPTS[:2], 3)
    assert [(image["prompt"], image["seed"]) for image in result["images"][:6]] == [
        (prompt, seed) for prompt, row in zip(PROMPTS[:2], seeds.tolist(), strict=True) for seed in row
    ]
    assert [image["weights"] for image in result["images"]] == ["base"] * 6 + ["trained"] * 6
    assert json.loads((tmp_path / "generate.json").read_text()) == result
    files = sorted(str(file.relative_to(tmp_path)) for file in (tmp_path / "images").iterdir())
    assert files == sorted(image["file"] for image in result["images"])
    assert files[0] == f"images/0000_{min(seeds[0].tolist()):010d}_base.png"

    module = build_model(without_training(cfg), torch.device("cpu"))
    expected = module.sample(prompts_of(PROMPTS[:2]), seeds, weights="base", steps=2)
    module.ema_state = torch.load(checkpoint, weights_only=True)["callbacks"]["WeightEMA"]["average"]
    expected = torch.stack([expected, module.sample(prompts_of(PROMPTS[:2]), seeds, weights="ema", steps=2)])
    images = torch.stack([pixels(tmp_path / image["file"]) for image in result["images"]])
    levels = (255 * expected.flatten(0, 2)).round().byte().permute(0, 2, 3, 1)
    assert torch.equal(images, levels)
    assert not torch.equal(images[:6], images[6:])

    rows = [Row(prompt, [expected[0, i, :2], expected[1, i, :2]]) for i, prompt in enumerate(PROMPTS[:2])]
    grid = draw_grid("Same prompts, same noise", ["base", "trained"], rows)
    assert torch.equal(pixels(tmp_path / "generate.png"), torch.tensor(np.array(grid)))


def test_png_has_its_settings_as_text(compose: Compose, tmp_path: Path, small: tuple[str, ...]) -> None:
    checkpoint = write_checkpoint(compose(*small), tmp_path / "last.ckpt")
    words = 'task.prompts=[a red circle, "„grüne“ blue square"]'  # in quotation marks that Latin-1 does not have
    arguments = ("task=generate", f"ckpt='{checkpoint}'", words, "task.seeds=[4294967295]", "task.base=false")
    result = generate(compose(*small, *arguments))
    assert [image["file"] for image in result["images"]] == [
        "images/0000_4294967295_trained.png",
        "images/0001_4294967295_trained.png",
    ]
    with Image.open(tmp_path / result["images"][1]["file"]) as image:
        assert image.text == {  # type: ignore[attr-defined]
            "prompt": "„grüne“ blue square",
            "seed": "4294967295",
            "weights": "trained",
            "model": compose(*small).model.pretrained,
            "solver": "euler",
            "steps": "2",
            "checkpoint": str(checkpoint),
        }


def test_base_uses_prompts_of_a_file_and_the_given_seeds(
    compose: Compose, tmp_path: Path, small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples one prompt per pass, without a reward and without data.train and data.eval."""
    (tmp_path / "mine.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    monkeypatch.delattr("solrl_lightning.build.build_rewards")
    arguments = ("task=generate", f"task.prompt_file='{tmp_path / 'mine.txt'}'", "task.seeds=[7,0]")
    without_data = ("data.train=nowhere.txt", "data.eval=nowhere.txt", "model.rollout_batch=3")
    result = generate(compose(*small, *arguments, *without_data))
    assert [(image["prompt"], image["seed"], image["weights"]) for image in result["images"]] == [
        (prompt, seed, "base") for prompt in PROMPTS for seed in (7, 0)
    ]
    assert result["checkpoint"] is None and "checkpoint" not in result["images"][0]
    again = generate(compose(*small, *arguments, *without_data, "model.rollout_batch=6"))
    assert again["images"] == result["images"]


def test_prompts_of_the_command_line_may_have_commas_and_spaces(compose: Compose) -> None:
    cfg = compose("task=generate", 'task.prompts=[a red apple, "two, or three, dogs"]')
    assert requested_prompts(cfg) == prompts_of(["a red apple", "two, or three, dogs"])
    assert cfg.weights == {"base": "base"}
