"""BF16 arithmetic on CPUs that have no BF16 units.

There PyTorch's bfloat16 matrix product is about ten times slower than its float32 product. The product of two bfloat16
numbers is exact in float32, so operands are widened, multiplied in float32, and the result is rounded to bfloat16 once,
as the hardware does; only the order of the sums differs.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def has_bf16_units() -> bool:
    """Whether this CPU has bfloat16 matrix instructions and PyTorch the library (oneDNN) that uses them."""
    found = torch.cpu.get_capabilities()
    units = ("amx_bf16", "avx512_bf16", "bf16")  # the last one on ARM
    return torch.backends.mkldnn.is_available() and any(found.get(unit, False) for unit in units)


class BF16Linear(nn.Linear):
    """A linear layer of bfloat16 weights and results whose products run in float32."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)


def use_fp32_products(transformer: nn.Module) -> None:
    """Replaces the class of every linear layer of ``transformer`` by ``BF16Linear``, in place."""
    for module in transformer.modules():
        if type(module) is nn.Linear:
            module.__class__ = BF16Linear
