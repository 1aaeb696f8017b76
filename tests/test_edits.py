"""Runs with model=qwen_image_edit on a small folder: families, tasks, pictures, and prompts without images."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageEditPipeline
from nano import save_nano
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from solrl_lightning.cli.checks import check_prompts
from solrl_lightning.data.input_images import load_square
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.quantization import resolve
from solrl_lightning.rewards.base import Metadata, Reward
from solrl_lightning.shapes.world import eval_captions, train_captions
from solrl_lightning.sizing.plan import plan_run, without_files
from solrl_lightning.sizing.trial import check_iterations, check_rewards, smoke_config
from solrl_lightning.tasks.evaluate import evaluate
from solrl_lightning.tasks.generate import generate
from solrl_lightning.tasks.train import train

Compose = Callable[..., Run]


class Likeness(Reward):
    """How near the image is to the prompt's input image."""

    name = "likeness"

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        assert not any(".png" in prompt for prompt in prompts)  # the text alone
        inputs = [pil_to_tensor(load_square(row["input_image"], images.shape[-1])) for row in metadata]
        return -(images - torch.stack(inputs) / 255).abs().mean((1, 2, 3))


SMALL = (
    "model=qwen_image_edit experiment=smoke trainer=cpu ~logger iterations=1 family.pool=6 family.keep=3 "
    "reward=shapes reward.shapes._target_=tests.test_edits.Likeness model.resolution=32 model.max_sequence_length=16 "
    "model.full_steps=3 model.preview_steps=2 model.prefix_steps=2 model.eval_steps=1 data.eval_prompts=2 "
    "data.eval_images=1 family.compile=false"
).split()
COLOURS = ["red", "lime", "blue", "white"]


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Flow-Factory's, and the pipeline."""
    folder = tmp_path_factory.mktemp("edits")
    (folder / "images").mkdir()
    for colour in COLOURS:
        Image.new("RGB", (40, 32), colour).save(folder / "images" / f"{colour}.png")
    for split, captions in (("train", train_captions()), ("test", eval_captions())):
        texts = [captions[0], captions[0], captions[1]]  # one of them with two images
        rows = [{"prompt": text, "image": f"{name}.png"} for text, name in zip(texts, COLOURS, strict=False)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_nano(folder / "pipeline", "qwen_image_edit")
    return folder


@pytest.fixture
def run(edits: Path, compose: Compose) -> Compose:
    options = (f"model.pretrained={edits / 'pipeline'}", f"model.embeddings={edits / 'embeddings'}")
    return lambda *more: compose(*SMALL, *options, f"data.train={edits}", f"data.eval={edits}", *more)


def levels(file: Path, place: tuple[int, int]) -> tuple[int, ...]:
    with Image.open(file) as image:
        return image.getpixel(place)  # type: ignore[return-value]


def test_it_trains_on_prompts_with_images(run: Compose, edits: Path, tmp_path: Path) -> None:
    cfg = run("family=prefix", "prompts_per_iteration=3")
    check_prompts(cfg)
    reward = train(cfg)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "completed" and reward == summary["final_reward"]
    moved = load_file(tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    assert max(value.abs().max() for name, value in moved.items() if "lora_B" in name) > 0
    assert len(list((edits / "embeddings").glob("*.safetensors"))) == 5  # three to train on, two to evaluate
    pipeline = QwenImageEditPipeline.from_pretrained(edits / "pipeline")
    pipeline.load_lora_weights(tmp_path / "lora")
    assert pipeline.get_list_adapters() == {"transformer": ["default_0"]}
    # The first column of the grid is the input image.
    assert levels(tmp_path / "samples" / "grid_000001.png", (60, 140)) == (255, 0, 0)


def test_images_are_generated_and_evaluated_beside_their_input(run: Compose, edits: Path, tmp_path: Path) -> None:
    cfg = run("task=generate", f"task.prompt_file={edits / 'test.jsonl'}", "task.images=1")
    check_prompts(cfg)
    images = generate(cfg)["images"]
    assert [image["prompt"] for image in images] == [
        f"{eval_captions()[number]} [image: {colour}.png]" for number, colour in zip((0, 0, 1), COLOURS, strict=False)
    ]
    assert levels(tmp_path / "generate.png", (60, 140)) == (255, 0, 0)
    with Image.open(tmp_path / images[0]["file"]) as image:
        assert image.size == (32, 32)
    with pytest.raises(
        UserError, match="the prompt 'a' of task.prompts is invalid: this model edits an .* task.prompt_file"
    ):
        check_prompts(run("task=generate", "task.prompts=[a]"))

    result = evaluate(run("task=evaluate"))
    assert result["prompts"] == 2 and -1 < result["rewards"]["shapes"]["base"]["mean"] < 0
    assert levels(tmp_path / "evaluate.png", (60, 140)) == (255, 0, 0)


def test_plan_and_doctor_know_it(run: Compose, tmp_path: Path) -> None:
    cfg, cpu = run("task=doctor", "family=prefix"), torch.device("cpu")
    planned = plan_run(without_files(cfg), resolve("bf16", "auto", cpu))
    assert planned.model.latent_shape == (16, 64)
    rows = [*check_rewards(cfg, cpu), *check_iterations(cfg, planned, cpu, 1)]
    assert [(row.check, row.status) for row in rows] == [("reward", "ok"), ("iterations", "ok")]
    packaged = smoke_config(run("task=doctor", "family=prefix", "data.train=shapes-train"), 1)
    assert packaged.data.train == str(tmp_path / "doctor.jsonl")
    assert json.loads((tmp_path / "doctor.jsonl").read_text())["image"] == "doctor.png"
