"""Which center suits a device, from what it measured: one rule for MQTT's `near`, for HTTP and for the device itself.

Everything is a distance, the less the better: a mean loss, one minus a share of votes, or how far apart two sketches
are. Nothing fits whose mean loss is above that of guessing, or where the run's router (router.py) says so; that is an
answer. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol.nearest.router import FITS
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array

MAX_ALTERNATIVES = 8
ASSUMED_SAMPLES = 20  # behind a question that does not say how many it used
GUESSING_UNKNOWN = math.sqrt(np.finfo(np.float32).max)  # the level of guessing where none is known


@dataclass(frozen=True, kw_only=True)
class CenterChoice:
    """The center of least distance, the lower one on a tie, or None; and the next best ones."""

    center: int | None
    distance: float
    alternatives: tuple[tuple[int, float], ...]
    fit: str | None = None  # of router.FITS; None: the run has nothing to tell it by

    def to_json(self) -> dict[str, Any]:
        """The fields of an answer to `near` (PROTOCOL.md)."""
        others = [{"center": k, "distance": d} for k, d in self.alternatives]
        told = {} if self.fit is None else {"fit": self.fit}
        return {"center": self.center, "distance": self.distance, "alternatives": others, **told}


def guessing_loss(program: Program) -> float:
    """The mean loss of a model that only guesses: a center with a higher loss does not fit a device's data."""
    known = program.has_classes and not program.own_loss
    return math.log(program.classes) if known else GUESSING_UNKNOWN


def choose_by_distance(
    distances: Sequence[float] | Array, abstain: float, fit_of: Callable[[float], str | None] = lambda _: None
) -> CenterChoice:
    """Distances [K] -> the choice. A negative distance is no measurement: it never fits and is left out.

    But a loss of the user's own may be below zero: it counts where the level of guessing is not known.

    Nothing fits above `abstain`. Up to there `fit_of` says how a center at the least distance fits, or None where the
    run has not learned that.
    """
    order = [int(k) for k in np.argsort(distances, kind="stable")]
    best = order[0]
    least = -math.inf if abstain == GUESSING_UNKNOWN else 0.0
    near = least <= distances[best] <= abstain and math.isfinite(distances[best])
    fit = fit_of(float(distances[best])) if near else FITS[-1]
    fits = fit != FITS[-1]
    others = [
        (k, float(distances[k]))
        for k in (order[1:] if fits else order)
        if distances[k] >= least and math.isfinite(distances[k])
    ]
    return CenterChoice(
        center=best if fits else None,
        distance=max(least, float(distances[best])),
        alternatives=tuple(others[:MAX_ALTERNATIVES]),
        fit=fit,
    )


def sketch_distance(point: Array, points: Array) -> Array:
    """A sketch [d] and those of the centers [K, d] -> the root of their mean squared difference [K]."""
    if point.shape != points.shape[1:]:
        raise Malformed("bad_field", f"a sketch of {len(point)} numbers, the centers' have {points.shape[1]}")
    distance: Array = np.sqrt(np.square(points - point).mean(axis=1))
    return distance
