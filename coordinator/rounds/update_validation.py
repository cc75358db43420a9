"""Is this answer acceptable: schema, codec, finite, a plausible norm, and what was asked for. Pure.

`decode_reply` turns bytes that are already known to have the announced hash into a `Reply`, or raises Malformed with
the code that the `ack` carries. The same function reads a stored reply again in a replay, so both give the same bits.
`validate_reply` is the part of it that looks at numbers, for replies that never were bytes: those of emulated devices.

Whether an update is far out of line with the others' is decided when the exchange closes (`outliers`), not when it
arrives: a bound that followed the updates as they come would refuse or take the same update by who was faster. At the
closing it is a function of the set of replies and of the scale that earlier closings left. The closing stores who
stayed and the new scale together, so a replay reads the decision and never makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.task import Array, ClientId, Fit, Flat, Probe, Reply, Schema, Task

MAX_UPDATE_RMS = 10.0  # a parameter that moves further than this on average was not trained, but broken
MAX_UPDATE_RATIO = 10.0  # times the scale of the cohort; an honest device that is new or misplaced moves some scales
MIN_UPDATES_FOR_MEDIAN = 3  # updates have a middle from here on
ZERO_BASE = "zero"  # the base of a delta that is no difference
_LOSS = frozenset({"loss"})  # what answers a fit whose model stays on the device
_ROUNDING = 1e-6  # of a sum of shares


@dataclass(frozen=True, kw_only=True)
class ReplySpec:
    """What one device was asked, and how its answer has to look.

    `base` is the sha256 of the blob that the delta is taken from, or "zero"; `base_vector` [schema.size] float32 is
    that blob as decoded. `samples` is the number of training samples that the device was
    enrolled with: its largest weight.
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
        """The kind of blob that answers."""
        return "delta" if isinstance(self.task, Fit) and self.task.upload else "stats"


def decode_reply(question: ReplySpec, data: bytes, n: int) -> Reply:
    """Bytes and the number of samples that the device claims -> its reply. Raises Malformed."""
    task = question.task
    if isinstance(task, Fit) and task.upload:
        return validate_reply(question, Reply(n=n, update=_updated(question, data)))
    return validate_reply(question, codecs.decode_stats(data, question.schema, _counted(question, n)))


def validate_reply(question: ReplySpec, reply: Reply) -> Reply:
    """The reply as it counts. Raises Malformed.

    Training samples weigh a reply, so that no device may claim more of them than it was enrolled with.
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
    how_far = update_rms(question, reply)
    if how_far is not None and how_far[0] != "model" and how_far[1] > question.max_update_rms:
        said = f"parameters moved by {how_far[1]:.3g} on average, at most {question.max_update_rms:g}"
        raise Malformed("rejected", said)
    return reply


def delta_base(task: Task) -> tuple[str, Flat | None]:
    """-> (the word for it in the task, its values as the device decodes them) of what a delta is taken from.

    That is the start; where the start stays on the device, the anchor, else nothing.
    """
    if isinstance(task, Fit) and task.upload:
        if isinstance(task.start, np.ndarray):
            return "start", task.start.astype(np.float32, copy=False)
        if task.anchor is not None:
            return "anchor", task.anchor.astype(np.float32, copy=False)
    return "zero", None


def update_rms(question: ReplySpec, reply: Reply) -> tuple[str, float] | None:
    """What a reply moves and how far, as a root of a mean square over the parameters; None for mere statistics.

    "delta" from the base, a whole "model" where there is none, or "grad": what a step of length one would move.
    """
    what, move = "grad", reply.grad
    if reply.update is not None:
        base = question.base_vector
        what, move = ("model", reply.update) if base is None else ("delta", reply.update - base)
    if move is None:
        return None
    with np.errstate(over="ignore"):  # infinitely far is too far
        return what, float(np.sqrt(np.mean(move[: question.schema.n_params].astype(np.float64) ** 2)))


def outliers(
    moves: Mapping[ClientId, tuple[str, float]], scales: Mapping[str, float], *, ratio: float
) -> tuple[dict[ClientId, str], dict[str, float]]:
    """Who moved more than `ratio` times the scale of its kind, each with the reason; and the scales for what follows.

    A kind's scale is the greatest median of an exchange's moves so far in this run, this exchange included. Not this
    exchange's alone: where nearly all devices have converged, one that still learns, is new, or sits with the wrong
    center moves many times further than the median, and that is not an attack. A median is within the honest moves
    while fewer than half of the devices are hostile; of fewer than three moves it says nothing.
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
    with np.errstate(over="ignore"):  # `validate_reply` finds it
        update: Flat = delta if base is None else base + delta
    return update


def _check_stats(task: Task, schema: Schema, reply: Reply) -> None:
    """Everything that was wanted, nothing else, in the shapes of the question; of a fit, its mean loss."""
    want, models, rows = _LOSS, 1, 1
    if isinstance(task, Probe):
        want, models = task.want, len(task.models)
        rows = 1 if task.prior is not None else models  # with a prior the mixture of all is what gets counted
    answers: dict[str, Array | None] = {
        "loss": reply.losses,
        "votes": reply.votes,
        "posterior": reply.posterior,
        "grad": reply.grad,
        "confusion": reply.confusion,
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
    if reply.votes is not None:
        _check_total(reply.votes[None], reply.n)
    if reply.posterior is not None and abs(float(reply.posterior.sum()) - 1) > _ROUNDING:
        raise Malformed("rejected", f"mean responsibilities sum to {reply.posterior.sum():.6g}, not to 1")


def _check_counts(confusion: Array, rows: int, n: int) -> None:
    if confusion.ndim != 3 or confusion.shape[0] != rows or confusion.shape[1] != confusion.shape[2]:  # noqa: PLR2004
        raise Malformed("bad_schema", f"confusion has shape {confusion.shape}, expected ({rows}, classes, classes)")
    _check_total(confusion.reshape(rows, -1), n)


def _check_total(counts: Array, n: int) -> None:
    """Counts of samples: none negative, each row adding up to the `n` samples that were claimed."""
    if (counts < 0).any() or (counts > n).any() or (counts.sum(axis=1) != n).any():
        raise Malformed("rejected", f"counts do not add up to the {n} samples claimed")
