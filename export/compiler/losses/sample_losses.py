"""The loss of each sample [batch], from outputs [batch, *target] and the port y of a training program."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edge_client.errors import ProgramRefused
from edge_client.protocol.program import IGNORED, Loss

LossFunction = Callable[[Tensor, Tensor], Tensor]  # outputs [batch, ...] and y of a batch -> one per sample
POSITION_LOSSES = ("token-cross-entropy", "pixel-cross-entropy")


def own_losses(loss: LossFunction, out: Tensor, y: Tensor, *, labels: bool) -> Tensor:
    """[batch]: the user's loss of outputs [batch, *target] and the port y, which holds `labels` that it reads as int64.

    Raises ProgramRefused where the function does not give one number per sample.
    """
    found = loss(out.clone(), y.to(torch.int64) if labels else y.clone())  # it may write into them
    if not isinstance(found, Tensor) or found.dim() != 1 or not found.is_floating_point():
        told = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ProgramRefused(
            f"loss {loss_name(loss)} gives {told}, expected one floating point number per sample: [batch]",
            hint='return the mean of each sample: reduction="none", then .flatten(1).mean(1)',
        )
    return found


def loss_name(loss: LossFunction) -> str:
    """How messages call a loss of the user's: its function's name, or its class's."""
    return getattr(loss, "__name__", type(loss).__name__)


def per_sample_loss(loss: Loss, out: Tensor, y: Tensor) -> Tensor:
    """[batch]: cross-entropy against probabilities or labels, or the squared error's mean over a sample's targets."""
    if loss == "cross-entropy":
        logs = torch.log_softmax(out, -1)
        return -(y * torch.where(y != 0, logs, 0)).sum(-1)  # a class that a mask excludes has minus infinity
    if loss in POSITION_LOSSES:
        return _position_loss(out, y, 1 if loss == "pixel-cross-entropy" else out.dim() - 1)
    return ((out - y) ** 2).flatten(1).mean(1)


def _position_loss(out: Tensor, y: Tensor, axis: int) -> Tensor:
    """[batch] mean cross-entropy over a sample's counted positions, 0 where it has none; y holds labels as numbers.

    A label is compared with the numbers of the classes: a device sends no one-hot row for each position, and one that
    is IGNORED equals none of them.
    """
    classes = torch.arange(out.shape[axis], dtype=y.dtype, device=y.device)
    classes = classes.reshape([-1 if d == axis else 1 for d in range(out.dim())])
    each = -torch.where(y.unsqueeze(axis) == classes, torch.log_softmax(out, axis), 0).sum(axis)
    counted = (y != IGNORED).to(out.dtype)
    return each.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp_min(1)
