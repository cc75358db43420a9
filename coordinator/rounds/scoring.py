"""What an evaluation asks of a program's devices, and the scores beside accuracy that it makes of their answers. Pure.

"errors" (targets that are numbers) give `squared_error`, `absolute_error` and `r2`: one less the squared errors over
the variance of the targets around the mean of their own device, all targets together. "positions" of token labels give
`perplexity`, the exponential of the mean cross-entropy of a label. What one device tells counts in an average up to
LOSS_RATIO times what is usual (metrics.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coordinator.rounds.metrics import LOSS_RATIO, FleetAverage, Score, bounded_losses, known_losses
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId, Reply

MAX_MATRIX_CLASSES = 256  # of a label per position: a larger confusion matrix is above half a megabyte
MAX_EXPONENT = 700.0  # its exponential is finite


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """`want`: what devices are asked for; `signed`: whether a loss may be negative; `perplexity`: of tokens."""

    want: frozenset[str] = frozenset({"confusion", "loss"})
    signed: bool = False
    perplexity: bool = False


CLASSES = Scoring()


def scoring_of(program: Program) -> Scoring:
    """What devices with this program are asked."""
    if not program.has_classes:
        errors = {"errors"} if program.truth == program.target else set()
        return Scoring(want=frozenset({"loss"} | errors), signed=program.own_loss)
    want = {"loss"} if program.positions > 1 and program.classes > MAX_MATRIX_CLASSES else {"loss", "confusion"}
    if program.positions == 1:
        return Scoring(want=frozenset(want), signed=program.own_loss)
    tokens = program.loss == "token-cross-entropy" and not program.own_loss
    needed = {"positions"} if tokens or "confusion" not in want else set()
    return Scoring(want=frozenset(want | needed), signed=program.own_loss, perplexity=tokens)


def other_scores(replies: Mapping[ClientId, Reply], scoring: Scoring) -> dict[str, Score]:
    """The scores beside accuracy, by name, of the devices that told them."""
    errors = {c: r.errors[0] for c, r in sorted(replies.items()) if r.errors is not None}
    found = _errors(errors, np.array([replies[c].n for c in errors], dtype=np.float64)) if errors else {}
    counted = {c: r.positions[0] for c, r in sorted(replies.items()) if r.positions is not None and r.positions[0, 0]}
    return found | ({"perplexity": _perplexity(counted)} if counted and scoring.perplexity else {})


def _errors(told: Mapping[ClientId, Array], n: Array) -> dict[str, Score]:
    squared, absolute, variance = np.array(list(told.values())).T
    devices = list(told)
    found = {"squared_error": _score(devices, squared, n), "absolute_error": _score(devices, absolute, n)}
    error, spread = (bounded_losses(values, known_losses(values)) for values in (squared, variance))
    knows = known_losses(squared) & known_losses(variance) & (spread > 0)
    if not knows.any():
        return found
    error, spread, n = error[knows], spread[knows], n[knows]
    own = np.maximum(1 - error / spread, -LOSS_RATIO)
    average = FleetAverage(micro=float(1 - (n @ error) / (n @ spread)), macro=float(own.mean()))
    names = [c for c, known in zip(devices, knows, strict=True) if known]
    return found | {"r2": Score(average=average, per_device=dict(zip(names, map(float, own), strict=True)))}


def _score(devices: list[ClientId], values: Array, n: Array) -> Score:
    knows = known_losses(values)
    counted, weights = bounded_losses(values, knows)[knows], n[knows]
    micro = float(counted @ weights / weights.sum()) if knows.any() else None
    average = FleetAverage(micro=micro, macro=float(counted.mean()) if knows.any() else None)
    own = {c: float(x) for c, x, known in zip(devices, values, knows, strict=True) if known}
    return Score(average=average, per_device=own)


def _perplexity(told: Mapping[ClientId, Array]) -> Score:
    count, _, entropy = np.array(list(told.values())).T
    means = _score(list(told), entropy / count, count)
    micro, macro = (None if mean is None else _exp(mean) for mean in (means.average.micro, means.average.macro))
    return Score(
        average=FleetAverage(micro=micro, macro=macro), per_device={c: _exp(x) for c, x in means.per_device.items()}
    )


def _exp(mean: float) -> float:
    return math.exp(min(mean, MAX_EXPONENT))
