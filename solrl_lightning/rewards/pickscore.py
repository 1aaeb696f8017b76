"""PickScore: which image people would pick for a prompt, after Kirstain et al. 2023 (Pick-a-Pic).

    reward = exp(logit_scale) * cosine(image, prompt) / 26

A CLIP ViT-H/14 that was fine-tuned on pairs of images of which users preferred one.
"""

from torch import Tensor

from solrl_lightning.rewards.towers import TransformersCLIP

_SCALE = 26.0  # brings usual scores near 1; Flow-GRPO's convention, which DiffusionNFT and Sol-RL share


class PickScore(TransformersCLIP):
    """See the module docstring; the arguments are those of ``TransformersCLIP``."""

    name = "pickscore"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.logit_scale / _SCALE * self.cosine(images, prompts)
