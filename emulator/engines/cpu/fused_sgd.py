"""The end of a step on flat buffers: one pass over the numbers with torch's fused kernel, plain operators without it.

With g = gradient + decay w: velocity' = momentum velocity + g, and w' = w - lr velocity'.
"""

from __future__ import annotations

import torch
from torch import Tensor

FUSED = getattr(torch, "_fused_sgd_", None)  # private, so tests compare it with `plain` for the pinned torch


def descend(w: Tensor, gradient: Tensor, velocity: Tensor, *, lr: float, momentum: float, decay: float) -> None:
    """Move `w` and `velocity`, all [n]; without momentum `velocity` is not used."""
    if FUSED is None:
        plain(w, gradient, velocity, lr=lr, momentum=momentum, decay=decay)
        return
    FUSED(
        [w],
        [gradient],
        [velocity] if momentum else [],
        weight_decay=decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def plain(w: Tensor, gradient: Tensor, velocity: Tensor, *, lr: float, momentum: float, decay: float) -> None:
    """The same in operators that torch promises to keep; `gradient` is used up."""
    if decay:
        gradient.add_(w, alpha=decay)
    if momentum:
        gradient = velocity.mul_(momentum).add_(gradient)
    w.sub_(gradient, alpha=lr)
