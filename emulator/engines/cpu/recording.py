"""Record graphs of torch's own operators and make them smaller. A recorded graph runs without autograd.

Aliases, double transposes and unread nodes are removed, so that every number stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from edge_client.engines.direct_calls import direct_forward
from edge_client.rare_collection import rare_collection
from emulator.engines.cpu.operator_log import SHAPE, DependsOnValuesError, constant, log_operators
from export.compiler.forward_overrides import ForwardOverrides
from export.diagnostics import quiet_warnings
from export.one_value_norm import batch_norm_of_one_value

aten = torch.ops.aten
ALIAS_OPERATORS = (aten.detach.default, aten.alias.default)
VIEW_OPERATORS = (aten.view.default, aten._unsafe_view.default, aten.expand.default)  # noqa: SLF001 - torch's name


def record_operators(function: Callable[..., Any], given: Sequence[Tensor]) -> fx.Graph:
    """The operators that `function` calls for tensors of these sizes and strides, whatever their values are."""
    with quiet_warnings(), torch.enable_grad(), batch_norm_of_one_value(), ForwardOverrides(), _PlainLstm():
        try:
            graph = log_operators(function, given)
        except DependsOnValuesError:  # text libraries ask for no value of a tensor that has none
            graph = _traced_operators(function, given)
    graph.set_codegen(fx.graph.CodeGen())  # plain positional arguments
    for node in graph.nodes:
        same = _same(node)
        if same is not None:
            node.replace_all_uses_with(same)
    drop_unread(graph)
    return graph


def _traced_operators(function: Callable[..., Any], given: Sequence[Tensor]) -> fx.Graph:
    """As log_operators, on torch's fake tensors, which takes seconds the first time: torch imports its compiler."""
    with rare_collection():
        from torch.fx.experimental.proxy_tensor import make_fx

        recorded = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    graph = recorded.graph
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            node.meta[SHAPE] = tuple(value.shape)
        held = getattr(recorded, node.target, None) if node.op == "get_attr" else None
        if isinstance(held, Tensor):  # one that the function made from numbers
            with graph.inserting_before(node):
                made = graph.call_function(constant(held))
            made.meta = node.meta
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    return graph


class _PlainLstm(TorchFunctionMode):
    """Without oneDNN's LSTM, which is recorded as one operator whose backward cannot be called.

    Only there: a record is played with oneDNN, and a convolution recorded without it has other strides.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if getattr(func, "__name__", "") != "lstm":
            return func(*args, **(kwargs or {}))
        with torch.backends.mkldnn.flags(enabled=False):
            return func(*args, **(kwargs or {}))


def drop_unread(graph: fx.Graph) -> None:
    """Drop nodes that no node reads and that write nothing."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not is_mutating(node):
            graph.erase_node(node)


def compile_graph(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of its placeholders."""
    graph.lint()
    return direct_forward(fx.GraphModule({}, graph))


def is_call(node: object, *targets: object) -> bool:
    """Whether the node calls one of these operators."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _same(node: fx.Node) -> fx.Node | None:
    """The earlier node with the same value, or None."""
    if is_call(node, *ALIAS_OPERATORS) or (is_call(node, *VIEW_OPERATORS) and _shape(node) == _shape(node.args[0])):
        return _node(node.args[0])
    if is_call(node, aten.t.default) and is_call(node.args[0], aten.t.default):
        return _node(_node(node.args[0]).args[0])
    return None


def _node(argument: object) -> fx.Node:
    if not isinstance(argument, fx.Node):
        raise TypeError(f"expected a node, got {argument!r:.80}")
    return argument


def _shape(node: object) -> tuple[int, ...]:
    shape: tuple[int, ...] = _node(node).meta[SHAPE]
    return shape


def is_mutating(node: fx.Node) -> bool:
    """Whether the operator changes an argument, by its schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
