"""Vectors move together, other tensors alone; both as torch's own optimizer moves them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.program_functions import example_inputs
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.sgd_step import SgdStep
from export.compiler.tracing import holds, trace_function


@pytest.mark.parametrize(
    "shapes", [[(3,), (2, 3), (5,)], [(4,)], [(2, 2), ()], [(3,), (3,), (1,)], [(1024, 1024), (3,)]]
)
def test_every_tensor_moves_as_torchs_optimizer_moves_it(shapes: list[tuple[int, ...]]) -> None:
    draw = torch.Generator().manual_seed(0)
    terms = [
        {f"t{i}": torch.randn(shape, generator=draw, dtype=torch.float64) for i, shape in enumerate(shapes)}
        for _ in range(5)
    ]
    start, velocity, gradient, linear, anchor = terms
    lr, momentum, mu = (torch.tensor(v, dtype=torch.float64) for v in (0.1, 0.7, 0.3))
    moved, faster = SgdStep(lr=lr, momentum=momentum, mu=mu).step(start, velocity, gradient, linear, anchor)
    assert list(moved) == list(faster) == list(start)
    for name, before in start.items():
        weight = torch.nn.Parameter(before.clone())
        weight.grad = gradient[name] + linear[name] - 0.3 * anchor[name]
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.7, weight_decay=0.3)
        optimizer.state[weight]["momentum_buffer"] = velocity[name].clone()
        optimizer.step()
        assert torch.allclose(moved[name], weight.detach(), rtol=0, atol=1e-14)
        assert torch.allclose(faster[name], optimizer.state[weight]["momentum_buffer"], rtol=0, atol=1e-14)


class Fused(nn.Linear):
    """A large weight, and the operator in the model itself, with a factor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(super().forward(x), x[:, :2], x[:, 1:3], value=0.5)


@pytest.mark.parametrize("for_torch", [True, False])
def test_torch_alone_has_the_operator_that_moves_large_tensors_in_fewer_passes(*, for_torch: bool) -> None:
    source = make_source(Fused(1 << 19, 2), input=(1 << 19,), loss="squared-error", dtype="float64")
    graph = trace_function(ForwardPasses(source), "step", batch=3, dynamic=True, for_torch=for_torch)
    assert holds(graph, frozenset({"aten.addcmul"})) == for_torch
    given = example_inputs(source, "step", 5)
    found = [value.detach().numpy() for value in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < 1e-10
