"""The rules by which a gradient moves the weights where the step's own SGD does not: Nesterov, Adam, AdamW, clipping.

    all          g <- g min(1, clip_norm / (|g| + 1e-6))
    sgd, adam    g <- g + weight_decay w
    adamw        w <- w - lr weight_decay w
    sgd          s <- momentum s + g;      w <- w - lr s, or with nesterov w - lr (g + momentum s)
    adam, adamw  s <- beta1 s + g;         m = (1 - beta1) s / (1 - beta1^t)
                 u <- beta2 u + g^2;       v = (1 - beta2) u / (1 - beta2^t)
                 w <- w - lr m / (sqrt(v) + eps)

As in torch.optim after clip_grad_norm_ (tests/conformance/test_optimisers.py). s and u are sums where torch keeps
means, which saves passes over memory. w, g, s and u are arrays or torch tensors: only operators that both have are
used, in place, so this file needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.protocol.task import Fit, Optimiser

PART = 1 << 16  # values of an array that are moved together: what one needs stays in a core's cache
NORM_FLOOR = 1e-6  # torch's, in clip_grad_norm_
Values = Any  # an array or a torch tensor of floats


@dataclass(frozen=True, kw_only=True)
class StepScalars:
    """What Adam's step number t (from 1) changes: w <- w - lr `scale` s / (sqrt(u) + `floor`)."""

    scale: float
    floor: float

    @staticmethod
    def of(optimiser: Optimiser, t: int) -> StepScalars:
        root = math.sqrt((1 - optimiser.beta2**t) / (1 - optimiser.beta2))
        return StepScalars(scale=root * (1 - optimiser.beta1) / (1 - optimiser.beta1**t), floor=root * optimiser.eps)


class Rule:
    """One local update's optimiser; its sums begin at zero. Call it once per step."""

    def __init__(self, optimiser: Optimiser, lr: float) -> None:
        self._optimiser, self._lr, self._t = optimiser, lr, 0
        self._sums: list[tuple[Values, Values]] = []  # by part of the vector

    def __call__(self, w: Values, g: Values) -> None:
        """Move w [n] by the gradient g [n], which is overwritten; both are arrays, or tensors of one device."""
        self._t += 1
        if self._optimiser.clip_norm:
            clip(g, norm_of(g), self._optimiser.clip_norm)
        numbers = StepScalars.of(self._optimiser, self._t)
        width = PART if isinstance(g, np.ndarray) else len(g)
        for i, start in enumerate(range(0, len(g), width)):
            part = slice(start, start + width)
            if self._t == 1:
                self._sums.append((g[part] * 0, g[part] * 0 if self._optimiser.name != "sgd" else None))
            move(
                self._optimiser, w[part], g[part], *self._sums[i], lr=self._lr, scale=numbers.scale, floor=numbers.floor
            )


def rule_of(task: Fit) -> Rule | None:
    """The rule of a task with an optimiser; None where the step's own SGD moves the weights."""
    return None if task.optimiser is None else Rule(task.optimiser, task.lr)


def norm_of(g: Values) -> float:
    """The Euclidean norm of g [n], in parts."""
    width = PART if isinstance(g, np.ndarray) else len(g)
    parts = (g[start : start + width] for start in range(0, len(g), width))
    return math.sqrt(sum(float((part * part).sum()) for part in parts))


def clip(g: Values, norm: float, limit: float) -> None:
    """Shorten g in place, as torch.nn.utils.clip_grad_norm_ does."""
    shrink = limit / (norm + NORM_FLOOR)
    if shrink < 1:
        g *= shrink


def move(  # noqa: PLR0913 - the terms of the formulas
    optimiser: Optimiser, w: Values, g: Values, s: Values, u: Values | None, *, lr: Values, scale: Values, floor: Values
) -> None:
    """One step in place; g is overwritten. The scalars are numbers, or tensors that the others broadcast with."""
    if optimiser.weight_decay:
        if optimiser.name == "adamw":
            w *= 1 - lr * optimiser.weight_decay
        else:
            g += optimiser.weight_decay * w
    if u is None:
        s *= optimiser.momentum
        s += g
        if optimiser.nesterov:
            g += optimiser.momentum * s
        w -= lr * (g if optimiser.nesterov else s)
        return
    s *= optimiser.beta1
    s += g
    u *= optimiser.beta2
    g *= g
    u += g
    root = u**0.5
    root += floor
    step = s * (lr * scale)
    step /= root
    w -= step
