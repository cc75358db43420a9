"""Batch norm and group norm, forward and backward, written out. Layout [batch, channels, *size].

The batch may be symbolic; every other size is a plain number. Runtimes know batch norm in inference mode only, and
torch's own formulas reach for strides, which graphs do not have.
"""

# ruff: noqa: PLR0913, PLR0917, FBT001 - the functions of a decomposition table have torch's own signatures

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from export.operators import Unsupported


def var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Two passes, as torch does it: the mean of squares minus the squared mean would cancel."""
    dims = list(range(x.dim())) if dim is None else [d % x.dim() for d in dim]
    mean = x.mean(dims, keepdim=True)
    count = 1
    for d in dims:
        count = count * x.shape[d]
    total = ((x - mean) ** 2).sum(dims, keepdim=keepdim)
    var = total / (count - (1 if correction is None else correction))
    return var, mean if keepdim else x.mean(dims)


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
    """Biased variance to normalise, unbiased into the running estimate.

    -> (out, mean, 1 / std, new running mean, new running variance)
    """
    if not training:
        out, mean, rstd = batch_norm_inference(x, weight, bias, running_mean, running_var, momentum, eps)
        return out, mean, rstd, running_mean, running_var
    dims, count = _all_but_channel(x)
    var, mean = var_mean(x, dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    out = _affine((x - mean) * rstd, weight, bias)
    mean, rstd, var = (t.reshape(-1) for t in (mean, rstd, var))
    unbiased = var * (count / (count - 1))
    return (
        out,
        mean,
        rstd,
        momentum * mean + (1 - momentum) * running_mean,
        momentum * unbiased + (1 - momentum) * running_var,
    )


def batch_norm_inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    _momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """With the running statistics. -> (out, nothing, nothing)."""
    rstd = torch.rsqrt(_channel(running_var, x) + eps)
    out = _affine((x - _channel(running_mean, x)) * rstd, weight, bias)
    return out, x.new_zeros([0]), x.new_zeros([0])


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    _running_mean: Tensor | None,
    _running_var: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    train: bool,
    _eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Through the batch's own statistics; gradients of x, weight and bias as far as they are asked."""
    if not train or mean is None or rstd is None:
        raise Unsupported("native_batch_norm_backward", "training through frozen batch norm statistics is not covered")
    dims, _count = _all_but_channel(x)
    scale = _channel(rstd, x)
    unit = (x - _channel(mean, x)) * scale
    pull = grad if weight is None else grad * _channel(weight, x)
    return (
        _through_norm(pull, unit, scale, dims) if output_mask[0] else None,
        (grad * unit).sum(dims) if output_mask[1] else None,
        grad.sum(dims) if output_mask[2] else None,
    )


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, _c: int, _hw: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (out, mean [batch, groups], 1 / std [batch, groups])."""
    grouped = x.reshape(n, groups, -1)
    var, mean = var_mean(grouped, [2], correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    out = _affine(((grouped - mean) * rstd).reshape(x.shape), weight, bias)
    return out, mean.reshape(n, groups), rstd.reshape(n, groups)


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    _c: int,
    _hw: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias as far as they are asked."""
    scale = rstd.reshape(n, groups, 1)
    unit = (x.reshape(n, groups, -1) - mean.reshape(n, groups, 1)) * scale
    pull = (grad if weight is None else grad * _channel(weight, x)).reshape(n, groups, -1)
    dims, _count = _all_but_channel(x)
    return (
        _through_norm(pull, unit, scale, [2]).reshape(x.shape) if output_mask[0] else None,
        (grad * unit.reshape(x.shape)).sum(dims) if output_mask[1] else None,
        grad.sum(dims) if output_mask[2] else None,
    )


def _through_norm(pull: Tensor, unit: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    """Gradient of (x - mean) / std over `dims`, given the gradient `pull` of its result `unit`."""
    along = (pull * unit).mean(dims, keepdim=True)
    return rstd * (pull - pull.mean(dims, keepdim=True) - unit * along)


def _all_but_channel(x: Tensor) -> tuple[list[int], int]:
    """The dimensions that batch norm averages over, and how many values that is per channel."""
    dims = [0, *range(2, x.dim())]
    count = 1
    for d in dims:
        count = count * x.shape[d]
    return dims, count


def _channel(values: Tensor, x: Tensor) -> Tensor:
    """[channels] -> [1, channels, 1, ...], to meet x."""
    return values.reshape([1, -1, *[1] * (x.dim() - 2)])


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * _channel(weight, x)
    return x if bias is None else x + _channel(bias, x)
