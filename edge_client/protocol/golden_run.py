"""The golden run of a program: a few training steps from numbers that both sides draw, and what torch answers.

Written by the compiler into program.json, once per engine, since engines differ in their batch. engines/golden_run.py
draws the inputs and runs them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_client.protocol import validators

STEPS_MAX = 16
BATCH_MAX = 65_536
TOKENS_MAX = 1 << 24  # integers up to here are exact in float32
DIGEST = 8  # numbers of a digest
TOLERANCE_MAX = 0.1  # a larger difference means another computation

_NUMBER = validators.number(-math.inf)
_FIELDS = validators.record(
    validators.required(
        seed=validators.integer(0),
        batch=validators.integer(1, BATCH_MAX),
        lr=validators.positive(),
        pull=validators.positive(),
        tokens=validators.integer(0, TOKENS_MAX),
        losses=validators.list_of(_NUMBER, 1, STEPS_MAX),
        weights=validators.list_of(_NUMBER, DIGEST, DIGEST),
        buffers=validators.list_of(_NUMBER, 0, DIGEST),
        tolerance=validators.positive(TOLERANCE_MAX),
    )
)


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
        lists = {name: list(getattr(self, name)) for name in ("losses", "weights", "buffers")}
        return vars(self) | lists

    @staticmethod
    def from_json(raw: Mapping[str, Any], *, buffers: bool) -> Golden:
        """Read what `to_json` wrote; `buffers`: whether the program has any. Raises Malformed("bad_field")."""
        fields = _FIELDS(raw, "a golden run")
        digest = DIGEST if buffers else 0
        if len(fields["buffers"]) != digest:
            raise validators.field_error("a golden run's buffers", fields["buffers"], f"{digest} numbers")
        numbers = {name: float(fields[name]) for name in ("lr", "pull", "tolerance")}
        lists = {name: tuple(map(float, fields[name])) for name in ("losses", "weights", "buffers")}
        return Golden(**(fields | numbers | lists))
