"""Recurrent cells in plain operators: torch's own values and gradients."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.program_functions import example_inputs
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.tracing import trace_function

EXACT = 1e-12  # float64


class TwoSteps(nn.Module):
    """The second state of a cell, from zeros."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 1], self.cell(x[:, 0]))
        return self.head(sum(state) if isinstance(state, tuple) else state)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "cell",
    [
        nn.LSTMCell(5, 4),
        nn.GRUCell(5, 4),
        nn.GRUCell(5, 4, bias=False),
        nn.RNNCell(5, 4),
        nn.RNNCell(5, 4, nonlinearity="relu"),
    ],
    ids=str,
)
def test_a_step_and_an_inference_through_a_cell_are_torchs(cell: nn.Module) -> None:
    source = make_source(TwoSteps(cell), input=(2, 5), loss="squared-error", dtype="float64")
    for function in ("step", "infer"):
        graph = trace_function(ForwardPasses(source), function, batch=4, dynamic=True, closed=True)
        given = example_inputs(source, function, 5)
        found = [t.detach().numpy() for t in graph(*given)]
        assert max(output_differences(found, torch_outputs(source, function, given))) < EXACT
