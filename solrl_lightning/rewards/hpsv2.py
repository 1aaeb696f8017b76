"""HPSv2.1: human preference for an image, given a prompt (Wu et al. 2023, arXiv 2306.09341), by a CLIP ViT-H/14.

    reward = cosine(image, prompt)

The weights load into open_clip's model, whose 686 tensors have the same names and shapes. The published ``hpsv2``
package has an old copy of open_clip, and its wheel lacks the BPE vocabulary.

Shapes: B images, U unique prompts, D numbers per embedding.
"""

from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.functional import normalize

from solrl_lightning.rewards.loading import floating_dtype, load_open_clip
from solrl_lightning.rewards.preprocessing import pad_to_square
from solrl_lightning.rewards.towers import TwoTowers

WEIGHTS = "HPS_v2.1_compressed.pt"  # in the hub repository


class HPSv2(TwoTowers):
    """HPSv2 with open_clip's model.

    Args:
        pretrained: hub id or folder with HPS_v2.1_compressed.pt, or a .pt file with a state_dict.
        architecture: open_clip's name of the weights' architecture, one with CLIP's own text tower.
        dtype: of weights and activations; on a GPU float32 is TF32, and bfloat16 and float16 are faster but round the
            scores more.
    """

    name = "hpsv2"

    def __init__(
        self,
        pretrained: str,
        architecture: str = "ViT-H-14",
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = torch.float32,
    ) -> None:
        from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD, tokenize

        self.device, self.dtype = torch.device(device), floating_dtype(self.name, dtype)
        model: Any = load_open_clip(self.name, pretrained, WEIGHTS, architecture, self.device)
        self._mean, self._std = OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
        size = model.visual.image_size
        self._side: int = size if isinstance(size, int) else size[0]
        self._tokenize, self._context = tokenize, model.context_length
        self.model = model.eval().requires_grad_(False).to(self.device, self.dtype)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.cosine(images, prompts)

    def embed_images(self, images: Tensor) -> Tensor:
        pixels = normalize(pad_to_square(images, self._side), self._mean, self._std)
        return self.model.encode_image(pixels.to(self.dtype))

    def embed_texts(self, prompts: list[str]) -> Tensor:
        return self.model.encode_text(self._tokenize(prompts, self._context).to(self.device))
