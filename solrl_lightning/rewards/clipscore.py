"""CLIPScore: the match of image and prompt by OpenAI's CLIP ViT-L/14.

    reward = cosine(image, prompt)

The published Sol-RL presets divide CLIP's logit by its logit scale 100, which gives this cosine.
"""

from torch import Tensor

from solrl_lightning.rewards.towers import TransformersCLIP


class CLIPScore(TransformersCLIP):
    """CLIPScore, with the arguments of ``TransformersCLIP``."""

    name = "clipscore"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.cosine(images, prompts)
