"""A broadcast whose axes are moved has torch's values in a TFLite file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.containers.moved_broadcasts import BROADCASTS, move_axes_before_broadcasts
from export.containers.write_tflite import open_tflite, to_named_tflite

ATEN = torch.ops.aten
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a new first axis": lambda c, x: c.expand(4, 5, 3).permute(0, 2, 1) + x,
    "a new last axis": lambda c, x: c.unsqueeze(2).expand(5, 3, 4).permute(2, 1, 0) + x,
    "seen through a view": lambda c, x: c.expand(4, 5, 3).clone().view(4, 5, 3).permute(0, 2, 1) + x,
    "repeated": lambda c, x: c.repeat(4, 1, 1).permute(0, 2, 1) + x,
    "computed": lambda c, x: (c * x.mean()).expand(4, 5, 3).permute(0, 2, 1) + x,
}


class Broadcasts(nn.Module):
    """Each case as one output; `c` [5, 3], `x` [4, 3, 5]."""

    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", torch.arange(15.0).reshape(5, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: case(self.c, x) for name, case in CASES.items()}


def test_a_tflite_file_has_torchs_values() -> None:
    module, x = Broadcasts(), torch.randn(4, 3, 5)
    got = open_tflite(to_named_tflite(module, {"x": x}), "serving_default")({"x": x.numpy()})
    for name, expected in module(x).items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_axes_are_moved_before_the_broadcast_and_values_stay(name: str) -> None:
    class Case(nn.Module):
        def forward(self, c: Tensor, x: Tensor) -> Tensor:
            return CASES[name](c, x)

    args = torch.randn(5, 3), torch.randn(4, 3, 5)
    program = torch.export.export(Case(), args)
    move_axes_before_broadcasts(program)
    program.validate()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(program.module()(*args), Case()(*args))
    moved = [node for node in program.graph.nodes if node.target == ATEN.permute.default]
    assert not [one for one in moved if one.args[0].target in BROADCASTS]
    assert len(moved) == 1
