"""Trace a function of a training program into one graph: forward, backward and update, in core operators only.

This is the second stage; the first (forward_pass.py) has run the model's own Python. An operator that some runtime
lacks is refused with its name and the layer and line that used it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.func import functionalize, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from edge_client.errors import ProgramRefused
from edge_client.protocol.program import Port
from export.compiler.decompositions.supported_ops import RANDOM, SUPPORTED, TORCH_ALONE, UnsupportedOperator
from export.compiler.decompositions.table import decompositions_for
from export.compiler.forward_pass import MAX_BATCH, ForwardPasses, tracing_context
from export.compiler.graph_passes.batch_sizes import share_batch_size
from export.compiler.graph_passes.equal_nodes import merge_equal_nodes, share_maxima
from export.compiler.operator_watch import one_size_only, operator_name, refuse_operator, refuse_untraceable
from export.compiler.program_functions import (
    FlatTensors,
    Graph,
    TraceSource,
    example_inputs,
    flat_graph,
    function_ports,
)
from export.containers.flat_graph import FlatGraph, exported_as_it_is
from export.diagnostics import quiet_warnings

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

OURS = ("aten", "prims", "fedcenters")  # operators that the second stage knows
UNKNOWN = "no runtime of ours is known to run it"


def trace_function(
    passes: ForwardPasses, function: str, *, batch: int, dynamic: bool, closed: bool = False, for_torch: bool = False
) -> FlatGraph:
    """One function as a graph over flat tensors; `dynamic`: for any batch size, and `batch` is only the example's.

    `closed`: the graph holds the frozen parameters, too, which else are its last inputs. `for_torch`: it may hold what
    torch alone does (TORCH_ALONE).
    Raises ProgramRefused.
    """
    source = passes.source
    staged = passes.staged(training=function == "step", batch=batch, dynamic=dynamic)
    inputs = function_ports(source, function).inputs
    constants = [value.clone() for value in staged.constants.values()]
    args = [*example_inputs(source, function, batch), *constants]
    try:
        table = decompositions_for(function, for_torch=for_torch)
        traced, own, sizes = _traced(staged, function, args, inputs if dynamic else (), table)
    except ProgramRefused:
        raise
    except UnsupportedOperator as refused:
        refuse_operator(source, refused.operator, refused.reason, refused)
    except Exception as wrong:  # noqa: BLE001 - torch raises many kinds for what it cannot trace
        _refuse_librarys(source, staged.module, wrong)
        refuse_untraceable(source, wrong)
    _refuse_unsupported(source, traced, SUPPORTED | TORCH_ALONE if for_torch else SUPPORTED)
    held = [*constants[0 if closed else len(source.frozen_names) :], *own]
    return FlatGraph(traced, held, sizes).eval()


def inference_graph(source: TraceSource, evaluate: FlatGraph) -> FlatGraph:
    """What `trace_function` gives for infer: evaluate's graph without the loss, what only the loss reads, and y."""
    graph = copy.deepcopy(evaluate.graph.graph)
    output = graph.output_node()
    told: Any = output.args[0]
    output.args = ((told[1],),)
    graph.eliminate_dead_code()
    inputs = graph.find_nodes(op="placeholder")
    graph.erase_node(inputs[[p.name for p in function_ports(source, "evaluate").inputs].index("y")])
    kept = []
    for node, value in zip(inputs[len(inputs) - evaluate.count :], evaluate.buffers(), strict=True):
        if node.users:
            kept.append(value)
        else:
            graph.erase_node(node)
    return FlatGraph(fx.GraphModule(evaluate.graph, graph), kept, evaluate.sizes).eval()


def export_graph(
    source: TraceSource, function: str, graph: FlatGraph, *, batch: int, dynamic: bool = True
) -> ExportedProgram:
    """A graph of `trace_function` as torch's exported program: batch size from 1, or `batch` unless `dynamic`."""
    dims = Dim("batch", min=1, max=MAX_BATCH) if dynamic else None
    inputs = function_ports(source, function).inputs
    shapes: Any = tuple({i: dims for i, d in enumerate(p.shape) if d == "batch"} or None for p in inputs)
    flat = (*example_inputs(source, function, batch), *source.frozen_tensors)
    shapes = (*shapes, *[None] * (len(flat) - len(shapes))) if dynamic else None
    try:
        made = exported_as_it_is(graph, flat, MAX_BATCH) or _export(graph, flat, shapes, deferred=False)
    except Exception:  # noqa: BLE001 - what torch cannot prove for every batch; `_parity` tries another batch size
        try:
            made = _export(graph, flat, shapes, deferred=True)
        except Exception as wrong:  # noqa: BLE001 - torch raises many kinds, as when a size must be one number
            refuse_untraceable(source, wrong)
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
            dynamic_shapes=None if shapes is None else (shapes,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=deferred,
        )


def _traced(
    source: TraceSource, function: str, args: Sequence[Tensor], dynamic: Sequence[Port], table: Mapping[Any, Any]
) -> tuple[fx.GraphModule, list[Tensor], ShapeEnv | None]:
    """The graph, further constants, which it takes after `args`, and what torch noted about the batch size.

    `args`: ports, then constants. `dynamic`: ports whose "batch" stays a symbol; none for a fixed batch.
    """
    from torch.fx.experimental import symbolic_shapes  # and sympy: not before a model is compiled

    sizes = symbolic_shapes.ShapeEnv() if dynamic else None
    fake = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    mine = [_fake(fake, a, dynamic[i].shape if i < len(dynamic) else ()) for i, a in enumerate(args)]
    with fake, enable_python_dispatcher(), tracing_context():
        graph = flat_graph(source, function, _without_writes if function != "step" else functionalize)
        traced = make_fx(graph, decomposition_table=table)(*mine)
    _check_batch(source, dynamic, mine)
    share_batch_size(traced.graph)
    share_maxima(traced.graph)
    merge_equal_nodes(traced.graph)
    traced.graph.eliminate_dead_code()
    own = _own_tensors(traced, fake)
    traced.recompile()
    return traced, own, sizes


def _without_writes(inner: Graph) -> Graph:
    """functionalize, of operators that torch takes apart as for a gradient, as a step's are: what they write inside."""

    def apart(*flat: Tensor) -> FlatTensors:
        out: FlatTensors = vjp(lambda first: inner(first, *flat[1:]), flat[0])[0]
        return out

    return functionalize(apart)


def _check_batch(source: TraceSource, ports: Sequence[Port], traced: Sequence[Tensor]) -> None:
    """Refuse a graph in which the batch has become a plain number: it would be wrong for every other one."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    for port, value in zip(ports, traced, strict=False):
        if any(d == "batch" and not free_symbols(n) for d, n in zip(port.shape, value.shape, strict=True)):
            raise one_size_only(source)


def _own_tensors(traced: fx.GraphModule, fake: FakeTensorMode) -> list[Tensor]:
    """Make inputs of the tensors that the graph holds, and return them in their order.

    They are the plain tensors of a model, neither parameters nor buffers, which torch's archives would lose. Tensors
    that no node reads go: some are torch's wrappers.
    """
    graph = traced.graph
    read = [node for node in graph.nodes if node.op == "get_attr" and isinstance(getattr(traced, node.target), Tensor)]
    values = {node.target: getattr(traced, node.target).detach() for node in read}
    inputs = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for name, value in values.items():
        with graph.inserting_after(last):
            inputs[name] = last = graph.placeholder(name)
        last.meta["val"] = fake.from_tensor(value, static_shapes=True)
    for node in read:
        node.replace_all_uses_with(inputs[node.target])
        graph.erase_node(node)
    for name in [n for n, _ in (*traced.named_buffers(recurse=False), *traced.named_parameters(recurse=False))]:
        delattr(traced, name)
    return list(values.values())


def _fake(mode: FakeTensorMode, value: Tensor, shape: Sequence[Any]) -> Tensor:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DUCK if d == "batch" else DimDynamic.STATIC for d in shape]  # one symbol for all ports
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds) if "batch" in shape else None
    return mode.from_tensor(value, static_shapes=context is None, symbolic_context=context)


def holds(graph: FlatGraph, operators: frozenset[str]) -> bool:
    """Whether one of these operators ("aten.mul") is in a graph of `trace_function`."""
    nodes = [node.target for node in graph.graph.graph.nodes]
    return any(isinstance(target, torch._ops.OpOverload) and operator_name(target) in operators for target in nodes)  # noqa: SLF001 - no public name


def groups_are_samples(graph: FlatGraph) -> bool:
    """Whether a convolution has a group for each sample, as one with a kernel of each sample's own has.

    torch takes any number there, and .onnx files a plain one.
    """
    calls = graph.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    return any(isinstance(call.args[-1], fx.Node) for call in calls)


def _refuse_librarys(source: TraceSource, forward: nn.Module, wrong: Exception) -> None:
    """Raise ProgramRefused for an operator of another library (torch.library.custom_op), whose gradient has no graph.

    Torch's own words for it speak of its inside. `forward` is the pass of the first stage.
    """
    for graph in (layer for layer in forward.modules() if isinstance(layer, fx.GraphModule)):
        for node in graph.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in OURS:  # noqa: SLF001 - no public name
                refuse_operator(source, operator_name(node.target), UNKNOWN, wrong)


def _refuse_unsupported(source: TraceSource, graph: fx.GraphModule, supported: frozenset[str]) -> None:
    """Raise ProgramRefused for a node that is neither arithmetic on sizes nor a supported operator."""
    for node in graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - no public name
            continue
        name = operator_name(node.target)
        if name in RANDOM:
            refuse_operator(source, name, "it draws random numbers even in inference mode")
        if name not in supported:
            refuse_operator(source, name, UNKNOWN)
