"""Validates a reply: schema, codec, finite values, a plausible norm, and the quantities that were asked for. Pure.

`decode_reply` turns bytes whose hash was checked into a `Reply`, or raises Malformed with the code that the `ack`
carries. A replay reads a stored reply with the same function, so both give the same bits. `validate_reply` is the part
of it that checks values, for the replies of emulated devices, which never were bytes.

Outliers are found when the exchange closes (`outliers`), not when an update arrives: a bound that followed the updates
in their order of arrival would accept or refuse the same update depending on the order. At the closing the decision is
a function of the set of replies and of the scales that earlier closings left. The closing stores the remaining replies
and the new scales together, so that a replay reads the decision instead of making it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.task import Array, ClientId, Fit, Flat, Probe, Reply, Schema, Task

MAX_UPDATE_RMS = 10.0  # root mean square over the parameters; training does not move a model so far
MAX_UPDATE_RATIO = (
    10.0  # times the scale of the run; an honest device that is new or in the wrong center moves a few scales
)
MIN_UPDATES_FOR_MEDIAN = 3  # of fewer updates the median says nothing
ZERO_BASE = "zero"  # the base of a delta that is the model itself
_LOSS = frozenset({"loss"})  # the reply to a fit whose model stays on the device
_ROUNDING = 1e-6  # tolerance of a sum of shares


@dataclass(frozen=True, kw_only=True)
class ReplySpec:
    """What one device was asked, and what its reply has to look like.

    `base` is the sha256 of the blob that the delta is taken from, or "zero"; `base_vector` [schema.size] float32 is
    that blob as decoded. `samples` is the number of training samples that the device was
    enrolled with, which bounds its weight.
    """

    task: Task
    schema: Schema
    samples: int
    codec: str
    base: str
    base_vector: Flat | None
    max_update_rms: float

    @property
    def blob_kind(self) -> str:
        return "delta" if isinstance(self.task, Fit) and self.task.upload else "stats"


def decode_reply(question: ReplySpec, data: bytes, n: int) -> Reply:
    """Decode and validate the bytes of a reply; `n` is the sample count that the device claims. Raises Malformed."""
    task = question.task
    if isinstance(task, Fit) and task.upload:
        return validate_reply(question, Reply(n=n, update=_updated(question, data)))
    return validate_reply(question, codecs.decode_stats(data, question.schema, _counted(question, n)))


def validate_reply(question: ReplySpec, reply: Reply) -> Reply:
    """The reply with the `n` that counts. Raises Malformed.

    A reply is weighted by its training samples, so `n` is at most the number that the device was enrolled with.
    """
    task, schema = question.task, question.schema
    reply = replace(reply, n=_counted(question, reply.n))
    if isinstance(task, Fit) and task.upload:
        if reply.update is None or reply.update.shape != (schema.size,):
            raise Malformed("bad_schema", f"a fit is answered by a model of {schema.size} values")
        if not np.isfinite(reply.update).all():
            raise Malformed("not_finite", "the updated model is not finite")
    else:
        _check_stats(task, schema, reply)
        if reply.labels is not None:  # of a device that has more samples than it joined with, or claims more
            reply = replace(reply, labels=reply.labels * min(1.0, reply.n / reply.labels.sum()))
    how_far = update_rms(question, reply)
    if how_far is not None and how_far[0] != "model" and how_far[1] > question.max_update_rms:
        said = f"parameters moved by {how_far[1]:.3g} on average, at most {question.max_update_rms:g}"
        raise Malformed("rejected", said)
    return reply


def delta_base(task: Task) -> tuple[str, Flat | None]:
    """-> what a delta is taken from: its name in the task, and its values as the device decodes them.

    The base is the start; if the start stays on the device it is the anchor, else zero.
    """
    if isinstance(task, Fit) and task.upload:
        if isinstance(task.start, np.ndarray):
            return "start", task.start.astype(np.float32, copy=False)
        if task.anchor is not None:
            return "anchor", task.anchor.astype(np.float32, copy=False)
    return "zero", None


def update_rms(question: ReplySpec, reply: Reply) -> tuple[str, float] | None:
    """The kind of a reply's vector and its root mean square over the parameters; None for a reply without a vector.

    The kinds are "delta" (from the base), "model" (without a base) and "grad" (the move of a step of length one).
    """
    what, move = "grad", reply.grad
    if reply.update is not None:
        base = question.base_vector
        what, move = ("model", reply.update) if base is None else ("delta", reply.update - base)
    if move is None:
        return None
    with np.errstate(over="ignore"):  # an overflow to infinity is refused like any large value
        return what, float(np.sqrt(np.mean(move[: question.schema.n_params].astype(np.float64) ** 2)))


def outliers(
    moves: Mapping[ClientId, tuple[str, float]], scales: Mapping[str, float], *, ratio: float
) -> tuple[dict[ClientId, str], dict[str, float]]:
    """-> the devices that moved more than `ratio` times the scale of their kind, with the reason; and the new scales.

    A kind's scale is the greatest median of an exchange's moves so far in this run, this exchange included. The median
    of this exchange alone would not do: where nearly all devices have converged, a device that still learns, is new or
    has the wrong center moves many times further than the median without being hostile. A median is within the honest
    moves while fewer than half of the devices are hostile; of fewer than three moves it says nothing.
    """
    refused: dict[ClientId, str] = {}
    known = dict(scales)
    for what in sorted({what for what, _ in moves.values()}):
        far = {who: rms for who, (kind, rms) in sorted(moves.items()) if kind == what}
        if len(far) >= MIN_UPDATES_FOR_MEDIAN:
            known[what] = max(known.get(what, 0.0), float(np.median(list(far.values()))))
        scale = known.get(what, 0.0)
        reason = f"rejected: moved {{:.3g}} times as far as is usual in this run, at most {ratio:g}"
        refused |= {who: reason.format(rms / scale) for who, rms in far.items() if 0 < scale < rms / ratio}
    return refused, known


def _counted(question: ReplySpec, n: int) -> int:
    task = question.task
    return min(n, question.samples) if isinstance(task, Fit) or task.split == "train" else n


def _updated(question: ReplySpec, data: bytes) -> Flat:
    """The fitted model [schema.size]: base + delta, both float32, as the simulation computes it."""
    delta = codecs.decode_vector(data, question.schema, kind="delta", codec=question.codec, base=question.base)
    base = question.base_vector
    with np.errstate(over="ignore"):  # `validate_reply` refuses infinities
        update: Flat = delta if base is None else base + delta
    return update


def _check_stats(task: Task, schema: Schema, reply: Reply) -> None:
    """Require exactly the quantities that were asked for, in the shapes of the task; of a fit, its mean loss."""
    want, models, rows = _LOSS, 1, 1
    if isinstance(task, Probe):
        want, models = task.want, len(task.models)
        rows = 1 if task.prior is not None else models  # with a prior the mixture is counted as one model
    answers: dict[str, Array | None] = {
        "loss": reply.losses,
        "votes": reply.votes,
        "posterior": reply.posterior,
        "grad": reply.grad,
        "confusion": reply.confusion,
        "labels": reply.labels,
        "inputs": reply.inputs,
    }
    given = {name for name, value in answers.items() if value is not None}
    if given != want:
        raise Malformed("bad_schema", f"statistics hold {sorted(given)}, asked for {sorted(want)}")
    for name in ("loss", "votes", "posterior"):
        value = answers[name]
        if value is not None and value.shape != (models,):
            raise Malformed("bad_schema", f"{name} has shape {value.shape}, expected ({models},)")
    if reply.grad is not None and reply.grad.shape != (schema.n_params,):
        raise Malformed("bad_schema", f"gradient has shape {reply.grad.shape}, expected ({schema.n_params},)")
    if reply.confusion is not None:
        _check_counts(reply.confusion, rows, reply.n)
    if reply.labels is not None and (reply.labels.ndim != 1 or reply.labels.sum() <= 0):
        raise Malformed("rejected", "label counts are one positive number of samples of each class")
    if reply.votes is not None:
        _check_total(reply.votes[None], reply.n)
    if reply.posterior is not None and abs(float(reply.posterior.sum()) - 1) > _ROUNDING:
        raise Malformed("rejected", f"mean responsibilities sum to {reply.posterior.sum():.6g}, not to 1")


def _check_counts(confusion: Array, rows: int, n: int) -> None:
    if confusion.ndim != 3 or confusion.shape[0] != rows or confusion.shape[1] != confusion.shape[2]:  # noqa: PLR2004
        raise Malformed("bad_schema", f"confusion has shape {confusion.shape}, expected ({rows}, classes, classes)")
    _check_total(confusion.reshape(rows, -1), n)


def _check_total(counts: Array, n: int) -> None:
    """Require counts that are not negative and whose rows each add up to the `n` samples that were claimed."""
    if (counts < 0).any() or (counts > n).any() or (counts.sum(axis=1) != n).any():
        raise Malformed("rejected", f"counts do not add up to the {n} samples claimed")
