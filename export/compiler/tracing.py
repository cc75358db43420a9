"""Trace a function of a training program into one graph: forward, backward and update, in core operators only.

An operator that some runtime lacks is refused with its name and the layer that used it.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from edge_client.errors import ProgramRefused
from edge_client.protocol.program import Port
from export.compiler.decompositions.supported_ops import RANDOM, SUPPORTED, UnsupportedOperator
from export.compiler.decompositions.table import decompositions_for
from export.compiler.forward_overrides import ForwardOverrides
from export.compiler.program_functions import (
    TraceSource,
    call_module,
    example_inputs,
    flat_graph,
    function_ports,
    tensors_of,
)
from export.compiler.random_ops import COVERED_OPERATORS
from export.diagnostics import first_sentence

MAX_BATCH = 65_536


def trace_function(source: TraceSource, function: str, *, batch: int, dynamic: bool) -> FlatGraph:
    """One function as a graph over flat tensors; `dynamic`: for any batch size, and `batch` is only the example's."""
    inputs = function_ports(source, function).inputs
    constants = [value.clone() for value in source.constants.values()]
    traced = _traced(
        source, function, [*example_inputs(source, function, batch), *constants], inputs if dynamic else ()
    )
    _refuse_unsupported(source, traced)
    return FlatGraph(traced, constants).eval()


def export_graph(source: TraceSource, function: str, graph: nn.Module, *, batch: int) -> ExportedProgram:
    """A dynamic graph of `trace_function` as torch's exported program, batch size from 1."""
    dims = Dim("batch", min=1, max=MAX_BATCH)
    inputs = function_ports(source, function).inputs
    shapes = tuple({i: dims for i, d in enumerate(p.shape) if d == "batch"} or None for p in inputs)
    flat = tuple(example_inputs(source, function, batch))
    try:
        made = _export(graph, flat, shapes, deferred=False)
    except Exception:  # noqa: BLE001 - what torch cannot prove for every batch; `_parity` tries another batch size
        try:
            made = _export(graph, flat, shapes, deferred=True)
        except Exception as wrong:  # torch raises many kinds, as when a size must be one number
            raise _untraceable(source, wrong) from wrong
    for node in made.graph.nodes:
        node.meta.pop("stack_trace", None)  # it holds paths of this machine
        node.meta.pop("nn_module_stack", None)
    made.example_inputs = None
    return made


def _export(graph: nn.Module, flat: tuple[Tensor, ...], shapes: Any, *, deferred: bool) -> ExportedProgram:  # noqa: ANN401
    """`deferred`: torch's assumptions about the batch size are checked when the graph runs."""
    with quiet_warnings():
        return torch.export.export(
            graph,
            flat,
            dynamic_shapes=(shapes,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=deferred,
        )


class FlatGraph(nn.Module):
    """torch.export wants a module; this one takes the graph's flat inputs and holds its constants."""

    def __init__(self, graph: fx.GraphModule, constants: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.count = graph, len(constants)
        for i, value in enumerate(constants):
            self.register_buffer(f"constant{i}", value)

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        constants = [getattr(self, f"constant{i}") for i in range(self.count)]
        return cast("tuple[Tensor, ...]", self.graph(*flat, *constants))


def _traced(source: TraceSource, function: str, args: Sequence[Tensor], dynamic: Sequence[Port]) -> fx.GraphModule:
    """`args`: ports, then constants. `dynamic`: ports whose "batch" stays a symbol; none for a fixed batch."""
    fake = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None, allow_non_fake_inputs=True)
    mine = [_fake(fake, a, dynamic[i].shape if i < len(dynamic) else ()) for i, a in enumerate(args)]
    _refuse_random(source)
    try:
        with ExitStack() as stack:
            stack.enter_context(quiet_warnings())
            # Without these, attention, LSTM and GRU arrive as one opaque operator each.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(fake)
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(ForwardOverrides())
            graph = flat_graph(source, function, functionalize)
            traced = make_fx(graph, decomposition_table=decompositions_for(function))(*mine)
    except ProgramRefused:
        raise
    except UnsupportedOperator as refused:
        raise _refusal(source, refused.operator, refused.reason) from None
    except Exception as wrong:  # torch raises many kinds for what it cannot trace
        raise _untraceable(source, wrong) from wrong
    traced.graph.eliminate_dead_code()
    _drop_unused_tensors(traced)
    traced.recompile()
    return traced


def _drop_unused_tensors(traced: fx.GraphModule) -> None:
    """Drop the tensors that no node reads: exporters would read them, and some are torch's wrappers."""
    read = {node.target for node in traced.graph.nodes if node.op == "get_attr"}
    for name in [n for n, _ in (*traced.named_buffers(recurse=False), *traced.named_parameters(recurse=False))]:
        if name not in read:
            delattr(traced, name)


def _untraceable(source: TraceSource, wrong: Exception) -> ProgramRefused:
    return ProgramRefused(
        f"model {source.name!r} cannot be traced: {first_sentence(wrong)}",
        hint="forward must be the same operators for every batch: no branches on values, no .item()",
    )


def _fake(mode: FakeTensorMode, value: Tensor, shape: Sequence[Any]) -> Tensor:
    kinds = [DimDynamic.DUCK if d == "batch" else DimDynamic.STATIC for d in shape]  # one symbol for all ports
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds) if "batch" in shape else None
    return mode.from_tensor(value, static_shapes=context is None, symbolic_context=context)


def _refuse_unsupported(source: TraceSource, graph: fx.GraphModule) -> None:
    """Raise ProgramRefused for a node that is neither arithmetic on sizes nor a supported operator."""
    for node in graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - no public name
            continue
        name = _plain(node.target)
        if name in RANDOM:
            raise _refusal(source, name, "it draws random numbers even in inference mode")
        if name not in SUPPORTED:
            raise _refusal(source, name, "no runtime of ours is known to run it")


def count_random_numbers(source: TraceSource) -> int:
    """The random numbers that a training pass draws per sample. Raises ProgramRefused for draws of no single sample."""
    two, three = (_watch_pass(source, batch).draws for batch in (2, 3))
    for (layer, operator, small), (*_, large) in zip(two, three, strict=False):
        if small * 3 != large * 2:
            raise _refused_layer(source, layer, operator, "its random numbers do not belong to one sample each")
    if len(two) != len(three):
        raise _refused_layer(source, two[-1][0], two[-1][1], "it draws another number of times for other samples")
    return sum(small for *_, small in two) // 2


def _refuse_random(source: TraceSource) -> None:
    """Raise ProgramRefused for draws that are neither uniform numbers nor masks, even when only `infer` is traced."""
    drawn = sorted((RANDOM - COVERED_OPERATORS) & _watch_pass(source, 2).seen.keys())
    if drawn:
        raise _refusal(source, drawn[0], "only uniform random numbers and masks can be an input of a step")


def _refusal(source: TraceSource, operator: str, reason: str) -> ProgramRefused:
    """An error with the operator and the layers that use it or its forward counterpart."""
    used = _watch_pass(source, 2).seen
    stem = operator.removeprefix("aten.").removesuffix("_backward").removesuffix("_with_indices").strip("_")
    where = used.get(operator) or next((layers for name, layers in used.items() if stem in name), {})
    layers = f"layer {', '.join(where)}" if where else f"some layer of {type(source.module).__name__}"
    return _refused_layer(source, layers, operator, reason)


def _refused_layer(source: TraceSource, layers: str, operator: str, reason: str) -> ProgramRefused:
    return ProgramRefused(
        f"model {source.name!r} cannot become a training program: {layers} uses {operator}: {reason}",
        hint="leave the layer out or replace it; docs/train-your-own-model.md lists what compiles",
    )


def _watch_pass(source: TraceSource, batch: int) -> _Watch:
    """Watch one training-mode pass; torch's generator keeps its state."""
    watch = _Watch()
    x = torch.zeros(batch, *source.input, dtype=getattr(torch, source.dtype))
    state = {name: value.clone() for name, value in tensors_of(source.module).items()}
    handles = [h for name, layer in source.module.named_modules() for h in watch.follow(name, layer)]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), watch:
            call_module(source.module.train(), state, x)
    finally:
        for handle in handles:
            handle.remove()
    return watch


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """Records which layers call which operator (`seen`: operator -> "name (Class)"), and what random operators draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack: list[str] = []
        self.seen: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self.draws: list[tuple[str, str, int]] = []  # layer, random operator, how many numbers

    def follow(self, name: str, layer: nn.Module) -> list[Any]:
        label = f"{name or 'the model itself'} ({type(layer).__name__})"
        return [
            layer.register_forward_pre_hook(lambda *_: self.stack.append(label)),
            layer.register_forward_hook(lambda *_: self.stack.pop() and None),
        ]

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        name, layer = _plain(func), self.stack[-1] if self.stack else "the model itself"
        self.seen[name][layer] = None
        if name in COVERED_OPERATORS:
            shape = args[0].shape if isinstance(args[0], Tensor) else args[0]
            self.draws.append((f"layer {layer}", name, math.prod(shape)))
        return func(*args, **(kwargs or {}))


def _plain(operator: Any) -> str:  # noqa: ANN401 - an OpOverload
    """aten.mul.Tensor -> "aten.mul"."""
    return str(operator.overloadpacket).removeprefix("torch.ops.")


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Silence torch's warnings about its own internals while it traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
