"""The device's side of a sum: its choice of a center, its clipped and quantised contribution, its evaluation.

Pure: the numbers of edge_client/protocol/summed_task.py over models that were trained as any other fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from edge_client.data.dataset import DeviceData
from edge_client.errors import Malformed
from edge_client.protocol.summed_task import SCORE_LEVELS, SOFT, SummedFit, SummedProbe, Words
from edge_client.protocol.task import F64, I64, Array, Fit, Flat, OwnModel, Probe, Reply
from edge_client.training.fit_probe import run_probe
from edge_client.training.learner import Learner
from edge_client.training.skellam import with_noise

CHOICE_SLOT = "choice"  # under this name a device keeps its last weights [K] in the centers
LEAST_PART = 0.999  # of 1 / K: a device with such a weight in one of K centers counts itself there
RandomStream = np.random.Generator


@dataclass(frozen=True, kw_only=True)
class TrainedChoice:
    """What a device keeps within a round: its models, one or [K, size], and its weights [K] in the centers.

    For a choice of one center `order` has the centers from the best to the worst; for soft weights it is None.
    """

    models: Array
    weights: F64
    order: I64 | None

    def among(self, open_centers: Sequence[int]) -> F64:
        """[K] weights with closed centers left out: the best open center, or the soft weights of the open ones."""
        if self.order is None:
            return np.where(np.isin(np.arange(len(self.weights)), open_centers), self.weights, 0.0)
        best = next(int(k) for k in self.order if k in open_centers)
        alone: F64 = np.eye(len(self.weights))[best]
        return alone

    def kept(self, open_centers: Sequence[int]) -> F64:
        """[K] the weights that the device keeps for later rounds: soft ones stay, also in centers that are closed."""
        return self.weights if self.order is None else self.among(open_centers)


def choose_before(
    learner: Learner, task: SummedFit, local: DeviceData, last: F64 | None, keep: Callable[[F64], None]
) -> F64 | None:
    """[K] scores by which the device chooses before it trains, the greatest first; None: by its trained model.

    `last` [K] are its weights of the round before; `keep` as for `run_probe`.
    """
    k = len(task.centers)
    last = None if last is None or len(last) != k else last
    if task.choose == "only":
        return np.ones(k)
    if task.choose == "given":
        if task.group is None or not 0 <= task.group < k:
            raise Malformed("bad_task", "no center is given")
        given: F64 = np.eye(k)[task.group]
        return given
    if not chooses_by_probe(task, last):
        return None if task.choose == "nearest" else last
    quantity = {"loss": "loss", "shares": "votes", "posterior": "posterior"}[task.choose]
    prior = last.tolist() if task.choose == "posterior" and last is not None else None
    probe = Probe(models=list(task.centers), want=frozenset({quantity}), prior=prior, batch=task.batch, seed=task.seed)
    reply = run_probe(learner, probe, local, keep=keep)
    if reply.votes is not None:
        scores: F64 = np.maximum(reply.votes / reply.votes.sum(), task.sigma)
        return scores
    if reply.losses is not None:
        return -np.where(np.isnan(reply.losses), np.inf, reply.losses)
    return reply.posterior


def chooses_by_probe(task: SummedFit, last: F64 | None) -> bool:
    """Whether the device evaluates the centers on its samples before it trains."""
    return task.choose in ("loss", "posterior") or (task.choose == "shares" and (last is None or task.refresh))


def plain_fits(task: SummedFit, scores: F64 | None, last: F64 | None) -> list[Fit]:
    """The fits that the device trains: one, or one per center for "posterior"."""
    given = {f.name: getattr(task, f.name) for f in fields(Fit)}
    if task.choose == "posterior":
        return [
            Fit(**{**given, "start": center, "rows": f"posterior:{m}", "slot": f"{task.slot}-{m}"})
            for m, center in enumerate(task.centers)
        ]
    if task.choose == "shares" and scores is not None:
        middle = (scores @ task.centers / scores.sum()).astype(task.centers.dtype)
        pull = {"anchor": middle, "mu": task.mu * float(scores.sum())} if task.mu > 0 else {}
        start = task.start if isinstance(task.start, str) else middle
        return [Fit(**{**given, **pull, "start": start})]
    if task.choose == "given" or task.stage in ("count", "points"):
        return [Fit(**{**given, "anchor": None, "mu": 0.0})]
    weights = last if task.choose == "nearest" else scores
    if weights is None or len(weights) != len(task.centers):
        return [Fit(**{**given, "anchor": None, "mu": 0.0})]
    center = task.centers[int(np.argmax(weights))]
    return [Fit(**{**given, "start": center, "anchor": center if task.mu > 0 else None})]


def next_fit(fit: Fit, trained: Flat, move: float) -> tuple[Fit, Flat]:
    """The fit of the next of several local rounds, and the model between them: start + move (trained - start)."""
    if not isinstance(fit.start, np.ndarray):
        raise Malformed("bad_task", "a repeated fit starts at a model that is sent")
    moved = (fit.start + move * (trained - fit.start)).astype(trained.dtype)
    return replace(fit, start=moved, anchor=moved if fit.mu > 0 else None, seed=(fit.seed + 1) % 2**53), moved


def choose_after(task: SummedFit, models: Array, scores: F64 | None, last: F64 | None) -> TrainedChoice:
    """The device's choice once it has trained: `models` [1, size] or [K, size]."""
    k = len(task.centers)
    if scores is None:
        return choose_nearest(task, models, last)
    if task.choose in SOFT:
        return TrainedChoice(models=models, weights=scores, order=None)
    order = np.argsort(-scores, kind="stable")
    return TrainedChoice(models=models, weights=np.eye(k)[order[0]], order=order)


def choose_nearest(task: SummedFit, models: Array, last: F64 | None) -> TrainedChoice:
    """By squared distance in the compared columns; with hysteresis h only below (1 - h) of the last one's distance."""
    k = len(task.centers)
    centroids = compared(task, task.centers) if task.points is None else task.points[0]
    apart = (compared(task, models) - centroids).astype(np.float64)
    d2 = np.einsum("kd,kd->k", apart, apart)
    order = np.argsort(d2, kind="stable")
    before = int(np.argmax(last)) if last is not None and len(last) == k else -1
    if before >= 0 and d2[order[0]] >= (1 - task.hysteresis) ** 2 * d2[before]:
        order = np.concatenate([[before], order[order != before]])
    return TrainedChoice(models=models, weights=np.eye(k)[order[0]], order=order)


def compared(task: SummedFit, vectors: Array) -> Array:
    """[m, size] -> [m, columns] the columns by which models are compared."""
    return np.concatenate([vectors[:, start:end] for start, end in task.compare], axis=1)


def clipped(difference: F64, clip: float) -> F64:
    """A vector shortened to the length `clip`."""
    length = float(np.sqrt(difference @ difference))
    return difference * (clip / length) if length > clip else difference


def contribution(task: SummedFit, mine: TrainedChoice, drawn: RandomStream) -> Reply:
    """The words of the task's stage. The rounding and the noise are from `drawn`, which the server must not know.

    A known rounding would tell which devices are in a sum, and more of the update of each than the sum does.
    """
    if task.stage in ("count", "points"):
        return Reply(n=1, words=_point_words(task, mine, drawn))
    weights = mine.among(task.open)
    if task.stage == "choose":
        return Reply(n=1, words=(len(weights) * weights >= LEAST_PART).astype(np.uint32))
    counts = (
        np.ones(len(weights)) if task.choose == "posterior" else weights
    )  # FedEM weighs its samples, not its models
    blocks = []
    for k in task.open:
        model = mine.models[k if len(mine.models) > 1 else 0]
        blocks.append(_block(task, model, task.centers[k], float(counts[k]) * task.share, drawn))
    return Reply(n=1, words=np.concatenate(blocks))


def _block(task: SummedFit, model: Flat, center: Flat, share: float, drawn: RandomStream) -> Words:
    scale, told = task.scale, np.zeros(2, dtype=np.uint32)
    moved: Words = np.zeros(len(center), dtype=np.uint32)
    if share > 0:
        apart = clipped(model.astype(np.float64) - center, scale.clip)
        moved = scale.to_words(apart * (share / scale.clip), drawn)
        told = np.append(scale.to_words(np.array([share]), drawn), np.uint32(1))
    if scale.noise:
        moved = scale.modulo(with_noise(moved, scale.deviation, drawn))
    return np.concatenate([moved, told])


def _point_words(task: SummedFit, mine: TrainedChoice, drawn: RandomStream) -> Words:
    """[restarts, K] counts, or for each centroid [difference, squared distance, 1]."""
    if task.points is None or task.points_open is None:
        raise Malformed("bad_task", "no centroids")
    runs, k, width = task.points.shape
    point = compared(task, mine.models)[0].astype(np.float64)
    apart = point - task.points
    d2 = np.where(task.points_open, np.einsum("rkd,rkd->rk", apart, apart), np.inf)
    labels = d2.argmin(axis=1)
    if task.dealt:
        lots = np.random.Generator(np.random.PCG64(np.random.SeedSequence(task.seed, spawn_key=(2,))))
        dealt = lots.integers(k, size=runs)
        labels = np.where(task.points_open[np.arange(runs), dealt], dealt, labels)
    if task.stage == "count":
        counted: Words = np.eye(k, dtype=np.uint32)[labels].ravel()
        return counted
    scale, out = task.scale, np.zeros((runs, k, width + 2), dtype=np.uint32)
    for r, label in enumerate(labels):
        if not task.points_open[r, label]:
            continue
        moved = clipped(apart[r, label], scale.clip) / scale.clip
        out[r, label, :-1] = scale.to_words(np.append(moved, moved @ moved), drawn)
        out[r, label, -1] = 1
    return out.ravel()


def evaluation_words(
    learner: Learner,
    task: SummedProbe,
    local: DeviceData,
    *,
    own: Callable[[str], Flat | None],
    drawn: RandomStream,
) -> Reply:
    """The words of an evaluation: how many samples are right, how many there are, accuracy, F1, and one device."""
    choice = own(CHOICE_SLOT)
    if choice is not None and len(choice) != len(task.models):
        choice = None  # among the spare centers of the first round: the device missed their end
    models: Sequence[Flat | OwnModel] = task.models
    prior = task.prior
    if task.served == "center":
        models, prior = [models[task.usual if choice is None else int(np.argmax(choice))]], None
    elif task.served == "mixture":
        share = np.ones(len(models)) if choice is None else choice
        prior = (share / share.sum()).tolist()
    probe = Probe(
        models=models,
        prior=prior,
        want=frozenset({"confusion"}),
        split=task.split,
        batch=task.batch,
        seed=task.seed,
        limit=task.limit,
        buffers=task.buffers,
    )
    reply = run_probe(learner, probe, local, own=own)
    if reply.confusion is None:
        raise Malformed("bad_task", "an evaluation counts a confusion matrix")
    matrix = reply.confusion[0]
    if not matrix.any():  # each position is to be ignored; of no samples an accuracy is no number
        raise Malformed("no_data", "no held-out sample on this device has a label")
    occurs = matrix.sum(axis=0) + matrix.sum(axis=1)
    f1 = np.mean(2 * np.diag(matrix)[occurs > 0] / occurs[occurs > 0])
    right, total = np.trace(matrix), matrix.sum()
    scores = np.floor(np.array([right / total, f1]) * SCORE_LEVELS + drawn.random(2))
    return Reply(n=1, words=np.array([right, total, *scores, 1]).astype(np.uint32))
