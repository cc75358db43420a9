"""The golden run of a program: a few training steps from numbers that both sides draw, and what torch answers.

Written by the compiler into program.json, once per engine, since engines differ in their batch. engines/golden_run.py
draws the inputs and runs them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEPS_MAX = 16
BATCH_MAX = 65_536
TOKENS_MAX = 1 << 24  # integers up to here are exact in float32
DIGEST = 8  # numbers of a digest
TOLERANCE_MAX = 0.1  # what is further off is another computation


@dataclass(frozen=True, kw_only=True)
class Golden:
    """A run of `len(losses)` steps, the last on fewer samples, and its outcome in float64."""

    seed: int
    batch: int
    lr: float
    pull: float  # the size of linear terms, velocities and anchors' distances: that of the gradient
    tokens: int  # samples are integers below this; 0: real numbers
    losses: tuple[float, ...]
    weights: tuple[float, ...]  # digest of how far the weights moved
    buffers: tuple[float, ...]  # digest of the buffers in the end; empty for a program without
    tolerance: float  # relative

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        lists = {name: list(getattr(self, name)) for name in ("losses", "weights", "buffers")}
        return vars(self) | lists

    @staticmethod
    def from_json(raw: Mapping[str, Any], *, buffers: bool) -> Golden:
        """Read what `to_json` wrote; `buffers`: whether the program has any. Raises ValueError, KeyError, TypeError."""
        losses = _numbers(raw["losses"])
        if not 1 <= len(losses) <= STEPS_MAX:
            raise ValueError(f"a golden run of {len(losses)} steps, at most {STEPS_MAX}")
        digests = _numbers(raw["weights"]), _numbers(raw["buffers"])
        if tuple(map(len, digests)) != (DIGEST, DIGEST if buffers else 0):
            raise ValueError(f"digests of {len(digests[0])} and {len(digests[1])} numbers")
        return Golden(
            seed=_count(raw["seed"], 0, 2**53 - 1),
            batch=_count(raw["batch"], 1, BATCH_MAX),
            lr=_positive(raw["lr"]),
            pull=_positive(raw["pull"]),
            tokens=_count(raw["tokens"], 0, TOKENS_MAX),
            losses=losses,
            weights=digests[0],
            buffers=digests[1],
            tolerance=_positive(raw["tolerance"], TOLERANCE_MAX),
        )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r:.80}")
    return float(value)


def _numbers(values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) > STEPS_MAX:
        raise ValueError(f"expected a list of at most {STEPS_MAX} numbers, got {values!r:.80}")
    return tuple(_number(value) for value in values)


def _positive(value: object, most: float = math.inf) -> float:
    found = _number(value)
    if not 0 < found <= most:
        raise ValueError(f"expected a number above 0, at most {most:g}, got {found:g}")
    return found


def _count(value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"expected an integer from {low} to {high}, got {value!r:.80}")
    return value
