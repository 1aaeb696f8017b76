"""Stands in for a GPU of any compute capability, so that Inductor generates its code on a machine without a driver.

Import it before anything else asks for CUDA, in a process of its own: it replaces functions of torch 2.11 to 2.15 and
of their Triton. ``use`` sets the capability; ``compiler`` is a backend of torch.compile that appends the code of each
graph, forward and backward, to ``codes`` and runs nothing. Models are on ``meta``, because autograd asks the driver for
a GPU.
"""

import collections
import copy
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.accelerator
import triton
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget

codes: list[str] = []
"""Generated code, the newest last."""

_capability = (10, 0)
_KEEPING = (  # modules that keep the functions of torch.cuda that they find
    "_dynamo.variables.streams",
    "_inductor.compile_fx",
    "_inductor.fx_passes.fuse_attention",
    "_inductor.fx_passes.joint_graph",
    "_inductor.fx_passes.misc_patterns",
    "_inductor.fx_passes.pad_mm",
)
_ZERO = "_cuda_getDevice _cuda_exchangeDevice _cuda_maybeExchangeDevice _cuda_getCurrentRawStream".split()


class _Generated(Exception):
    """The code is complete."""


def use(capability: tuple[int, int]) -> None:
    """Have a GPU of this compute capability."""
    global _capability
    _capability = capability


def fused_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Attention by one kernel."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, query.requires_grad)[0]


def compiler(graph: Any, inputs: Any) -> Any:
    """Compile a graph as ``inductor`` does, up to the generated code; it returns tensors on ``meta``."""
    for node in graph.graph.nodes:
        if node.target is nn.functional.scaled_dot_product_attention:
            node.target = fused_attention  # the choice of a kernel asks the driver
    graph.recompile()
    return import_module("torch._inductor.compile_fx").compile_fx(graph, inputs, inner_compile=_generate)


def _generate(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    outputs = [node.meta["val"] if isinstance(node, Node) else node for node in graph.graph.output_node().args[0]]
    moved, mode = copy.deepcopy(graph), FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), tracing(TracingContext(mode)):
        try:
            inner = import_module("torch._inductor.compile_fx").compile_fx_inner
            inner(moved, _move(moved, inputs, mode), **options)
        except Exception as error:
            if not isinstance(error, _Generated) and "_Generated" not in str(error):
                raise

    def run(arguments: Any) -> Any:
        arguments.clear()  # as a boxed call does
        return [_like(value) if isinstance(value, Tensor) else value for value in outputs]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _move(graph: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Have a graph that was traced on ``meta`` compute on the GPU, in place, and return its inputs there."""
    gpu = torch.device("cuda", 0)
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
        node.args, node.kwargs = tree_map_only(torch.device, lambda device: gpu, (node.args, node.kwargs))
    graph.recompile()
    moved = [FakeTensor(mode, _like(value), gpu) if isinstance(value, Tensor) else value for value in inputs]
    FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*moved)
    return moved


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _keep_code(graph: Any) -> None:
    code = graph.codegen()[0]
    codes.append(getattr(code, "value", code))
    raise _Generated


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="absent GPU",
        major=_capability[0],
        minor=_capability[1],
        multi_processor_count=148,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        total_memory=180 * 10**9,
        L2_cache_size=126 * 2**20,
        gcnArchName="",
    )


class _Driver:
    """Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * _capability[0] + _capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        return lambda *arguments, **options: [1.0]

    def is_active(self) -> bool:
        return True


def _install() -> None:
    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0), stream_id=0, device_index=0, device_type=1)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "absent GPU",
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "set_device": None,
        "_lazy_init": None,
        "current_stream": stream,
        "is_current_stream_capturing": False,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    cuda: Any = torch.cuda
    for name, answer in answers.items():
        setattr(cuda, name, partial(_answer, answer))
    for name in ("get_rng_state", "set_rng_state"):
        setattr(cuda.random, name, getattr(cuda, name))
    cuda.get_device_capability = lambda device=None: _capability
    cuda.get_device_properties = _properties
    for name in _KEEPING:
        import_module(f"torch.{name}")
    internals: Any = torch._C
    internals._ensureCUDADeviceGuardSet()
    for name in _ZERO:
        setattr(internals, name, partial(_answer, 0))
    internals._cuda_setDevice = partial(_answer, None)
    internals._cuda_isCurrentStreamCapturing = cuda.graphs._cuda_isCurrentStreamCapturing = partial(_answer, False)
    fake_tensor: Any = torch._subclasses.fake_tensor
    fake_tensor.init_gpu_context = partial(_answer, None)  # of torch 2.11
    accelerator: Any = torch.accelerator
    accelerator.current_stream = partial(_answer, stream)
    accelerator.current_device_index = accelerator._utils._get_device_index = partial(_answer, 0)
    streams: Any = torch._dynamo.variables.streams
    streams.SymbolicStreamState.__init__ = lambda self: setattr(self, "cur_stream_stack", collections.deque())
    # Patterns are traced on the GPU if there is one.
    passes: Any = torch._inductor.fx_passes
    passes.joint_graph._sfdp_init = passes.fuse_attention._sfdp_init = partial(_answer, None)
    passes.pad_mm._pad_mm_init = passes.misc_patterns._misc_patterns_init = partial(_answer, None)
    config: Any = torch._inductor.config
    config.force_disable_caches, config.compile_threads, config.joint_graph_constant_folding = True, 1, False
    lowering: Any = torch._inductor.graph.GraphLowering
    lowering.compile_to_module = lowering._compile_to_module = _keep_code
    triton.runtime.driver.set_active(_Driver())


def _answer(value: Any, *arguments: Any, **options: Any) -> Any:
    return value


_install()
