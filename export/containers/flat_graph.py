"""A traced function of a training program, as the module that exporters take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

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


def exported_as_it_is(module: FlatGraph, args: Sequence[Tensor]) -> ExportedProgram | None:
    """Torch's exported program of a graph for one batch size, without another trace: the graph is one of operators.

    `args`: examples of the inputs. None where only torch.export knows how: the graph has tensors of its own.
    """
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
        range_constraints={},
        module_call_graph=[ModuleCallEntry("", call)],
        example_inputs=(tuple(args), {}),
        constants={},
    )
