"""What a round achieved, from one confusion matrix per device (rows true class, columns predicted, counts).

Accuracy, weighted (micro) sum_i n_i X_i / sum_i n_i and unweighted (macro) mean_i X_i, of each device on its own n_i
held-out samples with the model that it would be served. F1 of devices: a device's macro F1, the mean over the classes
that occur in its labels or its predictions, averaged in the same two ways. Pooled F1: the macro F1 of one confusion
matrix, the sum of all devices'. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.protocol.task import Array, ClientId

MAX_LOSS = 1e30  # a larger reported loss is ignored: a sum of such losses would overflow
LOSS_RATIO = 10.0  # times the median, or the loss of guessing: the most that counts of one device in an average
LAST_ROUNDS = 3  # a table's figure is the mean over this many rounds at the end of a run


@dataclass(frozen=True, kw_only=True)
class FleetAverage:
    """One quantity over a fleet; None when no device answered."""

    micro: float | None
    macro: float | None


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One round's result. `per_center[k]` pools the samples of the devices of center k; None without any.

    All but `centers` is about the model that a device is served. `f1_of_devices` averages each device's macro F1,
    `f1_pooled` is the macro F1 of all samples together. `loss_per_device` is the mean loss on these samples, of the
    devices that reported one; `loss` and `loss_per_center` average it, each device's bounded by LOSS_RATIO. `centers`
    is None where every device is served its center as it is exported, and where that was not measured.
    """

    accuracy: FleetAverage
    f1_of_devices: FleetAverage
    f1_pooled: float | None
    per_device: Mapping[ClientId, float]
    per_center: tuple[float | None, ...]
    assignment: Mapping[ClientId, int]
    loss: FleetAverage
    loss_per_device: Mapping[ClientId, float]
    loss_per_center: tuple[float | None, ...]
    centers: CenterReport | None = None


@dataclass(frozen=True, kw_only=True)
class CenterReport:
    """How the centers themselves do, as they are exported: `per_device[k]` is the accuracy of center k on its devices.

    `per_center[k]` pools the samples of these devices, `accuracy` all of them.
    """

    accuracy: FleetAverage
    per_center: tuple[float | None, ...]
    per_device: tuple[Mapping[ClientId, float], ...]


def make_center_report(confusions: Mapping[tuple[int, ClientId], Array], *, n_centers: int) -> CenterReport:
    """From the confusion matrix [C, C] of each center on each of its devices' held-out samples."""
    known = {key: matrix for key, matrix in sorted(confusions.items()) if matrix.sum() > 0}
    center, n = np.array([k for k, _ in known]), np.array([m.sum() for m in known.values()], dtype=np.float64)
    right = np.array([accuracy(matrix) for matrix in known.values()])
    return CenterReport(
        accuracy=_average(right, n),
        per_center=tuple(_average(right[center == k], n[center == k]).micro for k in range(n_centers)),
        per_device=tuple({c: accuracy(m) for (at, c), m in known.items() if at == k} for k in range(n_centers)),
    )


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
    counted = _bounded_losses(told, knows, classes=max((len(confusions[c]) for c in clients), default=1))
    n = np.array([confusions[c].sum() for c in clients], dtype=np.float64)
    right = np.array([accuracy(confusions[c]) for c in clients])
    center = np.array([assignment.get(c, -1) for c in clients])
    return RoundReport(
        accuracy=_average(right, n),
        f1_of_devices=_average(np.array([f1(confusions[c]) for c in clients]), n),
        f1_pooled=_f1_pooled([confusions[c] for c in clients]),
        per_device={c: float(x) for c, x in zip(clients, right, strict=True)},
        per_center=tuple(_average(right[center == k], n[center == k]).micro for k in range(n_centers)),
        assignment=dict(sorted(assignment.items())),
        loss=_average(counted[knows], n[knows]),
        loss_per_device={c: float(x) for c, x, known in zip(clients, told, knows, strict=True) if known},
        loss_per_center=tuple(
            _average(counted[knows & (center == k)], n[knows & (center == k)]).micro for k in range(n_centers)
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


def _f1_pooled(confusions: Sequence[Array]) -> float | None:
    """The macro F1 of all devices' samples; a device that reports another number of classes than most is left out."""
    if not confusions:
        return None
    shape = Counter(matrix.shape for matrix in confusions).most_common(1)[0][0]
    return f1(np.sum([matrix for matrix in confusions if matrix.shape == shape], axis=0))


def _bounded_losses(told: Array, knows: Array, *, classes: int) -> Array:
    """The losses [n] that count in averages; `knows` says where `told` is a loss."""
    usual = np.median(told[knows]) if knows.any() else 0.0
    return np.clip(told, 0.0, LOSS_RATIO * max(float(usual), math.log(classes)))


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


def last_rounds(records: Sequence[Mapping[str, Any]], quantity: str, kind: str = "") -> list[float]:
    """`quantity` ("accuracy" with kind "micro", "f1_pooled") of the last three rounds with a value, as in papers."""
    values = (record.get(quantity) for record in records)
    found = [value[kind] if kind and value is not None else value for value in values]
    return [value for value in found if value is not None][-LAST_ROUNDS:]
