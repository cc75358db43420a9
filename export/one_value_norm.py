"""Torch's batch norm of one value per channel, as of a pass's last batch, which torch itself refuses.

Programs take it (export/compiler/decompositions/norms.py), so what is compared with them and emulates them does, too.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from export.own_thread import replaced_here

BATCH_NORM = torch.nn.functional.batch_norm


def batch_norm_of_one_value() -> AbstractContextManager[None]:
    """Let torch's own batch norm take one value per channel in this thread, as programs do."""
    return replaced_here(torch.nn.functional, "batch_norm", _batch_norm)


def _batch_norm(  # noqa: PLR0913, PLR0917 - torch's own signature
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training and x.shape[0] * math.prod(x.shape[2:]) == 1:
        # exactly 0: torch multiplies the rest of x - mean by 1 / sqrt(eps), which a ReLU lets through or not
        out, width = x - x, [-1, *[1] * (x.dim() - 2)]
        out = out if weight is None else out * weight.reshape(width)
        return out if bias is None else out + bias.reshape(width)
    return BATCH_NORM(x, running_mean, running_var, weight, bias, training, momentum, eps)
