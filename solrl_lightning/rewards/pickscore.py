"""PickScore: human preference for an image, given a prompt (Kirstain et al. 2023, Pick-a-Pic, arXiv 2305.01569).

    reward = exp(logit_scale) * cosine(image, prompt) / 26

The model is a CLIP ViT-H/14, fine-tuned on users' choices between two images.
"""

from torch import Tensor

from solrl_lightning.rewards.towers import TransformersCLIP

_SCALE = 26.0  # Flow-GRPO, DiffusionNFT and Sol-RL divide by it; typical scores are near 1


class PickScore(TransformersCLIP):
    """PickScore, with the arguments of ``TransformersCLIP``."""

    name = "pickscore"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.logit_scale / _SCALE * self.cosine(images, prompts)
