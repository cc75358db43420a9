"""Torch's losses of class labels in operators that every runtime has: labels are compared, and pick nothing by index.

The formulas are those of torch's documentation of cross_entropy and nll_loss. Targets that are probabilities stay
torch's own.
"""

from __future__ import annotations

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


def _axis(scores: Tensor) -> int:
    return 1 if scores.dim() > 1 else 0


LOSS_OVERRIDES = {F.cross_entropy: cross_entropy, F.nll_loss: nll_loss}
