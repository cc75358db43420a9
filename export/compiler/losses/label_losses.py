"""Torch's losses in operators that every runtime has: labels are compared, and pick nothing by index.

The formulas are those of torch's documentation of cross_entropy, nll_loss and GaussianNLLLoss. Targets that are
probabilities stay torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

F = nn.functional
CROSS_ENTROPY = F.cross_entropy


def cross_entropy(  # noqa: PLR0913, PLR0917 - the arguments of torch's function
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """See torch.nn.functional.cross_entropy; the classes are axis 1, or the only one."""
    if target.is_floating_point():
        return CROSS_ENTROPY(scores, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    logs = torch.log_softmax(scores, _axis(scores))
    return nll_loss(logs, target, weight, None, ignore_index, None, reduction, label_smoothing=label_smoothing)


def nll_loss(  # noqa: PLR0913, PLR0917 - the arguments of torch's function
    logs: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: ARG001, FBT001 - torch's old word for reduction
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: ARG001, FBT001
    reduction: str = "mean",
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """See torch.nn.functional.nll_loss."""
    axis = _axis(logs)
    beside = [-1 if d == axis else 1 for d in range(logs.dim())]
    counted = (target != ignore_index).to(logs.dtype)
    classes = torch.arange(logs.shape[axis], dtype=target.dtype, device=target.device).reshape(beside)
    chosen = (target.unsqueeze(axis) == classes) & (target != ignore_index).unsqueeze(axis)
    spread = logs if weight is None else logs * weight.reshape(beside)
    each = -torch.where(chosen, spread, 0).sum(axis)  # a product would make NaN of a class that a mask excludes
    if label_smoothing > 0:
        each = (1 - label_smoothing) * each - label_smoothing / logs.shape[axis] * spread.sum(axis) * counted
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    return each.sum() / (counted.sum() if weight is None else (chosen.to(logs.dtype) * weight.reshape(beside)).sum())


def gaussian_nll_loss(
    mean: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,  # noqa: FBT001, FBT002
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """See torch.nn.functional.gaussian_nll_loss, which looks whether a variance is negative."""
    var = var if isinstance(var, Tensor) else torch.full_like(mean, var)
    if var.dim() == mean.dim() - 1 and mean.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()  # torch's own gradient does not see the bound
    each = 0.5 * (torch.log(var) + (mean - target).square() / var) + (0.5 * math.log(2 * math.pi) if full else 0)
    return each if reduction == "none" else each.sum() if reduction == "sum" else each.mean()


def _axis(scores: Tensor) -> int:
    return 1 if scores.dim() > 1 else 0


LOSS_OVERRIDES: Mapping[Any, Callable[..., Tensor]] = {
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.gaussian_nll_loss: gaussian_nll_loss,
}
