"""A traced function of a training program, as the module that exporters take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


class FlatGraph(nn.Module):
    """torch.export wants a module; this one takes the graph's flat inputs and holds its constants.

    `sizes`: what the trace knows of its symbolic sizes; None where all are plain numbers.
    """

    def __init__(self, graph: fx.GraphModule, constants: Sequence[Tensor], sizes: ShapeEnv | None = None) -> None:
        super().__init__()
        self.graph, self.count, self.sizes = graph, len(constants), sizes
        for i, value in enumerate(constants):
            self.register_buffer(f"constant{i}", value)

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        constants = [getattr(self, f"constant{i}") for i in range(self.count)]
        return cast("tuple[Tensor, ...]", self.graph(*flat, *constants))


def exported_as_it_is(module: FlatGraph, args: Sequence[Tensor], max_size: int = 0) -> ExportedProgram | None:
    """Torch's exported program of a graph, without another trace: the graph is one of operators.

    `args`: examples of the inputs. `max_size`: of a symbolic size. None where only torch.export knows how: the graph
    has tensors of its own, or torch assumed something about a symbolic size while it was traced.
    """
    if not _holds_for_all_sizes(module.sizes):
        return None
    calls = [node for node in module.graph.graph.nodes if node.op not in ("placeholder", "output")]
    inputs = [node for node in module.graph.graph.nodes if node.op == "placeholder"]
    if not all(node.op == "call_function" for node in calls):
        return None
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    held, given = inputs[len(args) :], inputs[: len(args)]
    for node in (*held, *given, *calls):  # in torch's order, buffers first
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta = {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
    told: Any = module.graph.graph.output_node().args[0]
    results: Any = fx.map_arg(tuple(told), made.__getitem__)
    graph.output(results)

    def port(node: fx.Node) -> TensorArgument:
        return TensorArgument(node.name)

    buffers = dict(module.named_buffers(recurse=False))
    signature = ExportGraphSignature(
        [
            *(InputSpec(InputKind.BUFFER, port(made[n]), name, True) for n, name in zip(held, buffers, strict=True)),  # noqa: FBT003 - torch's
            *(InputSpec(InputKind.USER_INPUT, port(made[n]), None) for n in given),
        ],
        [OutputSpec(OutputKind.USER_OUTPUT, port(one), None) for one in results],
    )
    tree = torch.utils._pytree.tree_structure  # noqa: SLF001 - torch has no public one
    call = ModuleCallSignature([], [], tree((tuple(args), {})), tree(tuple(results)))
    return ExportedProgram(
        root=fx.GraphModule({}, graph),
        graph=graph,
        graph_signature=signature,
        state_dict=buffers,
        range_constraints=_ranges(module.sizes, max_size),
        module_call_graph=[ModuleCallEntry("", call)],
        example_inputs=(tuple(args), {}),
        constants={},
    )


def _holds_for_all_sizes(sizes: ShapeEnv | None) -> bool:
    """Whether a trace has taken no branch by a size: torch notes each one as a guard, or as a check for later."""
    return sizes is None or not (sizes.guards or any(sizes.deferred_runtime_asserts.values()))


def _ranges(sizes: ShapeEnv | None, max_size: int) -> dict[Any, Any]:
    """The limits of each symbol, from 1: torch's own lower one is 2, as a size of 1 may broadcast."""
    if sizes is None:
        return {}
    from torch.utils._sympy.value_ranges import ValueRanges

    return {symbol: ValueRanges(1, max_size) for symbol in sizes.var_to_range}
