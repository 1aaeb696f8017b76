"""Fixtures: small CLIP models of the real classes, saved in the real file layouts, and images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers
from drawings import PROMPTS, as_tensor, drawn, spread_out
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
SIZES = [(224, 224), (400, 400), (300, 450), (401, 263), (100, 60)]  # height, width; the last is scaled up


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a transformers CLIP, its image processor and its tokenizer, saved by save_pretrained."""
    folder = tmp_path_factory.mktemp("clip")
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # All letters are listed beforehand: those that the trainer finds by itself are numbered in the order of a hash map.
    letters = [*alphabet, *(f"{letter}</w>" for letter in alphabet)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=letters, end_of_word_suffix="</w>", show_progress=False
    )
    bpe.train_from_iterator([*PROMPTS, *alphabet], trainer)
    content = json.loads(bpe.to_str())["model"]
    vocabulary = content["vocab"] | {token: len(content["vocab"]) + place for place, token in enumerate((START, END))}
    merges = [tuple(merge) for merge in content["merges"]]
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)
    CLIPProcessor(CLIPImageProcessor(), tokenizer).save_pretrained(folder)

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": vocabulary[START], "eos_token_id": vocabulary[END], "pad_token_id": vocabulary[END]}
    text = tower | ends | {"vocab_size": len(vocabulary), "max_position_embeddings": 77}
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config=tower | {"image_size": 224, "patch_size": 32}, projection_dim=24)
    )
    spread_out(model, seed=1)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def open_clip_architecture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a small architecture, registered in open_clip."""
    config = {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 224, "layers": 2, "width": 32, "head_width": 8, "patch_size": 32},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2},
    }
    file = tmp_path_factory.mktemp("architectures") / "ViT-nano.json"
    file.write_text(json.dumps(config))
    open_clip.add_model_config(file)
    return file.stem


@pytest.fixture(scope="session")
def hps_file(open_clip_architecture: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint in the published layout: float16 tensors under "state_dict"."""
    model = open_clip.CLIP(**open_clip.get_model_config(open_clip_architecture))
    spread_out(model, seed=2)
    file = tmp_path_factory.mktemp("hps") / "HPS_v2.1_compressed.pt"
    torch.save({"epoch": 1, "state_dict": model.half().state_dict()}, file)
    return str(file)


@pytest.fixture(scope="session", params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def pictures(request: pytest.FixtureRequest) -> list[Image.Image]:
    """Three pictures of one size."""
    return [drawn(*request.param, seed) for seed in range(3)]


@pytest.fixture(scope="session")
def pil_processor(clip_folder: str) -> Any:
    """CLIP's image processor based on PIL and numpy."""
    # From some version on, the class of the plain name works on tensors, and this one in PIL.
    return getattr(transformers, "CLIPImageProcessorPil", CLIPImageProcessor).from_pretrained(clip_folder)


@pytest.fixture(scope="session")
def images() -> Tensor:
    """Random images [4, 3, 96, 128] in [0, 1]."""
    return torch.stack([as_tensor(drawn(96, 128, seed)) for seed in range(4)])


@pytest.fixture
def rows_of() -> Callable[[nn.Module], list[int]]:
    """rows_of(module) returns a list to which each call of the module appends the number of its input rows."""

    def watched(module: nn.Module) -> list[int]:
        rows: list[int] = []
        module.register_forward_pre_hook(
            lambda _, args, options: rows.append(len(next(iter([*args, *options.values()])))), with_kwargs=True
        )
        return rows

    return watched


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working directory without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
