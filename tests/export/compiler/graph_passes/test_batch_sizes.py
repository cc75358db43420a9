"""Sizes are told by the batch size of the inputs; a graph that holds for all of them is exported without a trace."""

from __future__ import annotations

import operator
from unittest.mock import patch

import pytest
import torch
from torch import nn

from export.compiler.forward_pass import MAX_BATCH, ForwardPasses
from export.compiler.graph_passes.batch_sizes import share_batch_size
from export.compiler.program import make_source
from export.compiler.program_functions import TraceSource, example_inputs
from export.compiler.tracing import export_graph, trace_function
from export.containers.flat_graph import FlatGraph, exported_as_it_is

aten = torch.ops.aten


def traced_step(*, batch: int = 13, dynamic: bool = True) -> tuple[TraceSource, FlatGraph]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3))
    source = make_source(nn.Sequential(*layers), input=(1, 8, 8))
    return source, trace_function(ForwardPasses(source), "step", batch=batch, dynamic=dynamic)


def test_a_step_counts_every_size_from_one_batch_size() -> None:
    _, graph = traced_step()
    nodes = list(graph.graph.graph.nodes)
    assert [n.target for n in nodes if isinstance(n.meta.get("val"), torch.SymInt)].count(aten.sym_size.int) == 1
    assert not {aten.sym_numel.default, operator.floordiv} & {n.target for n in nodes}


def test_a_graph_for_one_batch_size_stays_as_it_is() -> None:
    _, graph = traced_step(batch=4, dynamic=False)
    before = str(graph.graph.graph)
    share_batch_size(graph.graph.graph)
    assert str(graph.graph.graph) == before


def test_a_step_without_assumptions_is_exported_as_it_is_and_computes_what_torchs_export_does() -> None:
    source, graph = traced_step()
    with patch.object(torch.export, "export", side_effect=AssertionError("a second trace")):
        own = export_graph(source, "step", graph, batch=13).module()
    with patch("export.compiler.tracing.exported_as_it_is", return_value=None):
        torchs = export_graph(source, "step", graph, batch=13).module()
    for batch in (1, 2, 40):
        flat = example_inputs(source, "step", batch)
        assert all(torch.equal(a, b) for a, b in zip(own(*flat), torchs(*flat), strict=True))


def test_a_graph_whose_trace_took_a_branch_by_the_batch_size_is_left_to_torchs_export() -> None:
    source, graph = traced_step()
    flat = example_inputs(source, "step", 13)
    assert exported_as_it_is(graph, flat, MAX_BATCH) is not None
    batch = next(n for n in graph.graph.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)).meta["val"]
    assert bool(batch < 20)  # torch notes what it was asked
    assert exported_as_it_is(graph, flat, MAX_BATCH) is None
    export_graph(source, "step", graph, batch=13)


@pytest.mark.parametrize("function", ["step", "evaluate", "infer"])
def test_a_convolution_is_traced_without_a_limit_of_the_batch_size(function: str) -> None:
    """Torch has a backend that it takes from 16 samples; it noted that the example has fewer."""
    source = make_source(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)), input=(1, 8, 8))
    sizes = trace_function(ForwardPasses(source), function, batch=13, dynamic=True).sizes
    assert sizes is not None
    assert not sizes.guards


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_of_stride_two_is_traced_without_a_limit_of_the_batch_size(groups: int) -> None:
    """Its weight gradient is a convolution whose channels are the samples, which were compared with its groups."""
    layers = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=groups), nn.Flatten(), nn.Linear(288, 3)
    source = make_source(nn.Sequential(*layers), input=(4, 4, 72))  # too wide for the products of a few groups
    sizes = trace_function(ForwardPasses(source), "step", batch=13, dynamic=True).sizes
    assert sizes is not None
    assert not sizes.guards
