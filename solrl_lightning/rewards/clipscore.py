"""CLIPScore: how well an image matches its prompt, as OpenAI's CLIP ViT-L/14 sees it.

    reward = cosine(image, prompt)

The published Sol-RL presets divide CLIP's logit by 100, its logit scale, which is this cosine. Hessel et al. 2021, who
named the metric, report 2.5 max(cosine, 0) of ViT-B/32; a positive factor changes no ranking and no advantage.
"""

from torch import Tensor

from solrl_lightning.rewards.towers import TransformersCLIP


class CLIPScore(TransformersCLIP):
    """See the module docstring; the arguments are those of ``TransformersCLIP``."""

    name = "clipscore"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.cosine(images, prompts)
