"""GELU by the logistic function against PyTorch's, and which transformers have it."""

from typing import Any

import torch
from diffusers.models import activations
from nano import load_nano
from torch import nn
from torch.nn import functional as F

from solrl_lightning.policies.compilation import LogisticGELU, ProjectedLogisticGELU, compile_blocks, logistic_gelu


def test_logistic_gelu_is_the_tanh_approximation() -> None:
    x = torch.linspace(-30, 30, 4001)
    torch.testing.assert_close(logistic_gelu(x), F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)
    assert logistic_gelu(x.bfloat16()).dtype == torch.bfloat16


def test_only_compiled_transformers_have_it(architecture: str, folder: str) -> None:
    model = load_nano(architecture, folder)

    def count(kinds: Any) -> int:
        return sum(isinstance(module, kinds) for module in model.transformer.modules())

    gelus = count((nn.GELU, activations.GELU))
    assert count((LogisticGELU, ProjectedLogisticGELU)) == 0
    compile_blocks(model.transformer, backend="eager")
    assert count((LogisticGELU, ProjectedLogisticGELU)) == gelus
