"""The end of a step on flat buffers: one pass over the numbers with torch's fused kernel, plain operators without it.

With g = gradient + decay w: velocity' = momentum velocity + g, and w' = w - lr velocity'.
"""

from __future__ import annotations

import torch
from torch import Tensor

FUSED_SGD = getattr(
    torch, "_fused_sgd_", None
)  # private, so tests compare it with `plain_sgd_step` for the pinned torch


def sgd_step(w: Tensor, gradient: Tensor, velocity: Tensor, *, lr: float, momentum: float, decay: float) -> None:
    """Move `w` and `velocity`, all [n]; without momentum `velocity` is not used."""
    if FUSED_SGD is None:
        plain_sgd_step(w, gradient, velocity, lr=lr, momentum=momentum, decay=decay)
        return
    FUSED_SGD(
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


def plain_sgd_step(w: Tensor, gradient: Tensor, velocity: Tensor, *, lr: float, momentum: float, decay: float) -> None:
    """The same in operators that torch promises to keep; `gradient` is used up."""
    if decay:
        gradient.add_(w, alpha=decay)
    if momentum:
        gradient = velocity.mul_(momentum).add_(gradient)
    w.sub_(gradient, alpha=lr)
