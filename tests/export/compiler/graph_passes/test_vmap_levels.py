"""A model may call torch.vmap, one inside another too; one that cannot be traced leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.program_functions import example_inputs
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.tracing import trace_function

ROUNDING = 1e-12  # float64


class Mapped(nn.Module):
    """A layer, then `function` by torch.vmap, and the rows of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.body, self.head, self.function = nn.Linear(4, 4), nn.Linear(width, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.vmap(self.function)(self.body(x)).flatten(1))  # type: ignore[no-any-return]


def products(rows: Tensor) -> Tensor:
    """Of each row with each, [rows, rows]."""
    found: Tensor = torch.vmap(lambda a: torch.vmap(lambda b: (a * b).sum().tanh())(rows))(rows)
    return found


def step_differs(module: nn.Module) -> float:
    source = make_source(module, input=(3, 4), loss="squared-error", dtype="float64")
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True, closed=True)
    given = example_inputs(source, "step", 5)
    return max(output_differences([t.detach().numpy() for t in graph(*given)], torch_outputs(source, "step", given)))


@pytest.mark.parametrize(
    ("function", "width"), [(lambda rows: rows.softmax(-1) @ rows.mT, 9), (products, 9)], ids=["plain", "nested"]
)
def test_a_step_through_vmap_is_torchs(function: Callable[[Tensor], Tensor], width: int) -> None:
    assert step_differs(Mapped(function, width)) < ROUNDING


class Force(nn.Linear):
    """The gradient of an energy with respect to the places, as in models of molecules."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.flatten(1).requires_grad_()
            (found,) = torch.autograd.grad(super().forward(x).tanh().sum(), x)
        return found


def test_a_gradient_in_forward_is_refused_by_its_line() -> None:
    with pytest.raises(ProgramRefused, match=r"test_vmap_levels.py:\d+ uses torch.autograd.grad: a gradient in"):
        step_differs(Force(12, 1))


def test_what_is_refused_inside_of_vmap_leaves_the_next_model_alone() -> None:
    with pytest.raises(ProgramRefused, match="igamma"):
        step_differs(Mapped(lambda rows: torch.igamma(rows.abs() + 1, rows.abs() + 2), 12))
    with pytest.raises(ProgramRefused, match=r"at test_vmap_levels.py:\d+ uses torch.func: a gradient"):
        step_differs(Mapped(torch.func.grad(lambda rows: rows.pow(3).sum()), 12))
    assert step_differs(nn.Sequential(nn.Flatten(), nn.Linear(12, 3))) < ROUNDING
