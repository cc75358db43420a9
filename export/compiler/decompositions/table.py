"""The decomposition table for make_fx: operator -> Python function over tensors of any float dtype.

Backward operators become forward operators that every runtime has. The formulas are torch's own where those stay within
supported_ops.py, and the functions of this package elsewhere.
"""

# ruff: noqa: SLF001 - torch writes several public operators with a leading underscore

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from math import copysign as copied_sign
from math import inf, log, pi, sqrt
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

from export.compiler.decompositions.convolutions import (
    convolution,
    convolution_backward,
    convolution_backward_for_torch,
    convolution_in_step,
)
from export.compiler.decompositions.indexing import INDEXING_DECOMPOSITIONS as INDEXING
from export.compiler.decompositions.matrices import AXIS_DECOMPOSITIONS as AXES
from export.compiler.decompositions.norms import (
    batch_norm_backward,
    batch_norm_backward_for_torch,
    batch_norm_inference,
    batch_norm_training,
    batch_norm_training_for_torch,
    group_norm,
    group_norm_backward,
    var,
    var_mean,
    vector_norm,
)
from export.compiler.decompositions.picks import PICK_DECOMPOSITIONS as PICKS
from export.compiler.decompositions.picks import bucketize
from export.compiler.decompositions.pools import POOL_DECOMPOSITIONS as POOLS
from export.compiler.decompositions.special_functions import ANGLE_DECOMPOSITIONS as ANGLES
from export.compiler.decompositions.special_functions import ERROR_DECOMPOSITIONS as ERRORS
from export.compiler.decompositions.special_functions import GAMMA_DECOMPOSITIONS as GAMMAS
from export.compiler.decompositions.supported_ops import TORCH_ALONE, UnsupportedOperator

aten = torch.ops.aten
Decomposition = Callable[..., Any]

# Operators with a formula of torch that core_aten_decompositions leaves out.
FROM_TORCH = (
    aten._log_softmax_backward_data,
    aten._softmax_backward_data,
    aten.elu_backward,
    aten.hardsigmoid_backward,
    aten.hardswish_backward,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.sigmoid_backward,
    aten.silu_backward,
    aten.softplus_backward,
    aten.tanh_backward,
)

TANH_GELU_BACKWARD = get_decompositions([aten.gelu_backward])[aten.gelu_backward.default]


def zeros(size: Sequence[int], *_: object, dtype: torch.dtype | None = None, **__: object) -> Tensor:
    """Zeros [*size] in place of uninitialised memory, which a graph cannot express."""
    return torch.zeros(list(size), dtype=dtype)


def new_zeros(
    x: Tensor, size: Sequence[int], _stride: object, *, dtype: torch.dtype | None = None, **_: object
) -> Tensor:
    """See `zeros`."""
    return torch.zeros(list(size), dtype=dtype or x.dtype)


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """As a product: every runtime multiplies much faster than it computes the `where` of torch's formula."""
    return grad * (x > threshold).to(grad.dtype)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Multiply x by the standard normal's CDF at x, which the gradient uses again; `tanh` stays torch's."""
    return x * _below(x) if approximate == "none" else NotImplemented


def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """The gradient of `gelu`: grad times (CDF(x) + x PDF(x))."""
    if approximate != "none":
        return cast("Tensor", TANH_GELU_BACKWARD(grad, x, approximate=approximate))
    return grad * (_below(x) + x * (torch.exp(x * x * -0.5) * (1 / sqrt(2 * pi))))


def _below(x: Tensor) -> Tensor:
    """The CDF of the standard normal distribution at x."""
    return torch.erf(x * sqrt(0.5)) * 0.5 + 0.5


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1, as no runtime has expm1; near zero the absolute error is the rounding of 1."""
    return torch.exp(x) - 1


def exp2(x: Tensor) -> Tensor:
    """Two to the power of x; exp(x log 2) would lose digits as x grows."""
    return torch.pow(2.0, x)


def add(x: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """With a factor alpha, as a product; exporters round alpha itself to float32."""
    return NotImplemented if alpha == 1 else x + other * alpha


def sub(x: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """See `add`."""
    return NotImplemented if alpha == 1 else x - other * alpha


def eye(rows: int, columns: int | None = None, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    """Ones on the diagonal. torch's own counts in bytes, which LiteRT cannot."""
    places = torch.arange(rows if columns is None else columns)
    return (torch.arange(rows).unsqueeze(1) == places).to(dtype or torch.get_default_dtype())


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Without the empty vectors that torch skips, as a cache of attention begins with one."""
    kept = [x for x in tensors if x.dim() != 1 or x.shape[0] != 0]
    return torch.cat(kept, dim) if 0 < len(kept) < len(tensors) else NotImplemented


def mul_by_number(x: Tensor, factor: float) -> Tensor:
    """The scale of attention, as the product that every exporter converts."""
    return x * factor


def trunc(x: Tensor) -> Tensor:
    """Towards zero."""
    return torch.sign(x) * torch.floor(torch.abs(x))


def fmod(x: Tensor, by: Tensor | float) -> Tensor:
    """The remainder with the sign of x; whole numbers are divided in floats, exact up to 2^24."""
    if not x.dtype.is_floating_point:
        return fmod(x.to(torch.float32), by).to(torch.result_type(x, by))
    return x - trunc(x / by) * by


def remainder(x: Tensor, by: Tensor | float) -> Tensor:
    """The remainder with the sign of the divisor; see `fmod`."""
    if not x.dtype.is_floating_point:
        return remainder(x.to(torch.float32), by).to(torch.result_type(x, by))
    return x - torch.floor(x / by) * by


def log10(x: Tensor) -> Tensor:
    """The logarithm with base 10, of decibels."""
    return torch.log(x) * (1 / log(10))


def log2(x: Tensor) -> Tensor:
    """The logarithm with base 2."""
    return torch.log(x) * (1 / log(2))


def tan(x: Tensor) -> Tensor:
    """The sine over the cosine."""
    return torch.sin(x) / torch.cos(x)


def clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """With bounds of one kind: torch's ONNX exporter takes no whole number beside another one."""
    mixed = low is not None and high is not None and isinstance(low, float) is not isinstance(high, float)
    return torch.clamp(x, float(low), float(high)) if mixed else NotImplemented  # type: ignore[arg-type]


def sinh(x: Tensor) -> Tensor:
    """Near zero the absolute error is the rounding of 1."""
    return (torch.exp(x) - torch.exp(-x)) * 0.5


def cosh(x: Tensor) -> Tensor:
    """The mean of exp(x) and exp(-x)."""
    return (torch.exp(x) + torch.exp(-x)) * 0.5


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """The length of (x, y), by the longer side, whose square may be beyond all floats."""
    longer = torch.maximum(torch.abs(x), torch.abs(y))
    by = torch.where((longer == 0) | (longer == inf), torch.ones_like(longer), longer)
    return longer * torch.sqrt((x / by) ** 2 + (y / by) ** 2)


def fmax(x: Tensor, y: Tensor) -> Tensor:
    """The larger one, or the one that is not NaN."""
    x, y = torch.broadcast_tensors(x, y)  # type: ignore[no-untyped-call]
    return torch.where((x >= y) | torch.ne(y, y), x, y)


def fmin(x: Tensor, y: Tensor) -> Tensor:
    """See `fmax`."""
    return -fmax(-x, -y)


def copysign(x: Tensor, sign: Tensor | float) -> Tensor:
    """The size of x with another sign; that of -0.0 is negative, too."""
    if not isinstance(sign, Tensor):
        return torch.abs(x) * copied_sign(1, sign)
    return torch.abs(x) * (1 - 2 * signbit(sign).to(x.dtype))


def signbit(x: Tensor) -> Tensor:
    """Whether a number is negative; -0.0 is."""
    return (x < 0) | (torch.reciprocal(x) < 0) if x.dtype.is_floating_point else x < 0


def xor(x: Tensor, y: Tensor) -> Tensor:
    """Of booleans alone: whether they differ."""
    return torch.ne(x, y) if x.dtype == y.dtype == torch.bool else NotImplemented


def logical_xor(x: Tensor, y: Tensor) -> Tensor:
    """Whether one of the two is 0 and the other not."""
    return torch.ne(x != 0, y != 0)


def any_of(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's own signature
    """Whether one of the values is not 0, along the axes or of all."""
    axes = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return (x != 0).to(torch.float32).amax(axes, keepdim) > 0


def isnan(x: Tensor) -> Tensor:
    """NaN alone differs from itself."""
    return torch.ne(x, x)


def isinf(x: Tensor) -> Tensor:
    """Plus or minus infinity, which no whole number is."""
    return torch.abs(x) == inf if x.dtype.is_floating_point else torch.zeros_like(x, dtype=torch.bool)


def addcmul(x: Tensor, first: Tensor, second: Tensor, *, value: float = 1) -> Tensor:
    """The sum x + value * first * second, without a product with 1 or -1."""
    product = first * second
    if value in (1, -1):
        return x + product if value == 1 else x - product
    return x + product * value


def searchsorted(
    bounds: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """`bucketize` of x [..., m] by `bounds` [n] or [..., n]. Raises UnsupportedOperator for a `sorter`."""
    if sorter is not None:
        raise UnsupportedOperator("searchsorted", "a sorter is not covered; give the bounds in their order")
    rows = bounds if bounds.dim() == 1 else bounds.unsqueeze(-2)
    return bucketize(x, rows, out_int32=out_int32, right=right or side == "right")


def nothing(*_: object, **__: object) -> None:
    """A check of torch's own that no graph needs."""


def trilinear(  # noqa: PLR0913, PLR0917 - torch's own signature
    first: Tensor,
    second: Tensor,
    third: Tensor,
    new_in_first: Sequence[int],
    new_in_second: Sequence[int],
    new_in_third: Sequence[int],
    summed: Sequence[int],
    _unroll: int = 1,
) -> Tensor:
    """nn.Bilinear and its gradients: the product of three tensors after new axes in each, summed over some axes."""
    parts = []
    for part, axes in ((first, new_in_first), (second, new_in_second), (third, new_in_third)):
        parts.append(reduce(torch.unsqueeze, axes, part))
    return (parts[0] * parts[1] * parts[2]).sum(list(summed))


OWN_DECOMPOSITIONS: Mapping[Any, Decomposition] = {
    **ANGLES,
    **AXES,
    **ERRORS,
    **GAMMAS,
    **PICKS,
    **POOLS,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten._native_batch_norm_legit_functional.default: batch_norm_training,
    aten._native_batch_norm_legit_no_training.default: batch_norm_inference,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.add.Tensor: add,
    aten.sub.Tensor: sub,
    aten.addcmul.default: addcmul,
    aten.cat.default: cat,
    aten.clamp.default: clamp,
    aten.eye.default: eye,
    aten.eye.m: eye,
    aten.mul.Scalar: mul_by_number,
    aten.gelu.default: gelu,
    aten.gelu_backward.default: gelu_backward,
    aten.threshold_backward.default: threshold_backward,
    aten.var.correction: var,
    aten.var_mean.correction: var_mean,
    aten.linalg_vector_norm.default: vector_norm,
    aten.searchsorted.Tensor: searchsorted,
    aten.trunc.default: trunc,
    aten.fmod.Tensor: fmod,
    aten.fmod.Scalar: fmod,
    aten.remainder.Tensor: remainder,
    aten.remainder.Scalar: remainder,
    aten._assert_tensor_metadata.default: nothing,
    aten._trilinear.default: trilinear,
    aten.expm1.default: expm1,
    aten.exp2.default: exp2,
    aten.empty.memory_format: zeros,
    aten.empty_permuted.default: zeros,
    aten.empty_strided.default: zeros,
    aten.new_empty_strided.default: new_zeros,
    aten.isnan.default: isnan,
    aten.isinf.default: isinf,
    aten.log10.default: log10,
    aten.log2.default: log2,
    aten.tan.default: tan,
    aten.sinh.default: sinh,
    aten.cosh.default: cosh,
    aten.hypot.default: hypot,
    aten.fmax.default: fmax,
    aten.fmin.default: fmin,
    aten.copysign.Tensor: copysign,
    aten.copysign.Scalar: copysign,
    aten.signbit.default: signbit,
    aten.bitwise_xor.Tensor: xor,
    aten.logical_xor.default: logical_xor,
    aten.any.default: any_of,
    aten.any.dim: any_of,
    aten.any.dims: any_of,
}


FOR_TORCH: Mapping[Any, Decomposition] = {
    aten.convolution_backward.default: convolution_backward_for_torch,
    aten._native_batch_norm_legit_functional.default: batch_norm_training_for_torch,
    aten.native_batch_norm_backward.default: batch_norm_backward_for_torch,
}


@cache  # torch takes a fifth of a second to list its own
def decompositions_for(function: str, *, for_torch: bool = False) -> Mapping[Any, Decomposition]:
    """The decompositions for one function of a program; those of this package take precedence over torch's.

    `for_torch`: a step that torch alone runs keeps TORCH_ALONE.
    """
    whole = {**core_aten_decompositions(), **get_decompositions(list(FROM_TORCH)), **OWN_DECOMPOSITIONS, **INDEXING}
    if function != "step":
        return whole
    if for_torch:
        kept = {op: how for op, how in whole.items() if str(op.overloadpacket) not in TORCH_ALONE}
        return {**kept, **FOR_TORCH}
    return whole | {aten.convolution.default: convolution_in_step}
