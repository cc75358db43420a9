"""What a round achieved, from one confusion matrix per device (rows true class, columns predicted, counts).

micro-X = sum_i n_i X_i / sum_i n_i and macro-X = mean_i X_i, for X in {accuracy, F1} of each device on its own n_i
held-out samples with the model that it would be served. A device's F1 is the mean over the classes that occur in its
labels or its predictions. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.protocol.task import Array, ClientId

MAX_LOSS = 1e30  # a larger reported loss is ignored: a sum of such losses would overflow
LAST_ROUNDS = 3  # a table's figure is the mean over this many rounds at the end of a run


@dataclass(frozen=True, kw_only=True)
class FleetAverage:
    """One quantity over a fleet; None when no device answered."""

    micro: float | None
    macro: float | None


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One round's result. `per_center[k]` pools the samples of the devices of center k; None without any.

    `loss_per_device` is the mean loss on the same samples, of the devices that reported one; `loss` and
    `loss_per_center` average it.
    """

    accuracy: FleetAverage
    f1: FleetAverage
    per_device: Mapping[ClientId, float]
    per_center: tuple[float | None, ...]
    assignment: Mapping[ClientId, int]
    loss: FleetAverage
    loss_per_device: Mapping[ClientId, float]
    loss_per_center: tuple[float | None, ...]


def make_report(
    confusions: Mapping[ClientId, Array],
    assignment: Mapping[ClientId, int],
    *,
    n_centers: int,
    losses: Mapping[ClientId, float] | None = None,
) -> RoundReport:
    """From the confusion matrix [C, C] and mean loss of each device that answered, and each device's center."""
    clients = [c for c in sorted(confusions) if confusions[c].sum() > 0]
    told = np.array([(losses or {}).get(c, np.nan) for c in clients])
    knows = np.abs(told) < MAX_LOSS  # not NaN
    n = np.array([confusions[c].sum() for c in clients], dtype=np.float64)
    right = np.array([accuracy(confusions[c]) for c in clients])
    center = np.array([assignment.get(c, -1) for c in clients])
    return RoundReport(
        accuracy=_average(right, n),
        f1=_average(np.array([f1(confusions[c]) for c in clients]), n),
        per_device={c: float(x) for c, x in zip(clients, right, strict=True)},
        per_center=tuple(_average(right[center == k], n[center == k]).micro for k in range(n_centers)),
        assignment=dict(sorted(assignment.items())),
        loss=_average(told[knows], n[knows]),
        loss_per_device={c: float(x) for c, x, known in zip(clients, told, knows, strict=True) if known},
        loss_per_center=tuple(
            _average(told[knows & (center == k)], n[knows & (center == k)]).micro for k in range(n_centers)
        ),
    )


def accuracy(confusion: Array) -> float:
    """Share of correct predictions in a non-empty confusion matrix [C, C]."""
    return float(np.trace(confusion) / confusion.sum())


def f1(confusion: Array) -> float:
    """Mean of 2 TP / (2 TP + FP + FN) over the classes that occur in the labels or in the predictions."""
    occurs = confusion.sum(axis=0) + confusion.sum(axis=1)  # TP + FP + TP + FN
    seen = occurs > 0
    return float(np.mean(2 * np.diag(confusion)[seen] / occurs[seen]))


def _average(values: Array, n: Array) -> FleetAverage:
    if len(values) == 0:
        return FleetAverage(micro=None, macro=None)
    return FleetAverage(micro=float(n @ values / n.sum()), macro=float(values.mean()))


def ari(truth: Sequence[int], found: Sequence[int]) -> float:
    """Adjusted Rand index of two labelings: 1 for the same partition, about 0 for chance."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(truth, found))


def nmi(truth: Sequence[int], found: Sequence[int]) -> float:
    """Normalised mutual information of two labelings, 0 to 1."""
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(truth, found))


def purity(truth: Sequence[int], found: Sequence[int]) -> float:
    """Share of members that belong to the most common true group of their cluster, 0 to 1."""
    _, true = np.unique(np.asarray(truth), return_inverse=True)
    _, cluster = np.unique(np.asarray(found), return_inverse=True)
    table = np.zeros((cluster.max() + 1, true.max() + 1), dtype=np.int64)
    np.add.at(table, (cluster, true), 1)
    return float(table.max(axis=1).sum() / table.sum())


def last_rounds(records: Sequence[Mapping[str, Any]], quantity: str, kind: str = "micro") -> list[float]:
    """`quantity` ("accuracy", "f1") of the last three rounds that have a value, as the papers' tables report it."""
    found = [r[quantity][kind] for r in records if r[quantity][kind] is not None]
    return found[-LAST_ROUNDS:]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of values pooled over seeds and rounds, as WeCFL's tables have them."""
    return float(np.mean(values)), float(np.std(values))
