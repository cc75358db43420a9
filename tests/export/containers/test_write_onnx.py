"""An ONNX file computes with every number of the model, however near to 0 or 1 it is, and loads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from export.compiler.program import compile_program
from export.containers.write_onnx import open_onnx, to_onnx


class NearNothing(nn.Module):
    """[batch, 4] -> [batch, 4] with bounds against a division by 0, and factors near 1."""

    def forward(self, x: Tensor) -> Tensor:
        share = x / (x.sum(1, keepdim=True) + 1e-9) - torch.log(1e-10 + x)
        return share + (x - 1e-12) * 0.999995 / 1.000007


def test_small_bounds_and_factors_near_one_are_kept() -> None:
    x = torch.cat([torch.zeros(1, 4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)])
    file = to_onnx(torch.export.export(NearNothing(), (x,)), ["x"], ["out"])
    (out,) = open_onnx(file)({"x": x.numpy()})
    np.testing.assert_allclose(out, NearNothing()(x).numpy(), rtol=1e-14)


class Layer(nn.Module):
    """[batch, 4], [3, 4], [3] -> [batch, 3], and the turned weight if it is asked for."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        turned = weight.permute(1, 0)
        out = torch.addmm(bias, x, turned)
        return (out, turned) if self.whole else (out,)


@pytest.mark.parametrize("whole", [False, True])
def test_a_product_turns_its_factor_itself_and_a_turned_output_stays(*, whole: bool) -> None:
    layer, names = Layer(whole=whole), ("x", "weight", "bias")
    given = torch.rand(2, 4), torch.rand(3, 4), torch.rand(3)
    file = to_onnx(torch.export.export(layer, given), names, ["out", "turned"][: 1 + whole])
    nodes = [node.op_type for node in onnx.load_model_from_string(file).graph.node]
    assert sorted(nodes) == (["Gemm", "Transpose"] if whole else ["Gemm"])
    found = open_onnx(file)({name: one.numpy() for name, one in zip(names, given, strict=True)})
    for one, expected in zip(found, layer(*given), strict=True):
        np.testing.assert_allclose(one, expected.numpy(), rtol=1e-6)


class TwoRanges(nn.Module):
    """[batch, 4] -> [batch, 4]: one value kept within several ranges."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        return x.clamp(-0.1, 0.7) + x.clamp(-0.2, 0.9) + y.clamp(0.1, 0.5).clamp(0.2, 0.4) + y.clamp(0.3, 0.6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_may_be_clamped_twice(dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4)
    file = to_onnx(torch.export.export(TwoRanges(), (x,)), ["x"], ["out"])
    (out,) = open_onnx(file)({"x": x.numpy()})
    np.testing.assert_allclose(out, TwoRanges()(x).numpy(), rtol=1e-6)


class KernelsOfEachSample(nn.Module):
    """A convolution with a group, and a kernel, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.head = nn.Linear(6, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        samples = x.shape[0]
        kernels = self.kernel(x).reshape(samples, 1, 2)
        return self.head(F.conv1d(x.reshape(1, samples, 6), kernels, stride=4, groups=samples)[0])  # type: ignore[no-any-return]


def test_a_convolution_with_a_group_for_each_sample_has_files_of_one_batch_size_but_for_torch() -> None:
    made = compile_program(KernelsOfEachSample(), (6,), engines=("onnx",), batch=4)
    assert made.program.batch == {"onnx": 4}
    assert compile_program(KernelsOfEachSample(), (6,), engines=("pt2",)).program.batch == {"pt2": "any"}
