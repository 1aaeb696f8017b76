"""Fixtures: small models of the real classes with random weights, in the published file layouts, and images."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers
from drawings import PROMPTS, as_tensor, drawn, spread_out
from nano import _qwen_tokenizer
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    Owlv2Config,
    Owlv2ForObjectDetection,
    Owlv2Processor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.owlv2.image_processing_owlv2 import Owlv2ImageProcessor

from solrl_lightning.rewards.hpsv3 import REPOSITORY, SOURCE, WEIGHTS

RECORDED = Path(__file__).parent / "oracle" / "recorded"
START, END = "<|startoftext|>", "<|endoftext|>"
SIZES = [(224, 224), (400, 400), (300, 450), (401, 263), (100, 60)]  # height, width; the last is scaled up
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDTH = 32  # of Qwen2-VL
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CODE = '''import torch
INSTRUCTION = """
Describe the image. Textual prompt - {text_prompt}

"""
prompt_with_special_token = """
Rate it: <|Reward|>
"""
'''


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

    ends = {"bos_token_id": vocabulary[START], "eos_token_id": vocabulary[END], "pad_token_id": vocabulary[END]}
    text = TOWER | ends | {"vocab_size": len(vocabulary), "max_position_embeddings": 77}
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config=TOWER | {"image_size": 224, "patch_size": 32}, projection_dim=24)
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


@pytest.fixture(scope="session")
def aesthetic(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head in the published layout, whose scores differ as those of the published one do."""
    generator = torch.Generator().manual_seed(3)
    sizes = [24, 1024, 128, 64, 16, 1]
    weights = {}
    for place, wide, narrow in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        weights[f"layers.{place}.weight"] = torch.randn(narrow, wide, generator=generator) * wide**-0.5
        weights[f"layers.{place}.bias"] = torch.randn(narrow, generator=generator) * 0.1
    weights["layers.0.weight"] *= 24**0.5  # its inputs have length 1
    weights["layers.7.bias"] += 5
    file = tmp_path_factory.mktemp("head") / "sac+logos+ava1-l14-linearMSE.pth"
    torch.save(weights, file)
    return str(file)


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in the layout of the hub with the recorded weights."""
    folder = tmp_path_factory.mktemp("imagereward")
    weights = {name: tensor.float() for name, tensor in load_file(RECORDED / "weights.safetensors").items()}
    torch.save(weights, folder / "ImageReward.pt")
    shutil.copy(RECORDED / "med_config.json", folder)
    return str(folder)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the vocabulary only, as in early versions of google-bert/bert-base-uncased."""
    folder = tmp_path_factory.mktemp("bert")
    shutil.copy(RECORDED / "vocab.txt", folder)
    return str(folder)


@pytest.fixture(scope="session")
def detector(clip_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small OWLv2 with random weights, saved by save_pretrained."""
    folder = tmp_path_factory.mktemp("owlv2")
    tokenizer = CLIPTokenizer.from_pretrained(clip_folder, model_max_length=16)
    Owlv2Processor(Owlv2ImageProcessor(size={"height": 64, "width": 64}), tokenizer).save_pretrained(folder)
    ends = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = TOWER | ends | {"vocab_size": len(tokenizer), "max_position_embeddings": 16}
    model = Owlv2ForObjectDetection(
        Owlv2Config(text_config=text, vision_config=TOWER | {"image_size": 64, "patch_size": 16}, projection_dim=32)
    )
    spread_out(model, seed=4)
    model.save_pretrained(folder)
    return str(folder)


def qwen_config(tokenizer: Any, more: int = 0) -> dict[str, Any]:
    """Arguments of a small Qwen2-VL for the tokens of ``tokenizer`` and some ``more``."""
    numbers = tokenizer.convert_tokens_to_ids(VISION)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    sizes = dict(hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    rope = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=10000.0)
    text = sizes | dict(num_key_value_heads=2, vocab_size=len(tokenizer) + more, rope_parameters=rope)
    vision = dict(depth=2, embed_dim=32, num_heads=2, hidden_size=WIDTH, mlp_ratio=2)
    return dict(text_config=text, vision_config=vision, **dict(zip(names, numbers, strict=True)))


@pytest.fixture(scope="session")
def hpsv3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2VLForConditionalGeneration]:
    """Files of Qwen2-VL and of HPSv3 in the published layout, with small random weights, and their model."""
    root = tmp_path_factory.mktemp("hpsv3")
    (root / REPOSITORY / SOURCE).parent.mkdir(parents=True)
    (root / REPOSITORY / SOURCE).write_text(CODE)
    tokenizer = _qwen_tokenizer()
    tokenizer.add_tokens(VISION, special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "qwen")
    config = Qwen2VLConfig(**qwen_config(tokenizer, more=1))
    config.save_pretrained(root / "qwen")
    Qwen2VLImageProcessor().save_pretrained(root / "qwen")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2VLForConditionalGeneration(config)
        for parameter in model.parameters():
            parameter.data.mul_(3)  # so that images and prompts tell
        shapes = {"0": (1024, WIDTH), "3": (16, 1024), "5": (2, 16)}
        head = {f"rm_head.{layer}.weight": torch.randn(shape) / shape[1] ** 0.5 for layer, shape in shapes.items()}
        head |= {f"rm_head.{layer}.bias": torch.randn(shape[0]) for layer, shape in shapes.items()}
    (root / "model").mkdir()
    # As older versions of transformers, by which it was saved, name its parts.
    state = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value.clone()
        for name, value in model.state_dict().items()
    }
    save_file(state | head, root / "model" / WEIGHTS)
    return root, model.eval()


@pytest.fixture(scope="session")
def qwen2vl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen2-VL in the published layout with small random weights; its vocabulary spells most words in letters."""
    root = tmp_path_factory.mktemp("qwen2vl")
    tokenizer = _qwen_tokenizer()
    tokenizer.add_tokens(VISION, special_tokens=True)
    tokenizer.add_tokens([" yes"])  # other words after a space begin with a token of the space alone
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=TEMPLATE)
    processor.save_pretrained(root)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(**qwen_config(tokenizer)))
        for parameter in model.parameters():
            parameter.data.mul_(3)  # so that images and prompts tell
    model.save_pretrained(root)
    return str(root)


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
