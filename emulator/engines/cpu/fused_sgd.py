"""The SGD update on flat buffers: one pass with torch's fused kernel, or plain operators where torch has none.

With g = gradient + decay w: velocity' = momentum velocity + g, and w' = w - lr velocity'.
"""

from __future__ import annotations

import torch
from torch import Tensor

# private, so tests compare it with `plain_sgd_step` for the pinned torch
FUSED_SGD = getattr(torch, "_fused_sgd_", None)


def sgd_step(w: Tensor, gradient: Tensor, velocity: Tensor, *, lr: float, momentum: float, decay: float) -> None:
    """Update `w` and `velocity`, all [n], in place; without momentum `velocity` is not used."""
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
    """The same in public operators of torch; overwrites `gradient`."""
    if decay:
        gradient.add_(w, alpha=decay)
    if momentum:
        gradient = velocity.mul_(momentum).add_(gradient)
    w.sub_(gradient, alpha=lr)
