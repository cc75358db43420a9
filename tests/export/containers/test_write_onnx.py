"""An ONNX file computes with every number of the model, however near to 0 or 1 it is."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from export.containers.write_onnx import run_onnx, to_onnx


class NearNothing(nn.Module):
    """[batch, 4] -> [batch, 4] with bounds against a division by 0, and factors near 1."""

    def forward(self, x: Tensor) -> Tensor:
        share = x / (x.sum(1, keepdim=True) + 1e-9) - torch.log(1e-10 + x)
        return share + (x - 1e-12) * 0.999995 / 1.000007


def test_small_bounds_and_factors_near_one_are_kept() -> None:
    x = torch.cat([torch.zeros(1, 4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)])
    file = to_onnx(torch.export.export(NearNothing(), (x,)), ["x"], ["out"])
    (out,) = run_onnx(file, {"x": x.numpy()})
    np.testing.assert_allclose(out, NearNothing()(x).numpy(), rtol=1e-14)
