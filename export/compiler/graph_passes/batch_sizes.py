"""Compute every size of a traced graph from the batch size of its inputs, with one multiplication at most.

Backward formulas ask for sizes in many ways: the number of elements of a value, divided by its number of channels.
Exporters have no operator for some of them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def share_batch_size(graph: fx.Graph) -> None:
    """Replace each node that is the batch size, or a whole multiple of it, by one that says so.

    A graph for one batch size has no such node, and stays as it is.
    """
    found = next(((port, dim) for port in graph.find_nodes(op="placeholder") for dim in _symbols(port)), None)
    if found is None:
        return
    port, dim = found
    batch = port.meta["val"].shape[dim]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        size = graph.call_function(aten.sym_size.int, (port, dim))
    size.meta["val"] = batch
    multiples: dict[int, fx.Node] = {1: size}
    last = size
    for node in list(graph.nodes):
        times = _multiple(node, batch) if node is not size and node.op == "call_function" else None
        if times is None:
            continue
        if times not in multiples:
            with graph.inserting_after(last):
                multiples[times] = last = graph.call_function(operator.mul, (size, times))
            last.meta["val"] = batch * times
        node.replace_all_uses_with(multiples[times])


def _symbols(port: fx.Node) -> list[int]:
    """The dimensions of an input that are a symbol of their own."""
    value = port.meta.get("val")
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return [dim for dim, size in enumerate(shape) if isinstance(size, torch.SymInt) and size.node.expr.is_symbol]


def _multiple(node: fx.Node, batch: Any) -> int | None:  # noqa: ANN401 - a symbolic size
    """How many times the batch size a node is; None where it is no size, or another one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt):
        return None
    quotient = value.node.expr / batch.node.expr
    return int(quotient) if quotient.is_Integer and quotient > 0 else None
