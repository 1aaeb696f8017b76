"""Compiled code that quantises the input of several layers once: of q, k, v and the MLP, for example.

Each layer quantises its input by itself. Inductor merges pure PyTorch operations with equal inputs, but neither calls
of a Triton kernel nor the copies of the input that it makes for each of them.
"""

from collections.abc import Callable, Hashable
from typing import Any

from torch.fx import GraphModule, Node

_NAMESPACE = "solrl_lightning"  # of operators that quantise, as ``nvfp4_kernel.encode_rows``
_IN_PLACE = ("iadd", "imul", "isub", "itruediv", "setitem")  # functions of ``operator``
_VIEWS = ("flatten", "movedim", "permute", "reshape")

Compiler = Callable[[GraphModule, list[Any]], Any]


def sharing_inputs(backend: str | Compiler) -> Compiler:
    """Return ``backend`` of torch.compile with each input quantised once."""
    from torch._dynamo import lookup_backend  # takes a second to import

    compiler = lookup_backend(backend)

    def compile_shared(graph: GraphModule, inputs: list[Any]) -> Any:
        share_inputs(graph)
        return compiler(graph, inputs)

    return compile_shared


def share_inputs(graph: GraphModule) -> None:
    """Replace calls of an operator that quantises by the first one with the same input, in place."""
    first: dict[Hashable, Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "namespace", "") != _NAMESPACE:
            continue
        root, views = _origin(node.args[0])
        if any(_writes(user) for user in root.users):
            continue
        earlier = first.setdefault((node.target, root, *views), node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _origin(node: Node) -> tuple[Node, list[Hashable]]:
    """Return what ``node`` is a view of, and the views by their arguments."""
    views: list[Hashable] = []
    while node.op == "call_method" and node.target in _VIEWS and not node.kwargs:
        views.append((node.target, *node.args[1:]))
        node = node.args[0]  # type: ignore[assignment]
    return node, views


def _writes(node: Node) -> bool:
    """Return whether a node may write into its first argument."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", node.target))
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
