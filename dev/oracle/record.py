"""What the image-reward package says of small weights and pictures, recorded for tests/rewards/test_imagereward.py.

Run in the environment of requirements.txt; writes tests/rewards/oracle/recorded:

    oracle/bin/python dev/oracle/record.py

The model is the package's own (its ImageReward around its BLIP_Pretrain, VisionTransformer, BertModel and MLP) at a
small size: create_vit, which knows two large sizes only, makes the same class with other numbers here, and the head
has another input width. Weights are random, at scales where a wrong LayerNorm epsilon, activation, start token or text
length moves scores by more than the tolerance, and scores spread as the released model's do.
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import ImageReward  # noqa: F401  (its submodules are taken from sys.modules: the package hides one behind a class)
import torch
from PIL import Image
from safetensors.torch import save_file

RECORDED = Path(__file__).parents[2] / "tests" / "rewards" / "oracle" / "recorded"
PACKAGES = ("image-reward", "transformers", "timm", "torch", "torchvision", "pillow")
WIDTH, TEXT_WIDTH, SIZE = 128, 32, 224
WORDS = "an the red blue green circle square cat dog of on above below photo two three and in by night light".split()
PIECES = [*"abcdefghijklmnopqrstuvwxyz0123456789", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789")]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *PIECES, *".,!?-'()[]"]
PROMPTS = [
    "a red circle above a blue square",
    "A Photo of TWO Café-Dogs, by night!",  # capitals, accents, punctuation, pieces of words
    "",
    "three cats ☂ 猫 and 17 dogs",  # unknown characters
    "a photo of a green cat [ENC] on the square",  # one of BLIP's tokens, spelled out
    "the light of the night " * 8 + "and a red dog",  # 43 tokens; the dog is cut off
    "the light of the night " * 8 + "and a blue cat",  # so this scores as the one before
]
SIZES = [(224, 224), (224, 224), (96, 130), (130, 96), (300, 180), (64, 64), (181, 257)]  # width, height
MED_CONFIG = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": TEXT_WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 40,
    "model_type": "bert",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": len(VOCABULARY) + 2,
    "encoder_width": 768,
    "add_cross_attention": True,
}


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Hard edges, gradients and blocks of colour: what resizing gets wrong, in few bytes of PNG."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(3, height // 12, width // 12, generator=generator)
    pixels = torch.nn.functional.interpolate(blocks[None], (height, width), mode="nearest")[0]
    ramp = torch.linspace(0, 1, width).expand(height, width)
    pixels = torch.where(torch.arange(height)[:, None] % 64 < 24, 0.5 * pixels + 0.5 * ramp, pixels)
    pixels[:, height // 3 : height // 2, width // 4 : width // 2] = float(seed % 2)
    return Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy())


def small_vit(vit, image_size, *_):
    vision = sys.modules["ImageReward.models.BLIP.vit"]
    return vision.VisionTransformer(img_size=image_size, embed_dim=WIDTH, depth=2, num_heads=2, mlp_ratio=1.0), WIDTH


def build() -> torch.nn.Module:
    """Return the package's model; the tokenizer is the one in the working directory."""
    sys.modules["ImageReward.models.BLIP.blip_pretrain"].create_vit = small_vit
    package = sys.modules["ImageReward.ImageReward"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "med_config.json"
        file.write_text(json.dumps(MED_CONFIG))
        model = package.ImageReward(str(file))
    model.mlp = package.MLP(TEXT_WIDTH)
    return model.eval()


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name.lower():
            parameter.data = 0.1 * noise + float(name.endswith("weight"))
        elif "embed" in name or "cls_token" in name:  # so small that the epsilon of the LayerNorm behind them counts
            parameter.data = 0.003 * noise / (parameter[0].numel() ** 0.5 if parameter.ndim == 4 else 1)
        else:
            parameter.data = noise * (1.5 / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else 0.1)


def halve(model: torch.nn.Module) -> None:
    """Weights that 16 bits hold exactly, since so they are stored."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()


@torch.no_grad()
def scores(model: torch.nn.Module, pictures: list[Image.Image]) -> list[list[float]]:
    """[prompts][pictures]."""
    return [model.inference_rank(prompt, pictures)[1] for prompt in PROMPTS]


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = Path("bert-base-uncased")  # the name that the package asks for
    tokenizer.mkdir()
    (tokenizer / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    model = build()
    randomise(model)
    halve(model)
    raw = torch.tensor(scores(model, pictures))
    model.mlp.layers[-1].weight.data /= raw.std()
    model.mlp.layers[-1].bias.data = (model.mlp.layers[-1].bias.data - raw.mean()) / raw.std()
    halve(model)

    RECORDED.mkdir(exist_ok=True)
    weights = {name: t.half() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, RECORDED / "weights.safetensors")
    (RECORDED / "med_config.json").write_text(json.dumps(MED_CONFIG, indent=2) + "\n")
    (RECORDED / "vocab.txt").write_bytes((tokenizer / "vocab.txt").read_bytes())
    for number, image in enumerate(pictures):
        image.save(RECORDED / f"{number}.png", optimize=True)
    content = {
        "versions": {package: version(package) for package in PACKAGES},
        "prompts": PROMPTS,
        "sizes": SIZES,
        "tokens": model.blip.tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=35).input_ids,
        "scores": scores(model, pictures),
    }
    lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in content.items())
    (RECORDED / "scores.json").write_text(f"{{\n{lines}\n}}\n")
    print(torch.tensor(content["scores"]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
