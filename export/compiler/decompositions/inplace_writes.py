"""In-place writes of an exported forward pass become plain operators, where nothing else reads what was written.

Autograd has no plain formula for a write into a view (a ReLU with `inplace` behind a permuted layer norm): it records
`as_strided`, which no runtime of ours has. Where nothing reads the written memory later under another name, the write
is the same as an operator that gives a new tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

MAY_RETURN_INPUT = ("dropout", "feature_dropout", "alpha_dropout")  # in evaluation mode, though no schema says so


def without_writes(module: GraphModule) -> GraphModule:
    """The module, changed. Writes into parameters, buffers and inputs stay, and those that another name reads later."""
    place = {node: i for i, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        plain = _plain_operator(node)
        if plain is None or not _is_read_alone(node, place):
            continue
        written: Any = node.args[0]
        node.target = plain
        for user in [user for user in written.users if place[user] > place[node]]:
            user.replace_input_with(written, node)
    module.recompile()
    return module


def _plain_operator(node: Node) -> Any:  # noqa: ANN401 - an operator of torch
    """The operator that gives a new tensor instead of writing into its first argument; None where there is none."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    name = _name(node.target)
    if not name.endswith("_") or name.endswith("__") or not node.args or not isinstance(node.args[0], Node):
        return None
    kinds = {value.dtype for arg in node.all_input_nodes if isinstance(value := arg.meta.get("val"), torch.Tensor)}
    if len(kinds) != 1:
        return None  # a write keeps its tensor's kind; a new tensor might have the wider one
    return getattr(getattr(torch.ops.aten, name[:-1], None), str(node.target).rpartition(".")[2], None)


def _is_read_alone(node: Node, place: dict[Node, int]) -> bool:
    """Whether what `node` writes is read later only through its result or its first argument."""
    written: Any = node.args[0]
    root = written
    while (source := _source(root)) is not None:
        root = source
    if root.op != "call_function":
        return False
    others, open_ = set(), [root]
    while open_:
        name = open_.pop()
        others.add(name)
        open_ += [user for user in name.users if _source(user) is name and place[user] < place[node]]
    others.discard(written)
    return all(place[user] <= place[node] for name in others for user in name.users)


def _source(node: Node) -> Node | None:
    """The tensor whose memory this one may share: of a view, of a write's result, of one of several views."""
    if node.op != "call_function" or not node.args:
        return None
    first = node.args[0]
    if not isinstance(first, Node):
        return None
    if not isinstance(node.target, OpOverload):
        return first  # getitem
    shares = any(given.alias_info is not None for given in node.target._schema.returns)  # noqa: SLF001 - no other way
    return first if shares or _name(node.target) in MAY_RETURN_INPUT else None


def _name(operator: OpOverload) -> str:
    """Of torch's operator, without its namespace and its overload."""
    return str(operator.overloadpacket).rpartition(".")[2]
