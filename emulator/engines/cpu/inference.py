"""Candidate models on samples, batch norm in inference mode: logits only, in batches that fit the cache.

Values that depend on the weights alone are computed once per model, not per batch: batch norm becomes part of the
convolution or linear layer before it (Jacob et al. 2018, section 3.2, equation 14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from edge_client.protocol.task import Flat
from emulator.engines.cpu.flat import FlatModel
from emulator.engines.cpu.operator_log import SHAPE
from emulator.engines.cpu.recording import aten, compile_graph, drop_unread, is_call, is_mutating, record_operators
from emulator.engines.cpu.samples import TorchSamples
from export.compiler.program_functions import TraceSource, call_module

MAX_BATCH = 128  # samples at once
BATCH_MULTIPLE = 16  # a shorter batch is filled up to a multiple of this, so that few sizes are recorded
BATCH_NORM_OPERATORS = (aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default)  # noqa: SLF001 - torch's name
GraphFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class SplitGraph:
    """`prepare(*state)` -> what `run(x, *prepared)` needs of the weights; run gives the logits."""

    prepare: GraphFunction
    run: GraphFunction


class Inference:
    """Logits of one model after the other, on weights of its own."""

    def __init__(self, source: TraceSource, *, channels_last: bool) -> None:
        self._model = FlatModel(source.module, source.schema, channels_last=channels_last)
        self._model.module.eval()
        self._parts: dict[int, SplitGraph] = {}

    @torch.inference_mode()
    def logits(self, models: Sequence[Flat], held: TorchSamples) -> Tensor:
        """[models, n, *target]; samples that fill up a batch are dropped: no sample depends on the others here."""
        batches = list(held.slices(MAX_BATCH, BATCH_MULTIPLE))
        for x in batches:
            if len(x) not in self._parts:
                self._parts[len(x)] = split_forward(self._model, x)
        return torch.stack([self._of_one(model, batches)[: len(held.x)] for model in models])

    def _of_one(self, model: Flat, batches: Sequence[Tensor]) -> Tensor:
        self._model.load(model)
        state = list(self._model.state.values())
        prepared = {width: self._parts[width].prepare(*state) for width in {len(x) for x in batches}}
        return torch.cat([self._parts[len(x)].run(x, *prepared[len(x)]) for x in batches])


def split_forward(model: FlatModel, x: Tensor) -> SplitGraph:
    """Recorded for batches of this size; a forward that cannot be recorded is called as it is."""
    names = list(model.state)

    def infer(*flat: Tensor) -> Tensor:
        return call_module(model.module, dict(zip(names, flat, strict=False)), flat[-1])[0]

    try:
        graph = record_operators(infer, [*model.state.values(), x])
    except Exception:  # noqa: BLE001 - torch raises many kinds for what it cannot record
        return SplitGraph(prepare=lambda *_: (), run=model.module)
    fold_batch_norm(graph)
    return split_graph(graph)


def fold_batch_norm(graph: fx.Graph) -> None:
    """Fold batch norm into the layer before it, where no other node reads that layer."""
    of_weights = _of_weights(graph)
    for norm in [node for node in graph.nodes if is_call(node, *BATCH_NORM_OPERATORS)]:
        layer, *given = norm.args[:5]
        inference = norm.target is BATCH_NORM_OPERATORS[1] or norm.args[5] is False
        known = all(value is None or value in of_weights for value in given) and given[2] is not None
        if not (inference and known) or set(layer.users) != {norm} or any(u.args[1] != 0 for u in norm.users):
            continue
        with graph.inserting_before(norm):
            made = _folded(graph, layer, given, eps=norm.args[-1], of_weights=of_weights)
        for user in list(norm.users) if made is not None else ():
            user.replace_all_uses_with(made)
    drop_unread(graph)


def _folded(
    graph: fx.Graph, layer: fx.Node, given: Sequence[fx.Node | None], *, eps: float, of_weights: set[fx.Node]
) -> fx.Node | None:
    """The layer with the norm in it; None for another kind of layer."""
    args: Any = layer.args
    if is_call(layer, aten.convolution.default) and not args[6]:
        x, weight, bias, *rest = args
        axes: list[int] = [-1, *[1] * (len(weight.meta[SHAPE]) - 1)]
    elif is_call(layer, aten.addmm.default) and not layer.kwargs:
        bias, x, weight = args
        axes, rest = [1, -1], []
    elif is_call(layer, aten.mm.default):
        x, weight = args
        axes, rest, bias = [1, -1], [], None
    else:
        return None
    if weight not in of_weights or not (bias is None or bias in of_weights):
        return None
    gamma, beta, mean, variance = given

    def do(target: Any, *args: Any) -> fx.Node:  # noqa: ANN401 - torch's
        return graph.call_function(target, args)

    scale = do(aten.rsqrt.default, do(aten.add.Scalar, variance, eps))
    scale = scale if gamma is None else do(aten.mul.Tensor, scale, gamma)
    shift = do(aten.neg.default, mean) if bias is None else do(aten.sub.Tensor, bias, mean)
    shift = do(aten.mul.Tensor, shift, scale)
    shift = shift if beta is None else do(aten.add.Tensor, shift, beta)
    weight = do(aten.mul.Tensor, weight, do(aten.view.default, scale, axes))
    if layer.target is aten.convolution.default:
        return do(aten.convolution.default, x, weight, shift, *rest)
    return do(aten.addmm.default, shift, x, weight)


def split_graph(graph: fx.Graph) -> SplitGraph:
    """What depends on the weights alone, and the rest. The last placeholder is x."""
    known = _of_weights(graph)
    at_border = [n for n in graph.nodes if n in known and any(user not in known for user in n.users)]
    first, second = fx.Graph(), fx.Graph()
    before: dict[fx.Node, fx.Node] = {}
    x = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
    after = {x: second.placeholder("x")} | {n: second.placeholder(n.name) for n in at_border}
    for node in graph.nodes:
        if node in known:
            before[node] = first.node_copy(node, before.__getitem__)
        elif node not in after:
            after[node] = second.node_copy(node, after.__getitem__)
    first.output(tuple(before[n] for n in at_border))
    return SplitGraph(prepare=compile_graph(first), run=compile_graph(second))


def _of_weights(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that do not depend on the last placeholder; none but placeholders if anything writes."""
    *state, _ = [n for n in graph.nodes if n.op == "placeholder"]
    known = set(state)
    if any(is_mutating(node) for node in graph.nodes):
        return known
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr") and all(n in known for n in node.all_input_nodes):
            known.add(node)
    return known
