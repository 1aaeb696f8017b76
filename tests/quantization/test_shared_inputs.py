"""Compiled code quantises an input of several layers once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from solrl_lightning.quantization.shared_inputs import sharing_inputs


@torch.library.custom_op("solrl_lightning::tested_quantiser", mutates_args=())
def quantise(x: Tensor) -> Tensor:
    return 2 * x


quantise.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("layers", "calls"),
    [
        (lambda x: quantise(x.flatten(0, -2)) + quantise(x.flatten(0, -2)) + quantise(x.flatten(0, -2)), 1),
        (lambda x: quantise(x.movedim(1, 2).flatten(0, -2)) + quantise(x.movedim(1, 2).flatten(0, -2)), 1),
        (lambda x: quantise(x.flatten(0, 1)).sum() + quantise(x.flatten(1, 2)).sum(), 2),
        (lambda x: quantise(x.flatten(0, 1)) + quantise((x + 1).flatten(0, 1)), 2),
        (lambda x: quantise(x.flatten(0, 1)) + quantise(x.add_(1).flatten(0, 1)) + quantise(x.flatten(0, 1)), 3),
    ],
)
def test_calls_with_the_same_input_are_one(layers: Callable[[Tensor], Tensor], calls: int) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    x = torch.arange(24.0).view(2, 3, 4)
    compiled = torch.compile(layers, backend=sharing_inputs(backend), fullgraph=True)(x.clone())
    assert torch.equal(compiled, layers(x.clone()))
    (graph,) = graphs
    assert sum("tested_quantiser" in str(node.target) for node in graph.graph.nodes) == calls
