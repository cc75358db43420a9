"""In-place writes of an exported forward pass become plain operators.

Autograd has no plain formula for a write into a view (a ReLU with `inplace` behind a permuted layer norm, or
`h[:, 0] = x`): it records `as_strided`, which no runtime of ours has. Where nothing reads the written memory later
under another name, the write is the same as an operator that gives a new tensor. Where something does, the new values
are put into the tensor that owns the memory (`slice_scatter` and the like), and later readers take their views of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from export.compiler.decompositions.indexing import EVERYTHING

aten = torch.ops.aten
MAY_RETURN_INPUT = ("dropout", "feature_dropout", "alpha_dropout")  # in evaluation mode, though no schema says so
PARTS: Mapping[str, OpOverload] = {  # views of some values -> what puts new ones in their place
    "slice": aten.slice_scatter.default,
    "select": aten.select_scatter.default,
    "diagonal": aten.diagonal_scatter.default,
}
MAY_COPY = ("reshape", "reshape_as", "flatten")  # views of what is contiguous
SHAPES = (*MAY_COPY, "view", "unflatten", "unsqueeze", "squeeze", "alias", "detach")
AUGMENTED = {"__iand__": "bitwise_and_", "__ior__": "bitwise_or_", "__ixor__": "bitwise_xor_"}  # `mask &= other`
PICKING = ("index_", "scatter_")  # by whole numbers; torch takes values of the tensor's own kind alone
NO_INVERSE = ("", "expand", "expand_as", "split", "chunk", "unbind", "split_with_sizes")
VIEWS = (*PARTS, *SHAPES, *NO_INVERSE, "permute", "transpose", "t")


def without_writes(module: GraphModule) -> GraphModule:
    """The module, changed. Writes into parameters, buffers and inputs stay, and those through a view not in VIEWS."""
    place = {node: i for i, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        plain = _plain_operator(node)
        if plain is None:
            continue
        written: Any = node.args[0]
        family = _family(written, place, node)
        if family is None:
            continue
        if all(place[user] <= place[node] for name in family if name is not written for user in name.users):
            _replace(node, plain, place)
            for user in [user for user in written.users if place[user] > place[node]]:
                user.replace_input_with(written, node)
        elif all(_is_plain_view(name) for name in family[1:]) and not any(
            _view_name(view) in NO_INVERSE or view.kwargs for view in _chain(written, family[0])
        ):
            _replace(node, plain, place)
            _put_back(node, written, family, place)
            place = {other: i for i, other in enumerate(module.graph.nodes)}
    module.recompile()
    return module


def _replace(node: Node, plain: OpOverload, place: dict[Node, int]) -> None:
    """Give `node` the plain operator. torch has no gradient of a plain copy, so this one is a clone of its source."""
    if plain is aten.copy.default:
        written, source = node.args[:2]
        with node.graph.inserting_before(node):
            wide = node.graph.call_function(aten.expand_as.default, (source, written))
        wide.meta, place[wide] = dict(node.meta), place[node]
        node.args, node.kwargs, plain = (wide,), {}, aten.clone.default
    node.target = plain


def _put_back(node: Node, written: Node, family: Sequence[Node], place: Mapping[Node, int]) -> None:
    """Put the new values `node` of the view `written` into the owner; what reads it later takes its views anew."""
    at = node

    def added(target: Any, args: tuple[Any, ...], like: Node) -> Node:  # noqa: ANN401 - an operator of torch
        nonlocal at
        with node.graph.inserting_after(at):
            at = node.graph.call_function(target, args)
        at.meta = dict(like.meta)
        return at

    new = {family[0]: node}
    for view in _chain(written, family[0]):
        base: Any = view.args[0]
        if not _is_whole(view):
            target, args = _inverse(view, new[family[0]])
            new[family[0]] = added(target, args, base)
    late = {name for name in (*family, node) if any(place.get(user, -1) > place[node] for user in name.users)}
    late |= {written} if node in late else set()
    for name in reversed(family):
        late |= {name} if any(view in late and view.args[0] is name for view in family[1:]) else set()
    for name in family[1:]:
        if name in late:
            source: Any = name.args[0]
            target = aten.reshape.default if name.target is aten.view.default else name.target  # any strides
            new[name] = added(target, (new[source], *name.args[1:]), name)
            at.kwargs = name.kwargs
    if written is not family[0] and node in late:
        new[node] = new[written]
    for old, other in new.items():
        for user in [user for user in old.users if place.get(user, -1) > place[node]]:
            user.replace_input_with(old, other)


def _chain(written: Node, owner: Node) -> list[Node]:
    """The views from `written` back to the owner of its memory."""
    found = []
    while written is not owner:
        found.append(written)
        written = written.args[0]  # type: ignore[assignment]  # a view's first argument is a node
    return found


def _is_whole(view: Node) -> bool:
    """Whether a slice leaves nothing out."""
    start, end, step = (*view.args[2:5], None, None, None)[:3]
    whole = start in {None, 0} and (end is None or (isinstance(end, int) and end >= EVERYTHING)) and step in {None, 1}
    return _view_name(view) == "slice" and whole


def _inverse(view: Node, values: Node) -> tuple[Any, tuple[Any, ...]]:
    """The operator and its arguments that make the base of a view with other values in its place."""
    name, base, rest = _view_name(view), view.args[0], view.args[1:]
    if name in PARTS:
        return PARTS[name], (base, values, *rest)
    if name == "permute":
        order: Any = rest[0]
        return aten.permute.default, (values, sorted(range(len(order)), key=lambda i: order[i] % len(order)))
    if name in {"transpose", "t"}:
        return view.target, (values, *rest)
    return aten.reshape_as.default, (values, base)


def _plain_operator(node: Node) -> Any:  # noqa: ANN401 - an operator of torch
    """The operator that gives a new tensor instead of writing into its first argument; None where there is none."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    name = AUGMENTED.get(_name(node.target), _name(node.target))
    if not name.endswith("_") or name.endswith("__") or not node.args or not isinstance(node.args[0], Node):
        return None
    kinds = [value.dtype for arg in node.all_input_nodes if isinstance(value := arg.meta.get("val"), torch.Tensor)]
    narrow = set() if name == "copy_" else {torch.bool}
    if name.startswith(PICKING):
        narrow |= {torch.int32, torch.int64}
    if not kinds or set(kinds) - narrow - {kinds[0]}:
        return None  # a write keeps its tensor's kind, the first; a new tensor might have a wider one
    packet, overload = getattr(torch.ops.aten, name[:-1], None), str(node.target).rpartition(".")[2]
    plain = getattr(packet, overload, None)
    if plain is not None and not isinstance(plain._schema.arguments[0].type, torch.TensorType):  # noqa: SLF001
        plain = getattr(packet, f"Tensor_{overload}", None)  # pow.Scalar is a number to the power of a tensor
    return plain


def _family(written: Node, place: Mapping[Node, int], node: Node) -> list[Node] | None:
    """Every name that the memory of `written` has before `node`, the owner first and each view behind its base.

    None where the owner is a parameter, a buffer or an input.
    """
    root = written
    while (source := _source(root)) is not None:
        root = source
    if root.op != "call_function":
        return None
    found = [root]
    for name in found:
        found += [user for user in name.users if _source(user) is name and place[user] < place[node]]
    return found


def _is_plain_view(view: Node) -> bool:
    """Whether the node is a view in each call, of an operator that `_inverse` or a second call of it serves."""
    name, base = _view_name(view), view.args[0]
    whole = isinstance(base, Node) and isinstance(value := base.meta.get("val"), torch.Tensor) and value.is_contiguous()
    return name in VIEWS and view.target is not aten.view.dtype and (whole or name not in MAY_COPY)


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


def _view_name(view: Node) -> str:
    """Of torch's operator; "" for one of several views, which Python takes from a list."""
    return _name(view.target) if isinstance(view.target, OpOverload) else ""


def _name(operator: OpOverload) -> str:
    """Of torch's operator, without its namespace and its overload."""
    return str(operator.overloadpacket).rpartition(".")[2]
