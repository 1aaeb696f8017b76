"""The policy's LoRA adapters: "default" is trained, "old" samples.

Adapter weights are float32, because a step of 3e-4 would be rounded away in bfloat16. A *state* is a dict of
``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``, the names under which diffusers saves a LoRA.
"""

import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from solrl_lightning.errors import UserError
from solrl_lightning.names import OLD, TRAINED
from solrl_lightning.policies.base_weights import dense

log = logging.getLogger(__name__)

State = dict[str, Tensor]


def add_adapters(transformer: ModelMixin, config: LoraConfig, seed: int) -> dict[str, LoraLayer]:
    """Add both adapters, equal and without effect (B = 0), and return the adapted layers by name.

    Raises:
        UserError: a target of ``config`` is no layer of the transformer, or its rank exceeds the width of one.
    """
    shapes, modules = layer_shapes(transformer), transformer.named_modules()
    grouped = {name for name, module in modules if isinstance(module, nn.Conv2d) and module.groups > 1}
    widths = {name: min(shape[:2]) for name, shape in shapes.items() if name not in grouped}
    names = list(widths)
    targets = sorted(map(str, config.target_modules or ()))
    ends = tuple(f".{target}" for target in targets)
    unknown = [t for t in targets if not any(f".{name}".endswith(f".{t}") for name in names)]
    if unknown or not targets:
        raise UserError(
            f"model.lora.target_modules={targets} is invalid: it must list linear layers, or convolutions without "
            f"groups, of {type(transformer).__name__} by the ends of their names"
            f"{', and it has none named ' + ', '.join(unknown) if unknown else ''}. "
            "Leave it out for the layers of the model's file."
        )
    adapted = [name for name in names if f".{name}".endswith(ends)]
    least = min(widths[name] for name in adapted)
    if config.r > least:
        raise UserError(
            f"model.lora.rank={config.r} is invalid: it must be at most {least}, the width of the narrowest layer of "
            f"model.lora.target_modules. Set model.lora.rank={least} or less."
        )
    if any(f".{name}".endswith(ends) for name, _ in transformer.named_modules() if name not in widths):
        # peft would adapt these, too: attn.to_out of FLUX.2 is a layer in some blocks and a list of modules in others
        config = replace(config, target_modules=adapted)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # adding the second adapter
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated")  # peft never merges them here
        torch.manual_seed(seed)
        for name in (OLD, TRAINED):
            transformer.add_adapter(config, adapter_name=name)
    layers = {name: module for name, module in transformer.named_modules() if isinstance(module, LoraLayer)}
    for layer in layers.values():
        layer.is_trained = True
        for weights in (layer.lora_A, layer.lora_B):
            weights.float()
        if isinstance(layer, PeftLinear):
            layer.__class__ = FusedLoRALinear
    load_state(layers, OLD, adapter_state(layers, TRAINED))
    _activate(layers, TRAINED)
    return layers


def layer_shapes(transformer: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of the linear layers and convolutions, with adapters or without."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in transformer.named_modules():
        layer = name.removesuffix(".base_layer")
        if ".lora_" in name:
            continue
        if isinstance(module, nn.Linear):
            shapes[layer] = module.out_features, module.in_features
        elif isinstance(module, nn.Conv2d):
            shapes[layer] = module.out_channels, module.in_channels // module.groups, *module.kernel_size
    return shapes


class FusedLoRALinear(PeftLinear):
    """peft's LoRA of a linear layer as one autograd function, in the dtype of the base layer's product."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (adapter,) = self.active_adapters
        base = self.get_base_layer()
        down, up = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        product_dtype = getattr(base, "product_dtype", x.dtype)
        y: Tensor = _LoRAProduct.apply(
            x.flatten(0, -2), base.weight, base.bias, down, up, self.scaling[adapter], product_dtype
        )
        return y.to(x.dtype).unflatten(0, x.shape[:-1])


class _LoRAProduct(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T in ``dtype``, with gradients for x, A and B.

    peft computes the second term in the dtype of A and B, float32, on copies of x and y of that dtype. Here A and B are
    cast instead, and the term is added to the first one's result in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float, dtype: Any
    ) -> Tensor:
        down, up, wide = down.to(dtype), up.to(dtype), x.to(dtype)
        y = F.linear(wide, dense(weight).to(dtype), None if bias is None else bias.to(dtype))
        low = wide @ down.t()
        ctx.save_for_backward(x, weight, down, up, low)
        ctx.scale, ctx.dtype = scale, dtype
        # Of a result that was changed in place, or cast to its own dtype, compiled code of torch 2.11 has no gradients;
        # of a view of it, it has.
        return y.addmm_(low, up.t(), alpha=scale).view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, low = ctx.saved_tensors
        (g,) = gradients
        low_gradient = (g @ up) * ctx.scale
        up_gradient = (g.t() @ low).float() * ctx.scale
        down_gradient = (low_gradient.t() @ x.to(ctx.dtype)).float()
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = (g @ dense(weight).to(ctx.dtype)).addmm_(low_gradient, down).to(x.dtype)
        return x_gradient, None, None, down_gradient, up_gradient, None, None


def adapter_state(layers: dict[str, LoraLayer], adapter: str) -> State:
    """Return the adapter's tensors, not copies."""
    return {name: parameter.detach() for name, parameter in _parameters(layers, adapter).items()}


def _parameters(layers: dict[str, LoraLayer], adapter: str) -> dict[str, nn.Parameter]:
    parameters = {}
    for name, layer in layers.items():
        parameters[f"{name}.lora_A.weight"] = layer.lora_A[adapter].weight
        parameters[f"{name}.lora_B.weight"] = layer.lora_B[adapter].weight
    return parameters


def load_state(layers: dict[str, LoraLayer], adapter: str, state: State) -> None:
    for name, weight in adapter_state(layers, adapter).items():
        weight.copy_(state[name])


_BLOCK = re.compile(r"^\w*?\.\d+\.")  # such as transformer_blocks.0.


def read_lora(
    path: Path, transformer: ModelMixin, layers: dict[str, LoraLayer], pipeline_class: type[DiffusionPipeline]
) -> State:
    """Return the state of these adapted layers of ``transformer`` with the update of a LoRA file or folder.

    Exact up to the rounding of B, which gets the file's scale over alpha / r of the run (`read_lora_file`). What a file
    of a lower rank or of fewer layers lacks stays as it is in the adapter "default", where B must be 0.

    Raises:
        UserError: the file is no LoRA of this transformer, or adapts other layers or a higher rank than the run.
    """
    from solrl_lightning.policies.lora_files import read_lora_file

    named = f"model.init_lora={path} is invalid"
    update = read_lora_file(path, transformer, pipeline_class, named)
    in_file = {name.partition(".lora_")[0] for name in update}
    rank, run_rank = (
        max(value.shape[0] for name, value in state.items() if "lora_A" in name)
        for state in (update, adapter_state(layers, TRAINED))
    )
    if not in_file <= layers.keys() or rank > run_rank:
        targets = ",".join(sorted({_BLOCK.sub("", name) for name in in_file}))
        raise UserError(
            f"{named}: the run must adapt all of its layers, {len(in_file)}, with its rank or more. Set "
            f"model.lora.target_modules=[{targets}] model.lora.rank={max(rank, run_rank)}."
        )
    if lacking := len(layers.keys() - in_file):
        log.warning("model.init_lora=%s has no update of %d of the %d layers of the run", path, lacking, len(layers))
    state = {name: value.clone() for name, value in adapter_state(layers, TRAINED).items()}
    for name in in_file:
        down, up = update[f"{name}.lora_A.weight"], update[f"{name}.lora_B.weight"]
        state[f"{name}.lora_A.weight"][: len(down)] = down
        state[f"{name}.lora_B.weight"][:, : len(down)] = up / layers[name].scaling[TRAINED]
    return state


def norm_of_all(tensors: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all elements, in float32."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms))


def update_norms(layers: dict[str, LoraLayer]) -> tuple[Tensor, Tensor]:
    """Return the L2 norms over all adapted layers of the trained update (alpha / r) B A, and of its difference from the
    old one.

    The squared norm of B A is the sum of (B^T B) * (A A^T), of r x r matrices. The difference
    B A - B' A' = [B - B', B'] [A; A - A'] is a product of the same kind, without cancellation.
    """
    squares = []
    for layer in layers.values():
        (down, old_down), (up, old_up) = (
            [weights[name].weight.detach().flatten(1) for name in (TRAINED, OLD)]
            for weights in (layer.lora_A, layer.lora_B)
        )
        moved = torch.cat([up - old_up, old_up], dim=1), torch.cat([down, down - old_down])
        both = torch.stack([(b.t() @ b * (a @ a.t())).sum() for b, a in ((up, down), moved)])
        squares.append(layer.scaling[TRAINED] ** 2 * both)
    update, difference = torch.stack(squares).sum(0).clamp(min=0).sqrt()
    return update, difference


def merged_weights(layers: dict[str, LoraLayer], state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the float32 value W + (alpha / r) B A of each adapted weight."""
    for name, layer in layers.items():
        down, up = state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"]
        base = dense(layer.get_base_layer().weight)  # of a convolution [out, in, h, w], as A [r, in, h, w]
        rows, up, down = (weight.flatten(1).float() for weight in (base, up, down))
        yield f"{name}.weight", torch.addmm(rows, up, down, alpha=layer.scaling[TRAINED]).view(base.shape)


@contextmanager
def active_adapter(transformer: nn.Module, layers: dict[str, LoraLayer], adapter: str) -> Iterator[nn.Module]:
    """Use another adapter within the context; "default" is active again afterwards."""
    _activate(layers, adapter)
    try:
        yield transformer
    finally:
        _activate(layers, TRAINED)


@contextmanager
def with_weights(layers: dict[str, LoraLayer], adapter: str, state: State) -> Iterator[None]:
    """Give the adapter the tensors of ``state`` within the context, then its former ones; nothing is copied."""
    parameters = _parameters(layers, adapter)
    former = {name: parameter.data for name, parameter in parameters.items()}
    others = {name: state[name].to(parameter) for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = others[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = former[name]


def freeze_adapters(layers: dict[str, LoraLayer], names: Iterable[str]) -> None:
    """Do not train the adapters of these layers, where they have any."""
    for name in layers.keys() & set(names):
        layers[name].is_trained = False
    _activate(layers, TRAINED)


def _activate(layers: dict[str, LoraLayer], adapter: str) -> None:
    for layer in layers.values():
        requires_gradients = adapter == TRAINED and layer.is_trained  # "old" never does
        layer.set_adapter(adapter, inference_mode=not requires_gradients)
