"""Norms in elementary operators: batch and group norm, forward and backward, [batch, channels, *size]; and of vectors.

The batch may be symbolic; every other size is a plain number. Runtimes have batch norm in inference mode only, and
torch's own formulas read strides, which graphs do not have.
"""

# ruff: noqa: PLR0913, PLR0917, FBT001, FBT002 - the functions of a decomposition table have torch's own signatures

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from export.compiler.decompositions.supported_ops import UnsupportedOperator


def var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean in two passes, as in torch: the mean of squares minus the squared mean loses digits."""
    dims = [d % x.dim() for d in dim] if dim else list(range(x.dim()))
    mean = x.mean(dims, keepdim=True)
    count = math.prod(x.shape[d] for d in dims)
    centred = x - mean
    total = (centred * centred).sum(dims, keepdim=keepdim)
    var = total / (count - (1 if correction is None else correction))
    return var, mean if keepdim else mean.squeeze(dims)


def var(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    """See `var_mean`."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def vector_norm(
    x: Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(sum |x|^order)^(1 / order); the largest or smallest |x| at plus or minus infinity; how many are not 0 at 0.

    Torch's gradient of a norm tests for a norm of 0, and is 0 there.
    """
    x = x if dtype is None else x.to(dtype)
    dims = list(range(x.dim())) if dim is None else list(dim)
    if order == 2:  # noqa: PLR2004 - the Euclidean norm
        return (x * x).sum(dims, keepdim=keepdim).sqrt()
    if order == 0:
        return (x != 0).to(x.dtype).sum(dims, keepdim=keepdim)
    if math.isinf(order):
        return x.abs().amax(dims, keepdim=keepdim) if order > 0 else x.abs().amin(dims, keepdim=keepdim)
    powers = x.abs() if order == 1 else x.abs().pow(order)
    total = powers.sum(dims, keepdim=keepdim)
    return total if order == 1 else total.pow(1 / order)


def batch_norm_training(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalise by the biased variance; the running estimate takes the unbiased one.

    One value per channel, as of a pass's last batch, tells nothing of a variance: it leaves the running statistics as
    they are. (torch refuses such a batch; export/one_value_norm.py lets it do the same.)
    -> (out, mean, 1 / std, new running mean, new running variance)
    """
    if not training:
        out, mean, rstd = batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps)
        return out, mean, rstd, running_mean, running_var
    dims, count = _all_but_channel(x)
    var, mean = var_mean(x, dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    # Runtimes compute x - mean once, here and in var_mean. x * scale + shift would also round x * scale.
    out = _affine(x - mean, rstd if weight is None else rstd * _channel(weight, x), bias)
    mean, rstd, var = (t.reshape(-1) for t in (mean, rstd, var))
    if isinstance(count, int) and count == 1:
        return out, mean, rstd, running_mean.clone(), running_var.clone()
    unbiased = var * count / (count - 1)  # a quotient of sizes would be float32 in ONNX
    new_mean = momentum * mean + (1 - momentum) * running_mean
    new_var = momentum * unbiased + (1 - momentum) * running_var
    if not isinstance(count, int) and math.prod(x.shape[2:]) == 1:
        several = torch.scalar_tensor(count, dtype=x.dtype) > 1
        new_mean, new_var = torch.where(several, new_mean, running_mean), torch.where(several, new_var, running_var)
    return out, mean, rstd, new_mean, new_var


def batch_norm_training_for_torch(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # noqa: ANN401
    """Torch's own, but where a batch of one sample has one value per channel."""
    return batch_norm_training(x, *args) if math.prod(x.shape[2:]) == 1 else NotImplemented


def batch_norm_backward_for_torch(
    grad: Tensor,
    x: Tensor,
    *args: Any,  # noqa: ANN401
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """See `batch_norm_training_for_torch`."""
    return batch_norm_backward(grad, x, *args) if math.prod(x.shape[2:]) == 1 else NotImplemented


def batch_norm_inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    _momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise by the running statistics. -> (out, empty, empty)."""
    rstd = torch.rsqrt(_channel(running_var, x) + eps)
    scale = rstd if weight is None else rstd * _channel(weight, x)
    out = _affine(x - _channel(running_mean, x), scale, bias)
    return out, x.new_zeros([0]), x.new_zeros([0])


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias through the batch's own statistics; None for each that `output_mask` leaves out.

    Frozen statistics (`train` false) are numbers, through which no gradient flows.
    """
    frozen = not train
    if frozen:
        mean, rstd = running_mean, None if running_var is None else torch.rsqrt(running_var + eps)
    if mean is None or rstd is None:
        raise UnsupportedOperator("native_batch_norm_backward", "it has no statistics to normalise by")
    dims, count = _all_but_channel(x)
    scale = _channel(rstd, x)
    centred = x - _channel(mean, x)
    total = grad.sum(dims, keepdim=True)
    along = (grad * centred).sum(dims, keepdim=True)
    pull = grad if frozen else grad - (centred * (along * scale * scale / count) + total / count)
    factor = scale if weight is None else scale * _channel(weight, x)
    return (
        pull * factor if output_mask[0] else None,
        (along * scale).reshape(-1) if output_mask[1] else None,
        total.reshape(-1) if output_mask[2] else None,
    )


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, _hw: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (out, mean [batch, groups], 1 / std [batch, groups])."""
    grouped = x.reshape([n, groups, -1])
    var, mean = var_mean(grouped, [2], correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    per_channel = [n, c, *[1] * (x.dim() - 2)]
    scale = rstd if weight is None else rstd * weight.reshape([1, groups, c // groups])
    scale = scale.expand([n, groups, c // groups]).reshape(per_channel)
    out = _affine((grouped - mean).reshape(x.shape), scale, bias)
    return out, mean.reshape([n, groups]), rstd.reshape([n, groups])


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias; None for each that `output_mask` leaves out."""
    rstd, mean = (t.reshape([n, groups, 1, 1]) for t in (rstd, mean))
    grouped = [n, groups, c // groups, hw]
    given, centred = grad.reshape(grouped), x.reshape(grouped) - mean
    total, along = given.sum([3], keepdim=True), (given * centred).sum([3], keepdim=True)  # per sample and channel
    factor = torch.ones_like(total) if weight is None else weight.reshape([1, groups, c // groups, 1])
    count = c // groups * hw
    shift = (total * factor).sum([2], keepdim=True) * rstd / count
    slope = (along * factor).sum([2], keepdim=True) * rstd * rstd * rstd / count
    out = given * (factor * rstd) - centred * slope - shift
    return (
        out.reshape(x.shape) if output_mask[0] else None,
        (along * rstd).sum([0]).reshape(-1) if output_mask[1] else None,
        total.sum([0]).reshape(-1) if output_mask[2] else None,
    )


def _all_but_channel(x: Tensor) -> tuple[list[int], int]:
    """The dimensions that batch norm averages over, and the number of values per channel."""
    dims = [0, *range(2, x.dim())]
    return dims, math.prod(x.shape[d] for d in dims)


def _channel(values: Tensor, x: Tensor) -> Tensor:
    """[channels] -> [1, channels, 1, ...], to meet x."""
    return values.reshape([1, -1, *[1] * (x.dim() - 2)])


def _affine(x: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    x = x * scale
    return x if bias is None else x + _channel(bias, x)
