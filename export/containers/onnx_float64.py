"""Translations into ONNX that keep a number in its tensor's own type, for `torch.onnx.export`.

Torch's own translations round numbers to float32: in attributes, which ONNX has in float32 only, and in constants
beside operators that take any type. A float64 program would be 1e-8 off. And a translation that torch lacks.
"""

# ruff: noqa: ANN401 - onnxscript's values have no type of their own; what is not one is a plain number

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

ONNX_FLOAT64 = 11  # ONNX's code of float64
ONNX_INT64 = 7


def onnx_translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Operator -> translation."""
    aten = torch.ops.aten
    return {
        aten.scalar_tensor.default: scalar,
        aten.full.default: full,
        aten.full_like.default: full_like,
        aten.hardsigmoid.default: hardsigmoid,
        aten.hardtanh.default: hardtanh,
        aten.leaky_relu.default: leaky_relu,
        aten.elu.default: elu,
        aten.pow.Scalar: power_of_number,
        aten.squeeze.dims: squeeze_dims,
    }


def scalar(value: Any, dtype: int = 1, **_: object) -> Any:
    """A number, or a size that is only known at run time, as a tensor of `dtype` (ONNX's code)."""
    import onnx
    from onnxscript import opset18

    if not isinstance(value, int | float):
        return opset18.Cast(value, to=dtype)
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    return opset18.Constant(value=onnx.numpy_helper.from_array(np.array(value, dtype=kind)))


def full(size: Any, value: Any, dtype: int = 1, **_: object) -> Any:
    """A tensor filled with one number; some of `size` may only be known at run time."""
    from onnxscript import opset18

    shape: Any = opset18.Cast(size, to=ONNX_INT64)
    return opset18.Expand(scalar(value, dtype), shape)


def full_like(x: Any, value: Any, dtype: int = -1, **_: object) -> Any:
    """A tensor like x filled with one number, of `dtype` if that is given."""
    from onnxscript import opset18

    return opset18.Expand(scalar(value, x.dtype if dtype == -1 else dtype), opset18.Shape(x))


def hardsigmoid(x: Any) -> Any:
    """min(1, max(0, x / 6 + 1 / 2)); ONNX's own where its attribute is exact enough."""
    from onnxscript import opset18

    if x.dtype != ONNX_FLOAT64:
        return opset18.HardSigmoid(x, alpha=1 / 6, beta=1 / 2)
    line = opset18.Add(opset18.Div(x, scalar(6, x.dtype)), scalar(0.5, x.dtype))
    return opset18.Clip(line, scalar(0, x.dtype), scalar(1, x.dtype))


def hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """min(high, max(low, x))."""
    from onnxscript import opset18

    return opset18.Clip(x, scalar(low, x.dtype), scalar(high, x.dtype))


def leaky_relu(x: Any, slope: float = 0.01) -> Any:
    """Leaky ReLU: x above zero, slope x below; ONNX's own where its attribute is exact enough."""
    from onnxscript import opset18

    if x.dtype != ONNX_FLOAT64:
        return opset18.LeakyRelu(x, alpha=slope)
    return opset18.Where(opset18.Greater(x, scalar(0, x.dtype)), x, opset18.Mul(x, scalar(slope, x.dtype)))


def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """ELU, SELU and CELU: scale x above zero, scale alpha (exp(input_scale x) - 1) below."""
    from onnxscript import opset18

    if alpha == scale == input_scale == 1:
        return opset18.Elu(x)
    below = opset18.Elu(opset18.Mul(x, scalar(input_scale, x.dtype)))
    below = opset18.Mul(below, scalar(alpha * scale, x.dtype))
    above = opset18.Mul(x, scalar(scale, x.dtype))
    return opset18.Where(opset18.Greater(x, scalar(0, x.dtype)), above, below)


def power_of_number(base: float, exponent: Any) -> Any:
    """A plain number to the power of a tensor."""
    from onnxscript import opset18

    return opset18.Pow(scalar(base, exponent.dtype), exponent)


def squeeze_dims(x: Any, dims: Sequence[int]) -> Any:
    """Without those of `dims` that have one place. For want of this torch would trace the whole graph again."""
    from onnxscript import opset18

    axes = [dim for dim in dims if x.shape[dim] == 1]
    return opset18.Squeeze(x, axes) if axes else opset18.Identity(x)
