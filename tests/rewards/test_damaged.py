"""A file of a reward that is damaged, missing or unfit: an error of one line that names it, or equal scores."""

import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from take_away import take_each_file_away
from torch import Tensor
from transformers import BertTokenizer, Qwen2VLForConditionalGeneration

from solrl_lightning.errors import UserError
from solrl_lightning.rewards import CLIPScore, HPSv2
from solrl_lightning.rewards.aesthetic import Aesthetic
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rewards.geneval import GenEval
from solrl_lightning.rewards.hpsv3 import REPOSITORY, SOURCE, WEIGHTS, HPSv3
from solrl_lightning.rewards.imagereward import ImageReward
from solrl_lightning.rewards.vlm_local import LocalVLMReward

IMAGE = torch.rand(1, 3, 56, 56, generator=torch.Generator().manual_seed(0))
Get = Callable[[str], Any]  # the value of a fixture

# How a reward is made with the folder of a fixture, or a copy of it.
MADE: dict[str, Callable[[str, Get], Reward]] = {
    "clip_folder": lambda folder, get: CLIPScore(folder, folder),
    "hps_file": lambda folder, get: HPSv2(folder, get("open_clip_architecture")),
    "aesthetic": lambda folder, get: Aesthetic(get("clip_folder"), get("clip_folder"), folder),
    "release": lambda folder, get: ImageReward(folder, get("bert")),
    "bert": lambda folder, get: ImageReward(get("release"), folder),
    "detector": lambda folder, get: GenEval(*[get("clip_folder")] * 2, folder, threshold=0.5, counting_threshold=0.6),
    "hpsv3": lambda folder, get: HPSv3("./model", "./qwen", dtype="float32"),  # in that folder
    "qwen2vl": lambda folder, get: LocalVLMReward(folder, "Is it {prompt}?", {"yes": 1.0, "No": 0.0}, dtype="float32"),
}


@pytest.fixture
def copy_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[Path, Callable[[], list[Tensor]]]]:
    """copy_of("bert") is a copy of that fixture's folder, and what makes a reward of the copy and scores an image."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    def copied(fixture: str) -> tuple[Path, Callable[[], list[Tensor]]]:
        made = request.getfixturevalue(fixture)
        source = Path(made[0] if isinstance(made, tuple) else made)
        folder = Path(shutil.copytree(source.parent if source.is_file() else source, tmp_path / fixture))
        os.chdir(folder)
        metadata = {"include": [{"class": "dog", "count": 1}], "tag": "single_object"}

        def scores() -> list[Tensor]:
            return [MADE[fixture](str(folder), request.getfixturevalue)(IMAGE, ["a red circle"], [metadata])]

        return folder, scores

    monkeypatch.chdir(tmp_path)  # and back at the end
    return copied


Damage = Callable[[Path], object]


def sets(file: str, part: str | None = None, **values: Any) -> Damage:
    """Set values of a JSON file, or of an object in it."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (content[part] if part else content).update(values)
        (folder / file).write_text(json.dumps(content))

    return damage


def weights(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    """Change the tensors of the only file with weights."""

    def damage(folder: Path) -> None:
        (file,) = (each for each in folder.rglob("*") if each.suffix in (".pt", ".pth", ".safetensors"))
        if file.suffix == ".safetensors":
            change(tensors := load_file(file))
            save_file(tensors, file, {"format": "pt"})
            return
        content = torch.load(file, weights_only=True)
        change(content.get("state_dict", content))
        torch.save(content, file)

    return damage


def in_ddp(folder: Path) -> None:
    """As a training script of several GPUs saves it."""
    (file,) = folder.iterdir()
    state = torch.load(file, weights_only=True)["state_dict"]
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}}, file)


def clip_of_transformers_4(folder: Path) -> None:
    """As openai/clip-vit-large-patch14 on the hub: sizes as numbers, the end token 2, and positions as tensors."""
    settings = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    settings |= {"size": 224, "crop_size": 224, "feature_extractor_type": "CLIPFeatureExtractor"}
    for key in ("image_processor_type", "do_convert_rgb", "do_rescale", "rescale_factor"):
        settings.pop(key, None)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    sets("config.json", "text_config", eos_token_id=2)(folder)
    positions = {"text_model": torch.arange(77)[None], "vision_model": torch.arange(50)[None]}
    numbering = {f"{tower}.embeddings.position_ids": numbers for tower, numbers in positions.items()}
    weights(lambda tensors: tensors.update(numbering))(folder)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]  # from before there was a tokenizer.json
    (folder / "vocab.json").write_text(json.dumps(words["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, words["merges"])]))
    (folder / "tokenizer.json").unlink()


def bert_of_both(folder: Path) -> None:
    BertTokenizer.from_pretrained(folder).save_pretrained(folder)


def bert_of_transformers_5(folder: Path) -> None:
    bert_of_both(folder)
    (folder / "vocab.txt").unlink()


def in_shards(folder: Path) -> None:
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")


def qwen2vl_of_transformers_4(folder: Path) -> None:
    words = json.loads((folder / "processor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(words.pop("image_processor")))
    words.pop("video_processor", None)
    (folder / "processor_config.json").write_text(json.dumps(words))


class Layout(NamedTuple):
    """A folder of published files: that of a fixture with a change, and the files without which scores are equal."""

    fixture: str
    change: Damage = lambda folder: None
    unneeded: Collection[str] = ()


LAYOUTS = [
    Layout("clip_folder"),
    Layout("clip_folder", clip_of_transformers_4, ["processor_config.json"]),
    Layout("hps_file"),
    Layout("hps_file", in_ddp),
    Layout("aesthetic"),
    Layout("aesthetic", lambda folder: next(folder.iterdir()).rename(folder / "aesthetic-model.pth")),
    Layout("release"),
    Layout("bert"),
    Layout("bert", bert_of_transformers_5, ["tokenizer_config.json"]),
    Layout("bert", bert_of_both, ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]),
    Layout("detector"),
    Layout("hpsv3"),
    Layout("qwen2vl", in_shards, ["generation_config.json"]),
    Layout("qwen2vl", qwen2vl_of_transformers_4, ["generation_config.json", "processor_config.json"]),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.fixture} {layout.change.__name__}")
def test_a_file_that_is_missing_is_named_or_makes_no_difference(copy_of: Callable[[str], Any], layout: Layout) -> None:
    folder, scores = copy_of(layout.fixture)
    (expected,) = scores()
    layout.change(folder)
    torch.testing.assert_close(scores(), [expected], rtol=0, atol=1e-6)
    needed = take_each_file_away(folder, scores)
    assert [name for name, required in needed.items() if not required] == list(layout.unneeded)


READ = "its weights cannot be read as a CLIP model's: .* Download or save it again"
TEXT, POSITIONS = "text_config", "visual.positional_embedding"
PATCHES, NUMBER = "blip.visual_encoder.patch_embed.proj.weight", {"state_dict": {"logit_scale": 4.6}}
UNREADABLE = "reward.hpsv2.pretrained=.* is invalid: it cannot be read as weights: .* Download or save it again"
WIDE = r"aesthetic.head=.* does not fit embeddings of 24 .* 0.weight with \[1024, 768\] for \[1024, 24\]"
HPS = "HPS_v2.1_compressed.pt"


def of_processor(**values: Any) -> Damage:
    return sets("processor_config.json", "image_processor", **values)


@pytest.mark.parametrize(
    ("fixture", "damage", "message"),
    [
        ("clip_folder", sets("config.json", model_type="siglip"), "CLIP model of type clip, and is a siglip"),
        ("clip_folder", weights(lambda w: w.pop("logit_scale")), "lacks 1 tensors, such as logit_scale"),
        ("clip_folder", weights(lambda w: w.update(head=torch.ones(3))), "unexpectedly 1 tensors, such as head"),
        ("clip_folder", sets("config.json", TEXT, hidden_size=16), READ),
        ("clip_folder", sets("config.json", TEXT, eos_token_id=5), "expects 5"),
        (
            "clip_folder",
            of_processor(do_center_crop=False, resample=2),
            "resample=2, rescale_factor=0.00392, do_center_crop=false. Set rew",
        ),
        ("clip_folder", of_processor(size={"shortest_edge": 200}), "'shortest_edge': 200"),
        ("clip_folder", of_processor(rescale_factor=1 / 127.5), "rescale_factor=0.00784. Set reward"),
        ("clip_folder", of_processor(crop_size={"height": 112, "width": 112}), "crops images to 112 x 112 pixels, but"),
        ("hps_file", lambda folder: torch.save({"state_dict": {"run": print}}, folder / HPS), UNREADABLE),  # code
        ("hps_file", lambda folder: torch.save(NUMBER, folder / HPS), "tensors by name or under the key state_dict"),
        # open_clip would resize them
        ("hps_file", weights(lambda w: w.update({POSITIONS: torch.ones(37, 32)})), r"with \[37, 32\] for \[50, 32\]"),
        ("aesthetic", weights(lambda w: w.update({"layers.0.weight": torch.zeros(1024, 768)})), WIDE),
        ("release", weights(lambda w: w.pop(PATCHES)), "lacks 1 tensors.*patch_embedding.weight"),
        ("release", weights(lambda w: w.update({PATCHES: torch.ones(96, 3, 16, 16)})), r"shape, .* for \[1, 1, 96\]"),
        ("release", weights(lambda w: w.update({"blip.temp": torch.zeros(1)})), "such as blip.temp"),
        (
            "release",
            sets("med_config.json", hidden_act="gelu_fancy"),
            "is invalid: its med_config.json: .*'gelu_fancy'",
        ),
        (
            "release",
            sets("med_config.json", num_attention_heads=3),
            "is invalid: its med_config.json: .* attention heads",
        ),
        ("bert", lambda folder: (folder / "vocab.txt").write_text("[UNK]\n[CLS]\n"), "tokens, and this tokenizer has"),
        ("detector", sets("config.json", model_type="clip"), "must be a detector of type owlv2, and is a clip"),
        (
            "hpsv3",
            lambda folder: save_file({"a": IMAGE}, folder / "model" / WEIGHTS),
            "it lacks 2 tensors, such as language_model.embed_tokens.weight, .* the published weights",
        ),
        ("hpsv3", lambda folder: (folder / REPOSITORY / SOURCE).write_text("A = 1"), "it must assign INSTRUCTION"),
    ],
)
def test_error_about_an_unfit_file(copy_of: Callable[[str], Any], fixture: str, damage: Damage, message: str) -> None:
    folder, scores = copy_of(fixture)
    damage(folder)
    with pytest.raises(UserError, match=message):
        scores()


@pytest.mark.parametrize(
    ("fixture", "name", "message"),
    [
        ("clip_folder", "./missing", "reward.clipscore.pretrained=./missing is invalid: it must be a hub id or a"),
        ("clip_folder", "nobody/no-such-model", "HF_HUB_OFFLINE.*hf auth whoami.*a local folder"),
        ("clip_folder", "no such model", "is neither a folder here nor a model that you may read .* Check the name"),
        ("hps_file", "missing.pt", "hpsv2.pretrained=missing.pt .* no (HPS_v2.1_compressed.pt). .* of a local \\1"),
        ("aesthetic", ".", r"reward.aesthetic.head=. .* it holds no aesthetic-model.pth or sac\+logos"),
        ("release", "zai-org/ImageReward", "pretrained=zai-org/ImageReward is neither .* `hf download zai-org"),
        ("bert", "./no", "tokenizer=./no is invalid: .* holds no vocab.txt or tokenizer.json"),
        ("detector", "no/where", r"reward\.geneval\.detector=no/where is neither a folder here nor in the hub's cache"),
    ],
)
def test_error_about_a_missing_folder_has_the_next_step(
    request: pytest.FixtureRequest, offline: Path, fixture: str, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        MADE[fixture](name, request.getfixturevalue)
