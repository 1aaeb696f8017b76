"""Rows of task=doctor that compare PyTorch's attention kernels on the model's shapes.

Shapes: B images, H heads, Q queries, K keys, D numbers of a head.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from solrl_lightning.artifacts.tables import Row, judged
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.machine.attention import without_gradients
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.sizing.timing import format_seconds, least_seconds
from solrl_lightning.sizing.trace import FusedAttention

Shape = tuple[int, int, int, int]  # H, Q, K, D

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_BARRED = {"sampling": (), "training": ("cudnn",)}  # kernels that are never chosen (`machine.attention`)
_COMPARED = 64  # queries that are compared with the exact result
_HEADS = 2  # of one image, whose gradients are compared with the exact ones
_TOLERANCE = 2**-6  # of the largest output; BF16 rounds probabilities and outputs by 2^-9
_GRADIENT_TOLERANCE = 2**-4  # of the largest gradient; BF16 on a CPU has 2^-6
_SLOW = 1.15  # times the fastest kernel


class _Recorder(FusedAttention):
    """Records the shapes of attention, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[Shape, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            query, key = args[:2] if args else (kwargs["query"], kwargs["key"])
            self.shapes[query.shape[1], query.shape[2], key.shape[2], query.shape[3]] = None
        return super().__torch_function__(func, types, args, kwargs)


@torch.no_grad()
def attention_shapes(model: PipelineAdapter) -> list[Shape]:
    """Return the different shapes of attention in a forward pass of a model on ``meta``."""
    x = model.noise(torch.zeros(1, dtype=torch.int64))
    with _Recorder() as recorder:
        model.velocity(model.transformer, x, torch.ones(1, device=model.device), model.encode([Prompt("a prompt")]))
    return list(recorder.shapes)


def check_attention(shapes: Iterable[Shape], batches: tuple[int, int], device: torch.device) -> Iterator[Row]:
    """Yield a row for each shape: seconds of the kernel that PyTorch takes and of each that it has, and their errors.

    ``batches``: images of a forward pass that samples, and of a forward and backward pass that trains.
    """
    for heads, queries, keys, size in shapes:
        sampled, trained = (_operands((batch, heads, queries, keys, size), device) for batch in batches)
        kernels: dict[str, Callable[..., Tensor]] = {"chosen": scaled_dot_product_attention}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says why it has no kernel
            for name, backend in _KERNELS.items():
                run = partial(_with_kernel, backend)
                if _has(run, sampled):
                    kernels[name] = run
            errors = {name: _error(kernel, sampled) for name, kernel in kernels.items()}
            seconds = {
                "sampling": least_seconds({n: partial(_sample, k, sampled) for n, k in kernels.items()}, device),
                "training": least_seconds({n: partial(_train, k, trained) for n, k in kernels.items()}, device),
            }
            gradients = {name: _gradient_error(kernel, trained) for name, kernel in kernels.items()}
        yield judge_attention(f"attention {heads}x{queries}x{size}", seconds, errors, gradients)


def judge_attention(
    check: str, seconds: dict[str, dict[str, float]], errors: dict[str, float], gradients: dict[str, float]
) -> Row:
    """Return a row: wrong if the chosen kernel is, slow if another one is faster that may be chosen.

    ``seconds`` of sampling and training are by kernel; errors are relative to the largest output and gradient.
    """
    parts = [
        f"{what}: " + ", ".join(f"{name} {format_seconds(value)}" for name, value in kernels.items())
        for what, kernels in seconds.items()
    ]
    faulty = [name for name in errors if not (errors[name] <= _TOLERANCE and gradients[name] <= _GRADIENT_TOLERANCE)]
    if faulty:
        parts.append(f"{', '.join(faulty)}: wrong results or gradients")
    measured = {"seconds": seconds, "errors": errors, "gradient_errors": gradients}
    report = "a report of this with doctor.json"
    expected = (
        f"errors at most {_TOLERANCE:.1e} of the largest output and {_GRADIENT_TOLERANCE:.1e} of the largest gradient: "
        f"BF16 rounds by 2e-3; chosen at most {_SLOW:g} times the fastest kernel's seconds"
    )
    slow = any(
        kernels["chosen"]
        > _SLOW * min((kernels[k] for k in kernels.keys() - {*faulty, *_BARRED[what]}), default=math.inf)
        for what, kernels in seconds.items()
    )
    return judged(check, "; ".join(parts), report, measured, expected, wrong="chosen" in faulty, slow=slow)


def _operands(shape: tuple[int, int, int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in the layout of diffusers' blocks: of a token, the heads follow each other."""
    batch, heads, queries, keys, size = shape

    def random(tokens: int) -> Tensor:
        x = torch.randn(batch, tokens, heads, size, device=device, dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_()

    return random(queries), random(keys), random(keys)


def _with_kernel(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(query, key, value)


def _has(kernel: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> bool:
    """Return whether PyTorch has this kernel for the device and the shape."""
    try:
        _sample(kernel, operands)
    except RuntimeError:
        return False
    return True


@torch.no_grad()
def _sample(kernel: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> Tensor:
    with without_gradients(operands[0].device):
        return kernel(*operands)


def _train(kernel: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run forward and backward, and return the gradients of the operands.

    The gradient of the result is a part of each row of a wider matrix, as in blocks that join attention and MLP.
    """
    result = kernel(*operands)
    wide = torch.cos(result.detach()).transpose(1, 2).repeat(1, 1, 1, 2)
    return torch.autograd.grad(result, operands, wide[..., : result.shape[3]].transpose(1, 2))


def _exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1) @ value


@torch.no_grad()
def _error(kernel: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> float:
    """Return the largest error of one image's first queries relative to the largest output, against softmax(q k^T /
    sqrt(D)) v.
    """
    query, key, value = (operand[:1].float() for operand in operands)
    exact = _exact(query[:, :, :_COMPARED], key, value)
    result = kernel(*operands)[:1, :, :_COMPARED].float()
    return ((result - exact).abs().max() / exact.abs().max()).item()


def _gradient_error(kernel: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> float:
    """Return the largest error of the gradients of one image's first heads relative to the largest of their operand."""
    heads = tuple(operand[:1, :_HEADS].detach().float().requires_grad_() for operand in operands)
    errors = [
        ((gradient[:1, :_HEADS].float() - exact).abs().max() / exact.abs().max()).item()
        for gradient, exact in zip(_train(kernel, operands), _train(_exact, heads), strict=True)
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)
