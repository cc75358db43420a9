"""Compute once what a traced graph computes twice.

Backward formulas repeat parts of the forward pass, as batch norm's centred input, and reach a value through two
reshapes that undo each other. ONNX Runtime merges equal nodes itself; pt2 runs node by node, and nothing sees through
the reshapes.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from export.compiler.decompositions.pools import MAXIMA_OF_POOL

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)  # noqa: SLF001 - torch's own name


def share_maxima(graph: fx.Graph) -> None:
    """Let what the gradient of a max-pool finds as the maxima be the pool's output, in place of a second search.

    Where another formula stands for the pool (ceil_mode), its output stays.
    """
    for mark in [node for node in graph.nodes if node.target is MAXIMA_OF_POOL]:
        maxima, indices = mark.args
        pool = indices.args[0] if indices.target is operator.getitem else None
        mark.replace_all_uses_with(maxima)
        graph.erase_node(mark)
        if pool is not None and pool.target is aten.max_pool2d_with_indices.default:
            _move_behind(pool, maxima)
            for pooled in [user for user in pool.users if user.args[1] == 0]:
                pooled.replace_all_uses_with(maxima)


def merge_equal_nodes(graph: fx.Graph) -> None:
    """Replace each node by an earlier one that has the same operator and arguments.

    A reshape or a permutation that undoes another is replaced by the other's source. The graph has no operator that
    writes to its arguments or draws numbers. Outputs stay nodes of their own, as each is a port.
    """
    outputs = {node for last in graph.nodes if last.op == "output" for node in last.all_input_nodes}
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in outputs:
            continue
        known = _source(node) or first.setdefault(_key(node), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _move_behind(place: fx.Node, last: fx.Node) -> None:
    """Move `last`, and what it needs of the nodes behind `place`, to behind `place`, whose users none of them is."""
    needed, open_ = {last}, [last]
    while open_:
        new = set(open_.pop().all_input_nodes) - needed
        needed |= new
        open_ += new
    behind = False
    for node in list(place.graph.nodes):
        if behind and node in needed:
            place.append(node)
            place = node
        behind = behind or node is place


def _source(node: fx.Node) -> fx.Node | None:
    """What a reshape of a reshape gives back, where that is a node of the same shape; the same of a permutation."""
    before = node.args[0] if node.args else None
    if not (isinstance(before, fx.Node) and before.args and isinstance(before.args[0], fx.Node)):
        return None
    source = before.args[0]
    if node.target in RESHAPES and before.target in RESHAPES:
        return source if _shape(node) == _shape(source) else None
    if node.target is before.target is aten.permute.default:
        first, second = cast("list[int]", before.args[1]), cast("list[int]", node.args[1])
        return source if [first[dim] for dim in second] == list(range(len(second))) else None
    return None


def _shape(node: fx.Node) -> list[Any]:
    """Sizes as numbers and formulas: to compare symbolic sizes themselves would add assumptions."""
    return [size if isinstance(size, int) else size.node.expr for size in node.meta["val"].shape]


def _key(node: fx.Node) -> tuple[Any, ...]:
    """Equal for nodes that compute the same. A number's type counts, as 1 == 1.0 == True."""

    def told(value: Any) -> Any:  # noqa: ANN401 - an argument of any operator
        if isinstance(value, list | tuple):
            return tuple(told(one) for one in value)
        if isinstance(value, dict):
            return tuple((name, told(one)) for name, one in sorted(value.items()))
        return value if isinstance(value, fx.Node) else (type(value), str(value))

    return node.target, told(node.args), told(node.kwargs)
