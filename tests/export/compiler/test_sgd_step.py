"""Vectors move together, other tensors alone; both as torch's own optimizer moves them."""

from __future__ import annotations

import pytest
import torch

from export.compiler.sgd_step import SgdStep


@pytest.mark.parametrize("shapes", [[(3,), (2, 3), (5,)], [(4,)], [(2, 2), ()], [(3,), (3,), (1,)]])
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
