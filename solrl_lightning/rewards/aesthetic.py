"""LAION's aesthetic predictor (christophschuhmann/improved-aesthetic-predictor, version sac+logos+ava1-l14-linearMSE).

reward = head(e / |e|), e the image's embedding by OpenAI's CLIP ViT-L/14
"""

from collections import OrderedDict
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_lightning.artifacts.files import check_state_dict, load_tensors
from solrl_lightning.rewards.towers import TransformersCLIP

WEIGHTS = ("aesthetic-model.pth", "sac+logos+ava1-l14-linearMSE.pth")  # names on the hub and in LAION's repository

_WIDTHS = (1024, 128, 64, 16, 1)
_PLACES = (0, 2, 4, 6, 7)  # of the linear layers in the published model; dropout layers are between them


class Aesthetic(TransformersCLIP):
    """LAION's aesthetic predictor, with the arguments of ``TransformersCLIP`` and:

    Args:
        head: hub id or folder with aesthetic-model.pth, or with LAION's own file, or a .pth file.

    Raises:
        UserError: the head is missing or damaged or does not fit CLIP; see also ``TransformersCLIP``.
    """

    name = "aesthetic"

    def __init__(
        self,
        pretrained: str,
        processor: str,
        head: str,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = torch.float32,
    ) -> None:
        super().__init__(pretrained, processor, device, dtype)
        self.head = load_head(head, self.model.config.projection_dim).requires_grad_(False).to(self.device)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.head(F.normalize(self.embeddings(images), dim=-1)).squeeze(-1)


def load_head(name: str, width: int) -> nn.Sequential:
    """Return the head for embeddings of ``width`` numbers, in float32. Raises ``UserError``: see ``Aesthetic``."""
    key, hint = "reward.aesthetic.head", "Or give the path of a local .pth file."
    weights = load_tensors(key, name, *WEIGHTS, kind="aesthetic predictor", hint=hint)
    head = linear_head(width)
    parameters = {tensor.removeprefix("layers."): value for tensor, value in weights.items()}
    unfit, fix = f"it does not fit embeddings of {width} numbers", "Set reward.pretrained to CLIP ViT-L/14."
    check_state_dict(key, name, head.state_dict(), parameters, unfit, fix)
    head.load_state_dict(parameters)
    return head


def linear_head(width: int) -> nn.Sequential:
    """Return the five linear layers, named as in the published file, without the dropouts of training between them."""
    layers = [nn.Linear(*sizes) for sizes in pairwise((width, *_WIDTHS))]
    return nn.Sequential(OrderedDict((f"{place}", layer) for place, layer in zip(_PLACES, layers, strict=True)))
