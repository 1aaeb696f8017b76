"""Quantised layers beside a low-rank branch in 16 bits, which the policy's LoRA joins (``precision.low_rank``).

    y = Q(W - U V) x + U V x + s B A x

U V is the best approximation of the base weight W by a matrix of rank r. Its residual is quantised once, with less
error than W has, as in SVDQuant (Li et al. 2024, arXiv 2411.05007, equation 5, here without smoothing of activations).
The LoRA update s B A is not rounded to the format: a new policy copies A and B, and quantises nothing.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.policies.base_weights import dense
from solrl_lightning.quantization.backends import Backend
from solrl_lightning.quantization.linear import Conv1x1AsLinear, QuantizedLinear, as_linear
from solrl_lightning.quantization.rules import LayerPlan

_ITERATIONS = 4  # of the randomised SVD; its error exceeds that of the exact one by less than 1 %


class LowRankLinear(nn.Module):
    """A linear layer as a quantised residual and a branch of rank r + r': x [..., in] -> y [..., out].

    Args:
        linear: layer to replace.
        linear_cls: class of the quantised residual.
        rank: r, of the base weight's part in the branch.
        lora_rank: r', of the adapter's part, which is 0 at first.
    """

    @torch.no_grad()
    def __init__(self, linear: nn.Linear, linear_cls: type[QuantizedLinear], rank: int, lora_rank: int) -> None:
        super().__init__()
        weight = dense(linear.weight)
        up, down = low_rank_factors(weight.float(), rank)
        self.down, self.up = (
            type(linear)(inputs, outputs, bias=False, device=weight.device, dtype=weight.dtype).requires_grad_(False)
            for inputs, outputs in ((linear.in_features, rank + lora_rank), (rank + lora_rank, linear.out_features))
        )
        self.down.weight.zero_()[:rank] = down
        self.up.weight.zero_()[:, :rank] = up
        # The residual is that of the rounded factors.
        product = self.up.weight[:, :rank].float() @ self.down.weight[:rank].float()
        residual = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        residual.weight = nn.Parameter((weight.float() - product).to(weight.dtype), requires_grad=False)
        residual.bias = linear.bias
        self.residual = linear_cls(residual)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.residual(x)
        return y + self.up(self.down(x))

    @torch.no_grad()
    def set_lora(self, down: Tensor, up: Tensor) -> None:
        """Write an adapter's factors A [r', in] and s B [out, r'] in place, so that compiled graphs stay valid."""
        self.down.weight[self.rank :] = down.flatten(1)  # of a convolution [r', in, 1, 1]
        self.up.weight[:, self.rank :] = up.flatten(1)


def low_rank_branch(transformer: nn.Module, name: str) -> LowRankLinear | None:
    """Return the named layer if it has a low-rank branch."""
    layer = transformer.get_submodule(name)
    layer = layer.linear if isinstance(layer, Conv1x1AsLinear) else layer
    return layer if isinstance(layer, LowRankLinear) else None


def low_rank_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return U [out, r] and V [r, in] whose product is the best approximation of weight [out, in], up to 1 %.

    Both have the square roots of the singular values. Does not change the state of torch's generators.
    """
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        left, values, right = torch.svd_lowrank(weight, q=min(2 * rank, *weight.shape), niter=_ITERATIONS)
    roots = values[:rank].sqrt()
    return left[:, :rank] * roots, (right[:, :rank] * roots).t()


def convert_with_low_rank(
    transformer: nn.Module,
    plans: Iterable[LayerPlan],
    backend: Backend,
    rank: int,
    adapted: Collection[str],
    lora_rank: int,
) -> None:
    """Replace the planned layers of ``transformer`` in place, one at a time; ``adapted`` names those with a LoRA.

    Raises:
        UserError: ``rank`` is no less than the width of a layer.
    """
    for layer in plans:
        if not layer.quantized or backend.linear_cls is None:
            continue
        width = min(layer.in_features, layer.out_features)
        if rank >= width:
            raise UserError(
                f"precision.low_rank={rank} is invalid: it must be below {width}, the width of {layer.name}. Use "
                f"precision.low_rank={max(1, width // 32)}, or 0 for none."
            )
        module = transformer.get_submodule(layer.name)
        branch = LowRankLinear(as_linear(module), backend.linear_cls, rank, lora_rank if layer.name in adapted else 0)
        transformer.set_submodule(layer.name, Conv1x1AsLinear(branch) if isinstance(module, nn.Conv2d) else branch)
