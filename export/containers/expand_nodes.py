"""Decompose single nodes of an exported program in place, where torch would trace the whole program three times.

litert-torch has every program decomposed twice, for a handful of nodes: what its own passes inserted, and convolutions.
Here each of these is traced alone and its operators take its place; the other nodes stay, with their shapes found anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata

log = logging.getLogger(__name__)
Decompositions = Mapping[Any, Callable[..., Any]]
VIEW = torch.ops.aten.view.default  # the converter's passes leave views that torch refuses, as their axes have moved
SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)  # no operators at all; torch refuses to trace that
SHAPES = ("val", "tensor_meta")


def expand_nodes(exported: ExportedProgram, table: Decompositions) -> bool:
    """Replace each node that calls a Python function, or what `table` decomposes, by its operators.

    Returns False and leaves the program as it was where this is not enough: for subgraphs, symbolic sizes, operators
    that write to their inputs, those that torch makes of others, as in the export of a module, decompositions with
    constants of their own, and what torch cannot trace alone.
    """
    if any(_is_composite(node.target) and node.target not in table for node in exported.graph.nodes):
        return False
    if not any(node.op == "call_function" and _is_asked(node.target, table) for node in exported.graph.nodes):
        return True
    inputs = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"]
    calls = all(node.op in ("placeholder", "call_function", "output") for node in exported.graph.nodes)
    if not calls or not all(_is_fixed(value) for value in inputs):
        return False
    found = _Expansion(exported.graph_module, table)
    try:
        with FakeTensorMode(), enable_python_dispatcher(), torch.no_grad():
            found.run(*(torch.empty(value.shape, dtype=value.dtype) for value in inputs))
    except Exception as wrong:  # noqa: BLE001 - torch raises many kinds for what it cannot trace alone
        log.debug("the whole program is decomposed: %s", wrong)
        return False
    if not all(_is_plain(part) for part in found.parts.values()):
        return False
    for node, value in found.values.items():
        describe_node(node, value)
    for node, part in found.parts.items():
        _inline(exported, node, part)
    exported.graph.eliminate_dead_code()
    exported.graph_module.recompile()
    return True


class _Expansion(fx.Interpreter):
    """Every node's result, as tensors without values, and the operators of each node that is to be replaced."""

    def __init__(self, module: fx.GraphModule, table: Decompositions) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.table = table
        self.values: dict[fx.Node, Any] = {}
        self.parts: dict[fx.Node, fx.GraphModule] = {}

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 - fx's own
        if n.op == "call_function" and _is_asked(n.target, self.table):
            self.parts[n] = part = _trace(n.target, *self.fetch_args_kwargs_from_env(n), self.table)
            value = fx.map_arg(part.graph.output_node().args[0], lambda made: made.meta["val"])
        else:
            value = super().run_node(n)
        if n.op != "output":
            self.values[n] = value
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - fx's own
        return super().call_function(_reshape if target == VIEW else target, args, kwargs)


def _is_asked(target: object, table: Decompositions) -> bool:
    return target in table or not (isinstance(target, OpOverload) or target is getitem)


def _is_composite(target: object) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - torch has no public name
    return isinstance(target, OpOverload) and target.has_kernel_for_dispatch_key(key)


def _is_fixed(value: object) -> bool:
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def _reshape(value: Tensor, size: list[int]) -> Tensor:
    return value.contiguous().reshape(size)


def _trace(target: Any, args: Any, kwargs: Any, table: Decompositions) -> fx.GraphModule:  # noqa: ANN401 - fx's own
    """`target` as a graph of its tensors, in the order in which `args` and `kwargs` hold them."""
    flat, spec = torch.utils._pytree.tree_flatten((args, kwargs))  # noqa: SLF001 - torch has no public one
    places = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
    # torch leaves some operators of the table whole that the converter cannot take
    decompose = (lambda value: value) if target in SAME else table.get(target, target)

    def on_tensors(*tensors: Tensor) -> Any:  # noqa: ANN401 - what the operator returns
        filled = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        inner_args, inner_kwargs = torch.utils._pytree.tree_unflatten(filled, spec)  # noqa: SLF001
        made = decompose(*inner_args, **inner_kwargs)
        return target(*inner_args, **inner_kwargs) if made is NotImplemented else made

    return make_fx(functionalize(on_tensors), decomposition_table=dict(table))(*(flat[i] for i in places))


def _is_plain(part: fx.GraphModule) -> bool:
    calls = [node for node in part.graph.nodes if node.op not in ("placeholder", "output")]
    return all(
        node.target is getitem or (isinstance(node.target, OpOverload) and not node.target._schema.is_mutable)  # noqa: SLF001 - no public name
        for node in calls
    )


def describe_node(node: fx.Node, value: Any) -> None:  # noqa: ANN401 - a tensor or several
    """Note the shapes of a node's result, as torch's own decomposition does."""
    node.meta["val"] = value
    node.meta["tensor_meta"] = fx.node.map_aggregate(
        value,
        lambda one: _extract_tensor_metadata(one) if isinstance(one, Tensor) else one,
    )


def _inline(exported: ExportedProgram, node: fx.Node, part: fx.GraphModule) -> None:
    """Put the operators of `part` in the place of `node`."""
    graph, origin = exported.graph, {key: value for key, value in node.meta.items() if key not in SHAPES}
    flat, _ = torch.utils._pytree.tree_flatten((node.args, node.kwargs))  # noqa: SLF001
    given = iter([value for value in flat if isinstance(value, fx.Node)])
    made: dict[fx.Node, fx.Node] = {}
    result: Any = None
    with graph.inserting_before(node):
        for inner in part.graph.nodes:
            if inner.op == "placeholder":
                made[inner] = next(given)
            elif inner.op == "output":
                result = fx.map_arg(inner.args[0], made.__getitem__)
            else:
                made[inner] = graph.node_copy(inner, made.__getitem__)
                made[inner].meta = dict(origin)
                describe_node(made[inner], inner.meta["val"])
    if isinstance(result, fx.Node):
        _replace(exported, node, result)
    else:
        for user in list(node.users):
            _replace(exported, user, result[user.args[1]])
        graph.erase_node(node)


def _replace(exported: ExportedProgram, node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    exported.graph_signature.replace_all_uses(node.name, other.name)
    exported.graph.erase_node(node)
