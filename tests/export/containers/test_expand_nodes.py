"""Single nodes of an exported program are replaced by their operators, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from export.containers.expand_nodes import expand_nodes
from export.containers.flat_graph import FlatGraph, exported_as_it_is

ATEN = torch.ops.aten


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = torch.relu(self.first(x))
        return self.last(made), made, torch.aminmax(made, dim=1).max


def exported(module: nn.Module, *args: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), args)


def targets(program: torch.export.ExportedProgram) -> set[Any]:
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


def test_an_operator_of_the_table_is_replaced_and_the_program_gives_the_same() -> None:
    module, x = TwoOutputs(), torch.randn(5, 4)
    program = exported(module, x)
    assert expand_nodes(program, torch._decomp.core_aten_decompositions())
    assert not targets(program) & {ATEN.linear.default, ATEN.aminmax.default}
    program.validate()  # type: ignore[no-untyped-call]
    for got, true in zip(program.module()(x), module(x), strict=True):
        torch.testing.assert_close(got, true)


def test_a_python_function_is_replaced_by_what_it_does_also_as_the_last_node() -> None:
    program = exported(nn.ReLU(), torch.randn(3))
    node = next(n for n in program.graph.nodes if n.target == ATEN.relu.default)
    node.target = lambda value: torch.where(value > 0, 2 * value, 0.1 * value)
    assert expand_nodes(program, {})
    assert all(isinstance(target, torch._ops.OpOverload) for target in targets(program))
    got = program.module()(torch.tensor([-1.0, 0.0, 3.0]))
    torch.testing.assert_close(got, torch.tensor([-0.1, 0.0, 6.0]))


def test_every_shape_is_the_new_one_where_a_function_moved_the_axes() -> None:
    program = exported(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.randn(2, 3))
    node = next(n for n in program.graph.nodes if n.target == ATEN.relu.default)
    node.target = lambda value: value.permute(1, 0)
    assert expand_nodes(program, {})
    tanh = next(n for n in program.graph.nodes if n.target == ATEN.tanh.default)
    assert tuple(tanh.meta["val"].shape) == tuple(tanh.meta["tensor_meta"].shape) == (3, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda value: value + torch.tensor([1.0, 2.0, 3.0]),
        lambda value: value.add_(1.0),
        lambda value: value * value.sum().item(),
        ATEN.flatten.using_ints,
    ],
    ids=[
        "a constant of its own",
        "an operator that writes to its input",
        "a number that only a run knows",
        "an operator that torch makes of others",
    ],
)
def test_what_it_cannot_replace_is_left_as_it_was(function: Callable[..., Any]) -> None:
    program = exported(nn.ReLU(), torch.randn(3))
    next(n for n in program.graph.nodes if n.target == ATEN.relu.default).target = function
    before = [str(node) for node in program.graph.nodes]
    assert not expand_nodes(program, {})
    assert [str(node) for node in program.graph.nodes] == before


def test_a_program_for_any_batch_size_is_left_as_it_was() -> None:
    dims = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(nn.Linear(4, 3), (torch.randn(5, 4),), dynamic_shapes=dims)
    assert not expand_nodes(program, torch.export.default_decompositions())
    assert ATEN.linear.default in targets(program)


def test_a_traced_graph_is_an_exported_program_without_another_trace() -> None:
    weight = torch.randn(4, 3)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x, y, w: (x @ w + y, x * 2), tracing_mode="fake")(
        torch.randn(5, 4), torch.randn(3), weight
    )
    graph = FlatGraph(traced, [weight])
    args = (torch.randn(5, 4), torch.randn(3))
    program = exported_as_it_is(graph, args)
    assert program is not None
    program.validate()  # type: ignore[no-untyped-call]
    for got, true in zip(program.module()(*args), graph(*args), strict=True):
        torch.testing.assert_close(got, true)


def test_a_traced_graph_with_tensors_of_its_own_needs_another_trace() -> None:
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (x + torch.tensor([1.0, 2.0]),))(torch.randn(2))
    assert exported_as_it_is(FlatGraph(traced, []), (torch.randn(2),)) is None
