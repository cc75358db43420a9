"""Record graphs of torch's own operators and make them smaller. A recorded graph runs without autograd.

Aliases, double transposes and unread nodes are removed, so that every number stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from export.compiler.decompositions.norms import batch_norm_of_one_value
from export.compiler.forward_overrides import ForwardOverrides
from export.diagnostics import quiet_warnings
from export.rare_collection import rare_collection

aten = torch.ops.aten
ALIAS_OPERATORS = (aten.detach.default, aten.alias.default)
VIEW_OPERATORS = (aten.view.default, aten._unsafe_view.default, aten.expand.default)  # noqa: SLF001 - torch's name


def record_operators(function: Callable[..., Any], given: Sequence[Tensor]) -> fx.Graph:
    """The operators that `function` calls for tensors of these sizes and strides, whatever their values are."""
    with (
        quiet_warnings(),
        torch.enable_grad(),
        batch_norm_of_one_value(),
        ForwardOverrides(),
        _PlainLstm(),
        rare_collection(),  # the first record imports a thousand modules of torch
    ):
        recorded = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    graph = recorded.graph
    _keep_constants(recorded)
    graph.set_codegen(fx.graph.CodeGen())  # plain positional arguments
    for node in graph.nodes:
        same = _same(node)
        if same is not None:
            node.replace_all_uses_with(same)
    drop_unread(graph)
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


def _keep_constants(recorded: fx.GraphModule) -> None:
    """Turn each tensor that the function made from numbers into a call, so that the graph needs no module around it."""
    for node in list(recorded.graph.nodes):
        value = getattr(recorded, node.target, None) if node.op == "get_attr" else None
        if isinstance(value, Tensor):
            with recorded.graph.inserting_before(node):
                made = recorded.graph.call_function(_constant(value))
            made.meta = node.meta
            node.replace_all_uses_with(made)
            recorded.graph.erase_node(node)


def _constant(value: Tensor) -> Callable[[], Tensor]:
    def constant() -> Tensor:
        return value

    return constant


def drop_unread(graph: fx.Graph) -> None:
    """Drop nodes that no node reads and that write nothing."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not is_mutating(node):
            graph.erase_node(node)


def compile_graph(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of its placeholders."""
    graph.lint()
    return fx.GraphModule({}, graph).forward


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
    return tuple(_node(node).meta["val"].shape)


def is_mutating(node: fx.Node) -> bool:
    """Whether the operator changes an argument, by its schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
