"""Broadcasts whose axes are moved afterwards, which LiteRT's converter turns into other numbers.

litert-converter 0.5.0 makes one broadcast of `permute(expand(x))` and loses the order of x's axes, whether x is a
constant or an input; the same holds for `repeat`. It converts `expand(permute(x))` rightly, which has the same values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from export.containers.expand_nodes import describe_node

ATEN = torch.ops.aten
BROADCASTS = (ATEN.expand.default, ATEN.repeat.default)
VIEWS = (ATEN.view.default, ATEN.alias.default, ATEN.clone.default)


def move_axes_before_broadcasts(exported: ExportedProgram) -> None:
    """Rewrite each `permute` of an `expand` or `repeat` as one of a `permute`; every value and shape stays."""
    graph = exported.graph
    for node in [one for one in graph.nodes if one.target == ATEN.permute.default]:
        broadcast = _broadcast(node.args[0])
        if broadcast is None:
            continue
        (narrow, numbers), order = broadcast.args, node.args[1]
        sizes = list(narrow.meta["val"].shape)
        sizes = [1] * (len(order) - len(sizes)) + sizes
        with graph.inserting_before(node):
            whole = _call(graph, ATEN.view.default, narrow, sizes)
            moved = _call(graph, ATEN.permute.default, whole, order)
            made = _call(graph, broadcast.target, moved, [numbers[axis] for axis in order])
        node.replace_all_uses_with(made)
        exported.graph_signature.replace_all_uses(node.name, made.name)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    exported.graph_module.recompile()


def _broadcast(node: Any) -> Any:  # noqa: ANN401 - nodes
    """The node that gives this one's values by repeating others, in this one's shape; None if there is none."""
    while node.target in VIEWS and node.args[0].meta["val"].shape == node.meta["val"].shape:
        node = node.args[0]
    return node if node.target in BROADCASTS and len(node.args) == 2 else None  # noqa: PLR2004 - a tensor, its sizes


def _call(graph: fx.Graph, target: Any, given: fx.Node, numbers: list[int]) -> fx.Node:  # noqa: ANN401 - an operator
    made = graph.call_function(target, (given, numbers))
    describe_node(made, target(given.meta["val"], numbers))
    return made
