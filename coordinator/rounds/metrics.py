"""What a round achieved, from one confusion matrix per device (rows true class, columns predicted, counts).

A device may tell only how many of its labels are right, or, where targets are no classes, only its loss.

Accuracy, weighted (micro) sum_i n_i X_i / sum_i n_i and unweighted (macro) mean_i X_i, of each device on its own n_i
held-out samples with the model that it would be served. F1 of devices: a device's macro F1, the mean over the classes
that occur in its labels or its predictions, averaged in the same two ways. Pooled F1: the macro F1 of one confusion
matrix, the sum of all devices'. Pure.

Beside accuracy, "errors" (targets that are numbers) give `squared_error`, `absolute_error` and `r2`: one less the
squared errors over the variance of the targets around the mean of their own device, all targets together. "positions"
of token labels give `perplexity`, the exponential of the mean cross-entropy of a label. What one device tells counts in
an average up to LOSS_RATIO times what is usual.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from edge_client.protocol.program import Program
from edge_client.protocol.task import I64, Array, ClientId, Reply

MAX_LOSS = 1e30  # a larger reported loss is ignored: a sum of such losses would overflow
LOSS_RATIO = 10.0  # times the median, or the loss of guessing: the most that counts of one device in an average
MAX_MATRIX_CLASSES = 256  # of a label per position: a larger confusion matrix is above half a megabyte
MAX_EXPONENT = 700.0  # its exponential is finite
MAX_ASSIGNED = 10_000  # devices whose centers a record has; of more, those that evaluated in its round
NOTHING_TOLD: Mapping[ClientId, Any] = MappingProxyType({})
LAST_ROUNDS = 3  # a table's figure is the mean over this many rounds at the end of a run


@dataclass(frozen=True, kw_only=True)
class FleetAverage:
    """One quantity over a fleet; None when no device answered."""

    micro: float | None
    macro: float | None


@dataclass(frozen=True, kw_only=True)
class Score:
    """One quantity beside accuracy (below): its averages, and what each device told."""

    average: FleetAverage
    per_device: Mapping[ClientId, float]


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One round's result. `per_center[k]` pools the samples of the devices of center k; None without any.

    All but `centers` is about the model that a device is served. `f1_of_devices` averages each device's macro F1,
    `f1_pooled` is the macro F1 of all samples together. `loss_per_device` is the mean loss on these samples, of the
    devices that reported one; `loss` and `loss_per_center` average it, each device's bounded by LOSS_RATIO. `centers`
    is None where every device is served its center as it is exported, and where that was not measured. `scores` has
    what else is known of the model, by name.
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
    scores: Mapping[str, Score] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CenterReport:
    """How the centers themselves do, as they are exported: `per_device[k]` is the accuracy of center k on its devices.

    `per_center[k]` pools the samples of these devices, `accuracy` all of them.
    """

    accuracy: FleetAverage
    per_center: tuple[float | None, ...]
    per_device: tuple[Mapping[ClientId, float], ...]


def make_center_report(counted: Mapping[tuple[int, ClientId], tuple[float, float]], *, n_centers: int) -> CenterReport:
    """From the labels of each center on each of its devices' held-out samples: how many, how many of them right."""
    known = {key: right / n for key, (n, right) in sorted(counted.items()) if n > 0}
    center, n = np.array([k for k, _ in known]), np.array([counted[key][0] for key in known], dtype=np.float64)
    right = np.array(list(known.values()))
    return CenterReport(
        accuracy=_average(right, n),
        per_center=tuple(_average(right[center == k], n[center == k]).micro for k in range(n_centers)),
        per_device=tuple({c: share for (at, c), share in known.items() if at == k} for k in range(n_centers)),
    )


def make_report(  # noqa: PLR0913 - what a device may tell
    confusions: Mapping[ClientId, Array],
    assignment: Mapping[ClientId, int],
    *,
    n_centers: int,
    losses: Mapping[ClientId, float] = NOTHING_TOLD,
    counted_labels: Mapping[ClientId, tuple[float, float]] = NOTHING_TOLD,
    samples: Mapping[ClientId, int] = NOTHING_TOLD,
    signed: bool = False,
) -> RoundReport:
    """From the confusion matrix [C, C] and mean loss of each device that answered, and each device's center.

    `counted_labels`, of a device without a matrix: how many labels, how many of them right. `samples` weigh the devices
    that tell neither. `signed`: a loss may be negative.
    """
    matrices = {c: matrix for c, matrix in sorted(confusions.items()) if matrix.sum() > 0}
    hits = {c: (n, right / n) for c, (n, right) in counted_labels.items() if n > 0}

    def _labels(c: ClientId) -> tuple[float, float]:
        if c in matrices:
            return float(matrices[c].sum()), accuracy(matrices[c])
        return hits[c] if c in hits else (float(samples[c]), math.nan)

    empty = confusions.keys() | counted_labels.keys()
    others = {c for c in losses if c in samples and c not in empty}
    clients = sorted(matrices.keys() | hits.keys() | others)
    told = np.array([losses.get(c, np.nan) for c in clients])
    knows = known_losses(told)
    counted = bounded_losses(told, knows, classes=max(map(len, matrices.values()), default=1), signed=signed)
    n = np.array([_labels(c)[0] for c in clients], dtype=np.float64)
    right = np.array([_labels(c)[1] for c in clients], dtype=np.float64)  # NaN where that is not known
    labelled = ~np.isnan(right)
    center = np.array([assignment.get(c, -1) for c in clients])
    with_matrix = np.array([c in matrices for c in clients], dtype=bool)
    return RoundReport(
        accuracy=_average(right[labelled], n[labelled]),
        f1_of_devices=_average(np.array([f1(matrices[c]) for c in clients if c in matrices]), n[with_matrix]),
        f1_pooled=_f1_pooled(list(matrices.values())),
        per_device={c: float(x) for c, x, known in zip(clients, right, labelled, strict=True) if known},
        per_center=tuple(
            _average(right[labelled & (center == k)], n[labelled & (center == k)]).micro for k in range(n_centers)
        ),
        assignment=_told(assignment, clients),
        loss=_average(counted[knows], n[knows]),
        loss_per_device={c: float(x) for c, x, known in zip(clients, told, knows, strict=True) if known},
        loss_per_center=tuple(
            _average(counted[knows & (center == k)], n[knows & (center == k)]).micro for k in range(n_centers)
        ),
    )


def _told(assignment: Mapping[ClientId, int], clients: Sequence[ClientId]) -> dict[ClientId, int]:
    """The assignment as a record has it: of a large fleet, of the `clients` that evaluated."""
    if len(assignment) <= MAX_ASSIGNED:
        return dict(sorted(assignment.items()))
    return {c: assignment[c] for c in clients if c in assignment}


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


def known_losses(told: Array) -> Array:
    """Where `told` [n] is a number that a mean may take in."""
    return np.abs(told) < MAX_LOSS  # not NaN


def bounded_losses(told: Array, knows: Array, *, classes: int = 1, signed: bool = False) -> Array:
    """The losses [n] that count in averages; `knows` says where `told` is a loss."""
    usual = np.median(np.abs(told[knows])) if knows.any() else 0.0
    most = LOSS_RATIO * max(float(usual), math.log(classes))
    return np.clip(told, -most if signed else 0.0, most)


def _average(values: Array, n: Array) -> FleetAverage:
    if len(values) == 0:
        return FleetAverage(micro=None, macro=None)
    return FleetAverage(micro=float(n @ values / n.sum()), macro=float(values.mean()))


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
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # one that is not finite is not known
        knows &= known_losses(error / spread)
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


def ari(truth: Sequence[int], found: Sequence[int]) -> float:
    """Adjusted Rand index of two labelings: 1 for the same partition, about 0 for chance."""
    table = _shared_members(truth, found)
    n, both = int(table.sum()), int(np.square(table).sum())
    in_found, in_true = (int(np.square(table.sum(axis=side)).sum()) for side in (1, 0))
    # pairs of members: in one group and one cluster, in one cluster only, in one group only, in neither
    together, joined, parted = both - n, in_found - both, in_true - both
    apart = n * n - both - joined - parted
    if not joined and not parted:
        return 1.0
    chance = (together + parted) * (parted + apart) + (together + joined) * (joined + apart)
    return 2.0 * (together * apart - parted * joined) / chance


def nmi(truth: Sequence[int], found: Sequence[int]) -> float:
    """Normalised mutual information of two labelings, 0 to 1; over the mean of their entropies."""
    table = _shared_members(truth, found)
    if table.size <= 1:
        return 1.0
    joint = table / table.sum()
    sides = joint.sum(axis=1), joint.sum(axis=0)
    some = joint > 0
    mutual = float((joint[some] * np.log(joint[some] / np.outer(*sides)[some])).sum())
    entropies = [-float((side * np.log(side)).sum()) for side in sides]
    return 0.0 if mutual <= np.finfo(np.float64).eps else 2.0 * mutual / sum(entropies)


def purity(truth: Sequence[int], found: Sequence[int]) -> float:
    """Share of members that belong to the most common true group of their cluster, 0 to 1."""
    table = _shared_members(truth, found)
    return float(table.max(axis=1).sum() / table.sum())


def _shared_members(truth: Sequence[int], found: Sequence[int]) -> I64:
    """[clusters, groups]: how many members of a cluster are of a true group."""
    groups, true = np.unique(np.asarray(truth), return_inverse=True)
    clusters, cluster = np.unique(np.asarray(found), return_inverse=True)
    table = np.zeros((len(clusters), len(groups)), dtype=np.int64)
    np.add.at(table, (cluster, true), 1)
    return table


def last_rounds(records: Sequence[Mapping[str, Any]], quantity: str, kind: str = "") -> list[float]:
    """`quantity` ("accuracy" with kind "micro", "f1_pooled") of the last three rounds with a value, as in papers."""
    values = (record.get(quantity) for record in records)
    found = [value[kind] if kind and value is not None else value for value in values]
    return [value for value in found if value is not None][-LAST_ROUNDS:]
