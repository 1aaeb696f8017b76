"""ImageReward v1.0 (Xu et al. 2023, arXiv 2304.05977) with transformers' BLIP: one image and one joint pass per image.

    reward = (head(joint(text, image)[CLS]) - 0.1672) / 1.0333

As in training: LayerNorm eps is 1e-6 in the image tower and the configured one (1e-12) in the text tower; GELU is
exact; text is padded to and truncated at 35 tokens; the first token is [CLS] (BLIP's matching head uses [ENC]); the
head of five linear layers has no activations.

Shapes: B images, U unique prompts, S text tokens, V image tokens.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.functional import InterpolationMode, center_crop, normalize, resize
from transformers import BertTokenizer, BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

from solrl_lightning.artifacts.complete import check_undamaged, reading
from solrl_lightning.artifacts.files import check_state_dict, check_state_dict_keys, load_tensors
from solrl_lightning.artifacts.hub import fetch
from solrl_lightning.errors import UserError
from solrl_lightning.options.rules import Count
from solrl_lightning.rewards.aesthetic import linear_head
from solrl_lightning.rewards.base import Reward, unique_prompts
from solrl_lightning.rewards.loading import floating_dtype

WEIGHTS, TEXT_CONFIG = "ImageReward.pt", "med_config.json"  # in the hub repository
_RELEASE, _TOKENIZER = "zai-org/ImageReward", "google-bert/bert-base-uncased"
_KEY, _KIND = "reward.imagereward.pretrained", "ImageReward model"
_HINT = f"`hf download {_RELEASE} --local-dir <folder>` makes a folder with all files."
_SCORE_MEAN, _SCORE_STD = 0.16717362830052426, 1.0333394966054072  # of the head's output, fixed with the release
_TOKENS = 35  # S
_ADDED_TOKENS = ["[DEC]", "[ENC]"]  # BLIP appends them to BERT's vocabulary in this order
_PIXEL_MEAN, _PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's
_ATTENTION_HEAD = 64  # numbers per attention head of the image tower

# Each name in ImageReward.pt matches one pattern: of _RENAMED, pattern -> name here, or of _UNUSED, pattern -> reason.
_RENAMED = {
    r"blip\.visual_encoder\.cls_token": r"image_tower.embeddings.class_embedding",
    r"blip\.visual_encoder\.pos_embed": r"image_tower.embeddings.position_embedding",
    r"blip\.visual_encoder\.patch_embed\.proj\.(\w+)": r"image_tower.embeddings.patch_embedding.\1",
    r"blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.(\w+)": r"image_tower.encoder.layers.\1.layer_norm\2.\3",
    r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.(\w+)": r"image_tower.encoder.layers.\1.self_attn.qkv.\2",
    r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.(\w+)": r"image_tower.encoder.layers.\1.self_attn.projection.\2",
    r"blip\.visual_encoder\.blocks\.(\d+)\.mlp\.(fc[12]\.\w+)": r"image_tower.encoder.layers.\1.mlp.\2",
    r"blip\.visual_encoder\.norm\.(\w+)": r"image_tower.post_layernorm.\1",
    r"blip\.text_encoder\.((?:embeddings\.(?!position_ids)|encoder\.layer\.).+)": r"text_tower.\1",
    r"mlp\.layers\.(\d\.\w+)": r"head.\1",
}
_UNUSED = {
    r"blip\.text_encoder\.embeddings\.position_ids": "the numbers 0, 1, 2, ..., which transformers computes",
    r"blip\.(vision|text)_proj\.(weight|bias)": "projections of BLIP's contrastive loss, which the score does not use",
}
_TEXT_KEYS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings "
    "hidden_act layer_norm_eps pad_token_id"
).split()


class ImageReward(Reward):
    """ImageReward v1.0.

    Args:
        pretrained: hub id (1.8 GB) or folder with ImageReward.pt and med_config.json.
        tokenizer: hub id or folder of BERT's uncased tokenizer.
        device: where to score.
        dtype: of weights and activations of the two towers, as in ``TransformersCLIP``; the head stays in float32.
        batch: images per forward pass.

    Raises:
        UserError: a file is missing, is damaged, is not ImageReward's, or does not fit the others.
    """

    name = "imagereward"

    def __init__(
        self,
        pretrained: str,
        tokenizer: str = _TOKENIZER,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = torch.float32,
        batch: Count = 32,
    ) -> None:
        self.device, self.dtype, self.batch = torch.device(device), floating_dtype(self.name, dtype), batch
        text_config = _read_text_config(fetch(pretrained, TEXT_CONFIG, key=_KEY, kind=_KIND, hint=_HINT))
        self.tokenizer = load_tokenizer(tokenizer, text_config["vocab_size"])
        weights = rename(load_tensors(_KEY, pretrained, WEIGHTS, kind=_KIND, hint=_HINT), pretrained)
        model = build(weights, text_config, pretrained).eval().requires_grad_(False)
        self.image_tower: Any = model["image_tower"].to(self.device, self.dtype)
        self.text_tower: Any = model["text_tower"].to(self.device, self.dtype)
        self.head = model["head"].to(self.device)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        texts, place = unique_prompts(prompts)
        tokens = self.tokenizer(texts, padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt")
        rows = images, tokens["input_ids"][place], tokens["attention_mask"][place]
        batches = zip(*(part.split(self.batch) for part in rows), strict=True)
        return torch.cat([self._score_batch(*batch) for batch in batches])

    def _score_batch(self, images: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return scores, float32 [B], of images [B, 3, H, W] and tokens [B, S]; mask [B, S] is 0 at padding."""
        pixels = preprocess(images.to(self.device), self.image_tower.config.image_size)
        seen = self.image_tower(pixels.to(self.dtype)).last_hidden_state  # [B, V, width of the image tower]
        joint = self.text_tower(tokens.to(self.device), mask.to(self.device), encoder_hidden_states=seen)
        raw = self.head(joint.last_hidden_state[:, 0].float())[:, 0]
        return (raw - _SCORE_MEAN) / _SCORE_STD


def preprocess(images: Tensor, size: int) -> Tensor:
    """Return images in [0, 1] resized, cropped and normalised to float32 [B, 3, size, size].

    Uses torchvision's functions, as the package does: their crop rounds an odd margin to even, others round down.
    """
    resized = resize(images.float(), [size], interpolation=InterpolationMode.BICUBIC, antialias=True)
    return normalize(center_crop(resized, [size]).clamp(0, 1), _PIXEL_MEAN, _PIXEL_STD)


def load_tokenizer(tokenizer: str, vocab_size: int) -> BertTokenizer:
    """Return BERT's tokenizer with BLIP's two additional tokens."""
    # Not from_pretrained of a hub id: transformers 5 silently builds an empty tokenizer when files are missing.
    key, hint = "reward.imagereward.tokenizer", _HINT.replace(_RELEASE, _TOKENIZER)
    vocabulary = fetch(tokenizer, "vocab.txt", "tokenizer.json", key=key, kind="BERT tokenizer", hint=hint)
    check_undamaged(key, tokenizer)
    with reading(f"{key}={tokenizer} is invalid: {vocabulary}"):
        loaded = BertTokenizer.from_pretrained(vocabulary.parent)
    loaded.add_tokens(_ADDED_TOKENS, special_tokens=True)
    if len(loaded) != vocab_size:
        raise UserError(
            f"{key}={tokenizer} is invalid: the model has {vocab_size} tokens, and this tokenizer has {len(loaded)} "
            f"with {' and '.join(_ADDED_TOKENS)}. Set {key} to the tokenizer of the training, which is {_TOKENIZER} "
            "for the release."
        )
    return loaded


def rename(weights: dict[str, Tensor], pretrained: str) -> dict[str, Tensor]:
    """Return the weights of ImageReward.pt under the names of ``build``'s modules, without the unused ones."""
    renamed, unknown = {}, []
    for name, weight in weights.items():
        ours = [re.sub(pattern, new, name) for pattern, new in _RENAMED.items() if re.fullmatch(pattern, name)]
        if ours:
            renamed[ours[0]] = weight
        elif not any(re.fullmatch(pattern, name) for pattern in _UNUSED):
            unknown.append(name)
    check_state_dict_keys(_KEY, pretrained, [], unknown)
    return renamed


def build(weights: dict[str, Tensor], text_config: dict[str, Any], pretrained: str) -> nn.ModuleDict:
    """Return image_tower, text_tower and head in float32 with the renamed weights, whose shapes size the first."""
    first_layer = "image_tower.encoder.layers.0.mlp.fc1.bias"
    sizes = "image_tower.embeddings.patch_embedding.weight", "image_tower.embeddings.position_embedding", first_layer
    check_state_dict_keys(_KEY, pretrained, [name for name in sizes if name not in weights], [])
    patches, positions, hidden = (weights[name].shape for name in sizes)  # [D, 3, patch, patch], [1, V, D], [4 D]
    width, patch = patches[0], patches[-1]
    layers = {name.split(".")[3] for name in weights if name.startswith("image_tower.encoder.layers.")}
    side = patch * round((positions[1] - 1) ** 0.5)
    counts = {"num_hidden_layers": len(layers), "num_attention_heads": width // _ATTENTION_HEAD}
    widths = {"hidden_size": width, "intermediate_size": hidden[0], "image_size": side, "patch_size": patch}
    vision = BlipVisionConfig(**counts, **widths, layer_norm_eps=1e-6, hidden_act="gelu")
    # is_decoder adds cross-attention to the image; self-attention is causal only if the call also sets is_decoder.
    start = text_config["vocab_size"] - len(_ADDED_TOKENS)  # [DEC], unused; transformers' default fits one vocabulary
    # On meta, which needs no memory and draws no random numbers; all weights come from the file.
    with reading(f"{_KEY}={pretrained} is invalid: its {TEXT_CONFIG}"), torch.device("meta"):
        text = BlipTextConfig(**text_config, bos_token_id=start, encoder_hidden_size=width, is_decoder=True)
        text_tower: Any = BlipTextModel(text, add_pooling_layer=False)
        image_tower = BlipVisionModel(vision)
        towers = {"image_tower": image_tower, "text_tower": text_tower, "head": linear_head(text.hidden_size)}
    model = nn.ModuleDict(towers)
    unfit, fix = f"its {WEIGHTS} and {TEXT_CONFIG} do not fit each other", f"`hf download {_RELEASE}`"
    check_state_dict(_KEY, pretrained, model.state_dict(), weights, unfit, f"Download both again: {fix}.")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
    text_tower.embeddings.position_ids = torch.arange(text.max_position_embeddings)[None]  # not in the file
    return model


def _read_text_config(file: Path) -> dict[str, Any]:
    with reading(f"the file {file} of the reward imagereward is invalid: it must be JSON with {', '.join(_TEXT_KEYS)}"):
        config = json.loads(file.read_text(encoding="utf-8"))
        return {key: config[key] for key in _TEXT_KEYS}
