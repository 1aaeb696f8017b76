"""Statistics of pictures, which tell a policy that exploits its reward from one that serves it.

Shapes: images [B, 3, H, W] in [0, 1], or videos [B, F, 3, H, W]; P prompts with n images each.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

STATISTICS = ("brightness", "saturation", "edges", "diversity")
_SIDE = 16  # of a thumbnail, in pixels
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def describe(images: Tensor) -> Tensor:
    """Return float32 [B, 3 + 3 * 16 * 16]: brightness, saturation and edges of each image, and its thumbnail.

    Brightness is the mean luma. Saturation is the mean difference of the largest and the smallest channel of a pixel.
    Edges is the mean absolute difference of the luma of adjacent pixels, horizontally and vertically.
    The values of a video are the means over its frames.
    """
    if images.ndim == 5:
        return describe(images.flatten(0, 1)).unflatten(0, images.shape[:2]).mean(1)
    images = images.float()
    luma = torch.einsum("bchw,c->bhw", images, images.new_tensor(_LUMA))
    saturation = images.amax(1) - images.amin(1)
    edges = (luma.diff(dim=1).abs().mean((1, 2)) + luma.diff(dim=2).abs().mean((1, 2))) / 2
    thumbnails = F.adaptive_avg_pool2d(images, _SIDE).flatten(1)
    return torch.cat([torch.stack([luma.mean((1, 2)), saturation.mean((1, 2)), edges], dim=1), thumbnails], dim=1)


def prompt_statistics(described: Tensor) -> Tensor:
    """Return float32 [P, 4], the ``STATISTICS`` of each prompt, of ``describe``'s values [P, n, ...].

    The first three are means over a prompt's images. Diversity is the root mean squared deviation of its images'
    thumbnails from their mean, 0 for a single image.
    """
    means, thumbnails = described[..., :3].mean(1), described[..., 3:]
    diversity = thumbnails.var(dim=1, correction=0).mean(-1, keepdim=True).sqrt()
    return torch.cat([means, diversity], dim=1)
