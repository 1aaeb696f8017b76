"""Shapes, dtypes and devices on a GPU, without one: of all backends' layers, of a rollout and of a training step.

PyTorch's fake tensors run the checks of each operation for a GPU and compute nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nano import PROMPTS, adapters, load_model, prompts_of, save_nano
from torch import Tensor, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

import solrl_lightning.training.module
from solrl_lightning.names import BACKENDS
from solrl_lightning.objectives.nft import NFT
from solrl_lightning.quantization import Backend, QuantizationRule, convert, plan, resolve
from solrl_lightning.quantization.nvfp4_packed import PackedNVFP4Linear
from solrl_lightning.quantization.scaled_linear import FP8Linear
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.records import Rollouts
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.seeds import pool_seeds
from solrl_lightning.training.evaluation import Evaluation
from solrl_lightning.training.micro_batches import MicroBatches, plan_micro_batches
from solrl_lightning.training.module import SolRLModule
from solrl_lightning.training.schedules import constant
from solrl_lightning.training.transformers import replicate

GPUS = ("cuda", "lazy")  # the second one for autograd, which asks the driver for the first one's context
OF_TORCH = [
    (precision, name) for precision, names in BACKENDS.items() for name in names if name in ("torch", "emulated")
]


class FakeGPU(FakeTensorMode):
    """Fake tensors on a GPU; those on the CPU, like seeds and indices, stay real. Kernels of Triton are not run."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is triton_kernel_wrapper_mutation:
            return None
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type in GPUS):
                return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def apply_to_fakes(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace nn.Module._apply, which swaps parameters in a way that fake tensors do not support."""
    for child in module.children():
        apply_to_fakes(child, function)
    for name, parameter in module.named_parameters(recurse=False):
        with torch.no_grad():
            other = function(parameter)
        if other is not parameter:
            setattr(module, name, nn.Parameter(other, parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, function(buffer))
    return module


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide a fake GPU that supports every backend."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(nn.Module, "_apply", apply_to_fakes)
    with FakeGPU(allow_non_fake_inputs=True):
        yield


def backend_of(precision: str, name: str) -> Backend:
    return resolve(precision, name, torch.device("cuda", 0))


@pytest.mark.parametrize(("precision", "name"), OF_TORCH)
@pytest.mark.parametrize(("weight_dtype", "bias"), [(torch.bfloat16, True), (torch.float32, False)])
def test_layers_accept_any_number_of_tokens(
    blackwell: None, precision: str, name: str, weight_dtype: torch.dtype, bias: bool
) -> None:
    backend, options = backend_of(precision, name), {"bias": bias, "device": "cuda", "dtype": weight_dtype}
    block = nn.ModuleDict({"linear": nn.Linear(64, 48, **options), "conv": nn.Conv2d(64, 48, 1, **options)})
    convert(block, plan(block, QuantizationRule(["*"]), backend), backend)
    block["linear"].requantize_(torch.empty(48, 64, device="cuda"))  # the merged weight in float32
    block["conv"].requantize_(torch.empty(48, 64, 1, 1, device="cuda"))
    assert {buffer.device.type for buffer in block.buffers()} == {"cuda"}
    tokens = [("linear", (*shape, 64), (*shape, 48)) for shape in ((1,), (17,), (2, 32), (1, 33))]
    images = [("conv", (count, 64, 5, 7), (count, 48, 5, 7)) for count in (1, 3)]
    for kind, shape, expected in tokens + images:
        y = block[kind](torch.empty(shape, device="cuda", dtype=torch.bfloat16))
        assert y.shape == expected and y.dtype == torch.bfloat16 and y.device.type == "cuda"


@pytest.mark.parametrize(("layer_cls", "shape"), [(FP8Linear, (40, 48)), (PackedNVFP4Linear, (64, 40))])
def test_unsupported_shape_has_a_reason(blackwell: None, layer_cls: Any, shape: tuple[int, int]) -> None:
    assert layer_cls.unsupported_reason(nn.Linear(*shape, device="meta"))
    layer = layer_cls(nn.Linear(*shape, device="cuda", dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="divisible|multiple"):
        layer(torch.empty(32, shape[0], device="cuda", dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_nano(tmp_path_factory.mktemp("nano"))


def module_on(device: str, folder: str, backend: Backend) -> SolRLModule:
    model = load_model(folder, device=device)
    rule = QuantizationRule(["transformer_blocks.*", "single_transformer_blocks.*"])
    transformers = replicate(model, adapters(), 2, False, False, True, backend, rule)
    return SolRLModule(
        model,
        transformers,
        rewards=WeightedRewards({}, {}),
        objective=NFT(beta=1.0, kl_weight=1e-4, advantage_clip=5.0, timestep_fraction=0.5),
        optimizer=torch.optim.AdamW,
        rate_factor=constant(),
        old_decay=lambda step: 0.5,
        evaluation=Evaluation([], WeightedRewards({}, {}), "dpm2", steps=2, images=1, seed=0),
    )


def test_rollout_chunk_stays_on_gpu(blackwell: None, folder: str) -> None:
    module = module_on("cuda", folder, backend_of("nvfp4", "torch"))
    module.requantize(version=0)
    module.model._has_decoded = True  # the range of the first images is looked at
    prompts, seeds = module.encode(prompts_of(PROMPTS[:1])), pool_seeds(0, 0, PROMPTS[:1], 2)
    stage = Stage(sampler="merged", steps=2, solver="dpm2")
    chunks = list(module.transformers.samplers["shadow"].sample(stage, prompts, seeds))
    (index, state, *_), images = chunks[0], module.model.decode(chunks[0].state.x)
    assert index.tolist() == [0, 1] and len(chunks) == 1
    assert state.x.shape == (2, 16, 32) and images.shape == (2, 3, 32, 32)
    for values in (state.x, images):
        assert values.dtype == torch.float32 and values.device.type == "cuda"


def test_training_step_stays_on_gpu(blackwell: None, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solrl_lightning.training.module, "check_finite", lambda *arguments: None)  # looks at numbers
    device = "lazy"
    module = module_on(device, folder, backend_of("bf16", "auto"))
    monkeypatch.setattr(module, "log_dict", lambda *arguments, **options: None)
    monkeypatch.setattr(type(module), "trainer", SimpleNamespace(world_size=1))
    seeds, scores = pool_seeds(0, 0, PROMPTS[:1], 2), torch.zeros(1, 2)
    latents = torch.empty(1, 2, *module.model.latent_shape, device=device)  # type: ignore[attr-defined]
    rollouts = Rollouts(prompts_of(PROMPTS[:1]), seeds, latents, scores, scores, scores.unsqueeze(-1), scores)
    sigmas, plan = module.model.sigmas(4), plan_micro_batches(1, rows_per_prompt=4, micro_batch=4, ranks=1)
    (batch,) = MicroBatches(rollouts, module.encode(prompts_of(PROMPTS[:1])), sigmas, module.objective, plan)
    loss = module.training_step(batch, 0)
    assert loss.requires_grad and loss.shape == () and loss.dtype == torch.float32 and loss.device.type == device
    loss.backward()
    gradients: list[Tensor | None] = [parameter.grad for parameter in module.trained_parameters()]
    assert len(gradients) > 10
    for gradient in gradients:
        assert gradient is not None and gradient.dtype == torch.float32 and gradient.device.type == device
