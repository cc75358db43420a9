"""`label-prior = device`: the labels that each center was trained on, so that devices can correct it to their own.

A device adds log(n_c + e) - log(t_c + e) to a center's output for class c: n_c are its own training samples of the
class, t_c those that the center was trained on (Saerens 2002; edge_client/training/label_prior.py). A model that a
device trained for itself has seen that device's labels, so it is not corrected. Nor is a center without totals.
coordinator/rounds/label_counting.py asks the devices.

Totals are shortened here, and not where a message is written, so that emulated devices compute with the numbers that
live ones are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from coordinator.strategies.base import State
from coordinator.strategies.common.updates import unpack_by_client
from edge_client.errors import ConfigError
from edge_client.protocol.messages import MAX_MESSAGE_BYTES, canonical_json
from edge_client.protocol.task import F64, MAX_LABEL_TOTALS, Array, ClientId, Flat, OwnModel

LABEL_PRIORS = ("device", "model")
COUNTS_KEY = "label-counts"  # in State.extra, per client: [C] training samples of each class
TOTALS_KEY = "label-totals"  # in State.extra: [n_centers, C]; a row of zeros: the center was not trained yet
TOTALS_DIGITS = 3  # after the point, at most
TWO_DIGITS, FOUR_DIGITS = 10, 999.5  # a number that is rounded has them from here on
# Of a task's message, at most: without models, weights and totals; of each model, signed and with its weight; and what
# a model of the device's own has more. So MAX_LABEL_TOTALS numbers of three characters fit beside 16 centers.
TASK_BYTES, MODEL_BYTES, OWN_BYTES = 1_103, 313, 50
Total = int | float
Shorten = Callable[[F64], list[Total]]


def label_counts(state: State) -> Mapping[ClientId, Array]:
    """Client -> [C] its training samples of each class, of the clients that were asked."""
    return unpack_by_client(state.extra, COUNTS_KEY)


def with_label_totals(state: State, shares: Mapping[ClientId, Array], before: State) -> State:
    """The state with the totals of its centers, by the devices' `shares` [K] and the counts that it has of them."""
    counts = _of_one_length(label_counts(state))
    totals = center_totals(shares, counts, before, len(state.centers))
    return replace(state, extra={**state.extra, TOTALS_KEY: totals})


def center_totals(
    shares: Mapping[ClientId, Array], counts: Mapping[ClientId, Array], before: State, n_centers: int
) -> F64:
    """[n_centers, C] the sum of the devices' label counts by their shares; the old totals of a center without any."""
    classes = len(next(iter(counts.values())))
    totals = np.zeros((n_centers, classes))
    for client in sorted(shares.keys() & counts.keys()):
        totals += np.outer(shares[client], counts[client])
    old = before.extra.get(TOTALS_KEY, np.zeros((0, classes)))
    kept = np.flatnonzero(~totals[: len(old)].any(axis=1))
    totals[kept] = old[kept]
    return totals


def _of_one_length(counts: Mapping[ClientId, Array]) -> dict[ClientId, Array]:
    """The counts with the most common number of classes: a device may lie about it."""
    classes = Counter(len(labels) for labels in counts.values()).most_common(1)[0][0]
    return {c: labels for c, labels in counts.items() if len(labels) == classes}


def label_totals_of(state: State, models: Sequence[Flat | OwnModel]) -> list[list[Total] | None] | None:
    """For `Probe.label_totals`: the totals [C] of each model that is a center, and of the `init` of each own model.

    All with as many digits as a task has room for; three after the point where it has room. None without any totals.
    Raises ConfigError for more numbers than a task has room for.
    """
    totals = state.extra.get(TOTALS_KEY)
    if totals is None:
        return None
    rows = [_center_of(state.centers, model.init if isinstance(model, OwnModel) else model) for model in models]
    known = [k if k is not None and k < len(totals) and totals[k].any() else None for k in rows]  # not a new center
    found = [None if k is None else totals[k] for k in known]
    check_room(sum(row is not None for row in found), totals.shape[1])
    room = MAX_MESSAGE_BYTES - TASK_BYTES - MODEL_BYTES * len(models)
    room -= OWN_BYTES * sum(isinstance(model, OwnModel) for model in models)
    for shorten in (_decimals, _significant(4), _significant(3), _three_characters):
        told = [None if row is None else shorten(row) for row in found]
        if len(canonical_json(told)) <= room:
            return told
    raise _no_room(len(found), totals.shape[1])


def check_room(centers: int, classes: int) -> None:
    """Raise ConfigError where no task has room for the totals of so many centers."""
    if centers * classes > MAX_LABEL_TOTALS:
        raise _no_room(centers, classes)


def _no_room(centers: int, classes: int) -> ConfigError:
    fit = MAX_LABEL_TOTALS // classes
    fewer = f", those of {fit}: use fewer centers, or" if fit else ": use"
    return ConfigError(
        f"label-prior device sends a device {classes} label totals for each of {centers} centers",
        hint=f"a message has at most {MAX_LABEL_TOTALS} of them{fewer} label-prior = model",
    )


def _decimals(row: F64) -> list[Total]:
    return [_shortest(n) for n in row.round(TOTALS_DIGITS).tolist()]


def _significant(digits: int) -> Shorten:
    """The same with so many significant digits."""
    return lambda row: [_shortest(round(float(f"{n:.{digits}g}"), TOTALS_DIGITS)) for n in row.tolist()]


def _three_characters(row: F64) -> list[Total]:
    """Whole numbers below 1,000, below 10 with one digit after the point; larger ones are divided by a power of ten.

    Only ratios matter, but for the 0.1 that a device adds to each total: divided, a row of few samples of a class is
    corrected as if it had some more.

    >>> _three_characters(np.array([0.04, 7.36, 62.7, 812.0])), _three_characters(np.array([3.0, 250.0, 98_765.0]))
    ([0, 7.4, 63, 812], [0, 2.5, 988])
    """
    most = float(row.max())
    divided = row / next(10.0**k for k in range(309) if most / 10.0**k < FOUR_DIGITS)
    return [_shortest(round(n, 1) if n < TWO_DIGITS else round(n)) for n in divided.tolist()]


def _shortest(n: float) -> Total:
    """A whole number without a point, as it travels."""
    return int(n) if n == int(n) else n


def _center_of(centers: Array, model: Flat | None) -> int | None:
    """The number of the center whose memory this is: two centers may have the same values."""
    if model is None:
        return None
    return next((k for k, center in enumerate(centers) if np.may_share_memory(center, model)), None)
