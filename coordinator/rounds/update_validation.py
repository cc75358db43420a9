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

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from coordinator.rounds.buffer_bounds import bounded_buffers
from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.nearest.answer_moments import MAX_CLASSES, AnswerLook, vector_size
from edge_client.protocol.nearest.input_moments import InputMoments
from edge_client.protocol.sum_codec import SumStage
from edge_client.protocol.task import Array, ClientId, Fit, Flat, Probe, Reply, Schema, Task

MAX_UPDATE_RMS = 10.0  # root mean square over the parameters; training does not move a model so far
MAX_UPDATE_RATIO = 10.0  # times the run's scale; an honest device, new or in the wrong center, moves a few scales
MAX_PARAMETER_MOVE = 200.0  # of one parameter; honest ones moved by 22 at most (docs/hostile-devices.md)
FAR_UPDATES = "a learning rate that is too large does this, columns or targets that are not scaled, or a hostile device"
_MARGINS = {"peak": 2.0, "buffers": 10.0}  # times the ratio
_MOVED = {"": "moved", "peak": "one parameter moved", "buffers": "buffers moved"}
MIN_UPDATES_FOR_MEDIAN = 3  # of fewer updates the median says nothing
ZERO_BASE = "zero"  # the base of a delta that is the model itself
_LOSS = frozenset({"loss"})  # the reply to a fit whose model stays on the device
STATISTICS_BYTES = 1 << 15  # of any statistics: the header, 2,415 moments of inputs, six numbers of each of 16 models
MAX_LABEL_COUNT = 2.0**31  # samples of one class: no device has more in all
_ROUNDING = 1e-6  # tolerance of a sum of shares


@dataclass(frozen=True, kw_only=True)
class AskedStage(SumStage):
    """A stage of a masked sum, and how its answer is read; a quorum is asked of the first stage only.

    `spare`: how many devices each sum may lose in this stage and still be made; None: as many as any exchange.
    """

    decode: Callable[[bytes], Reply]  # raises Malformed
    max_bytes: int
    needs_quorum: bool = False
    spare: int | None = None


Asked = Task | AskedStage


@dataclass(frozen=True, kw_only=True)
class ReplySpec:
    """What one device was asked, and what its reply has to look like.

    `base` is the sha256 of the blob that the delta is taken from, or "zero"; `base_vector` [schema.size] float32 is
    that blob as decoded. `samples` is the number of training samples that the device was enrolled with, and
    `max_samples` the most that count of any device (sample_weights.py); both bound its weight. `classes` is the
    program's number of classes; None: statistics may be of any number. `positions`: how many labels a sample has.
    """

    task: Asked
    schema: Schema
    samples: int
    codec: str
    base: str
    base_vector: Flat | None
    max_update_rms: float
    max_samples: float = math.inf
    classes: int | None = None
    positions: int = 1

    @property
    def blob_kind(self) -> str:
        if isinstance(self.task, AskedStage):
            return "masked"
        return "delta" if isinstance(self.task, Fit) and self.task.upload else "stats"

    @property
    def vector(self) -> str:
        """The field of the reply that holds a vector of the model's size, "update" or "grad"; "" if none does."""
        if isinstance(self.task, Probe) and "grad" in self.task.want:
            return "grad"
        return "update" if self.blob_kind == "delta" else ""

    def samples_that_count(self, n: int) -> int:
        """So many of the `n` samples that the device claims weigh its reply."""
        return int(min(_counted(self, n), self.max_samples))


def max_reply_bytes(question: ReplySpec) -> int:
    """The most bytes that the reply needs: so many of the uploads' budget can one device take."""
    task, schema = question.task, question.schema
    if isinstance(task, AskedStage):
        return task.max_bytes
    if question.blob_kind == "delta":
        return codecs.max_file_bytes(schema, question.codec)
    want, models = (task.want, len(task.models)) if isinstance(task, Probe) else (_LOSS, 1)
    classes = question.classes or 0
    matrices = models * classes**2 if "confusion" in want else 0
    answers = models * (1 + 2 * vector_size(min(classes, MAX_CLASSES))) if "answers" in want else 0
    gradient = codecs.max_file_bytes(schema, "f32") if "grad" in want else 0
    return STATISTICS_BYTES + 8 * (classes + matrices + answers) + gradient


def decode_reply(question: ReplySpec, data: bytes, n: int) -> Reply:
    """Decode and validate the bytes of a reply; `n` is the sample count that the device claims. Raises Malformed."""
    task = question.task
    if isinstance(task, AskedStage):
        return task.decode(data)
    if question.vector == "update":
        return validate_reply(question, Reply(n=n, update=_updated(question, data)))
    return validate_reply(
        question, codecs.decode_stats(data, question.schema, _counted(question, n), positions=question.positions)
    )


def decode_accepted(question: ReplySpec, data: bytes, n: int) -> Reply:
    """What `decode_reply` gives for bytes that it has accepted; an update is not measured again."""
    if question.vector != "update":
        return decode_reply(question, data, n)
    update = bounded_buffers(_updated(question, data), question.base_vector, question.schema)
    return Reply(n=question.samples_that_count(n), update=update)


def validate_reply(question: ReplySpec, reply: Reply) -> Reply:
    """The reply with the `n` that counts, and counts that add up to it. Raises Malformed.

    A reply is weighted by its samples. Those that train are at most the number that the device was enrolled with; of
    them, and of held-out samples, `max_samples` count at most.
    """
    schema = question.schema
    reply = replace(reply, n=_counted(question, reply.n))
    if question.vector == "update":
        if reply.update is None or reply.update.shape != (schema.size,):
            raise Malformed("bad_schema", f"a fit is answered by a model of {schema.size} values")
        if not np.isfinite(reply.update).all():
            raise Malformed("not_finite", "the updated model is not finite")
        reply = replace(reply, update=bounded_buffers(reply.update, question.base_vector, schema))
    else:
        _check_stats(question, reply)
    for kind, size in update_moves(question, reply).items():
        limits = {"": question.max_update_rms, "peak": MAX_PARAMETER_MOVE}
        what, _, suffix = kind.partition(" ")
        if what != "model" and size > limits.get(suffix, math.inf):
            raise Malformed("rejected", f"{_MOVED[suffix]} by {size:.3g}, at most {limits[suffix]:g}")
    return _weighed(question, reply)


def _weighed(question: ReplySpec, reply: Reply) -> Reply:
    """The reply with at most `max_samples` samples; counts and moments shrink to them, shares and means stay."""
    n = question.samples_that_count(reply.n)
    confusion, labels, inputs, answers = reply.confusion, reply.labels, reply.inputs, reply.answers
    share = n / reply.n if n < reply.n else 1
    confusion = None if confusion is None else confusion * share
    positions = None if reply.positions is None else reply.positions * share
    if labels is not None:  # of a device that has more samples than it joined with, or claims more
        total = float(labels.sum())
        labels = labels * (n / total) if total > n else labels
    if inputs is not None:
        moments = InputMoments.from_vector(inputs)
        inputs = moments.at_most(int(min(moments.n, question.max_samples))).to_vector()
    if answers is not None:
        looks = (AnswerLook.from_vector(row) for row in answers)
        answers = np.stack([look.at_most(question.max_samples).to_vector() for look in looks])
    weighed = replace(reply, n=n, confusion=confusion, positions=positions, labels=labels, inputs=inputs)
    return replace(weighed, answers=answers)


def delta_base(task: Asked) -> tuple[str, Flat | None]:
    """-> what a delta is taken from: its name in the task, and its values as the device decodes them.

    The base is the start; if the start stays on the device it is the anchor, else zero.
    """
    if isinstance(task, Fit) and task.upload:
        if isinstance(task.start, np.ndarray):
            return "start", task.start.astype(np.float32, copy=False)
        if task.anchor is not None:
            return "anchor", task.anchor.astype(np.float32, copy=False)
    return "zero", None


def update_moves(question: ReplySpec, reply: Reply) -> dict[str, float]:
    """How far a reply's vector moves, by kind; empty for a reply without a vector.

    "delta" (from the base), "model" (without a base) and "grad" (the move of a step of length one) are root mean
    squares over the parameters. With " peak" behind it, a kind is the greatest move of one parameter, and with
    " buffers" the root mean square over the buffers.
    """
    what, move = "grad", reply.grad
    if reply.update is not None:
        base = question.base_vector
        what, move = ("model", reply.update) if base is None else ("delta", reply.update - base)
    if move is None:
        return {}
    border = question.schema.n_params
    parameters, buffers = (part.astype(np.float64) for part in np.split(move, [border]))
    moves = {what: _rms(parameters), f"{what} peak": float(np.abs(parameters).max(initial=0.0))}
    return moves | ({f"{what} buffers": _rms(buffers)} if buffers.size else {})


def outliers(
    moves: Mapping[ClientId, Mapping[str, float]], scales: Mapping[str, float], *, ratio: float
) -> tuple[dict[ClientId, str], dict[str, float]]:
    """-> the devices that moved more than `ratio` times the scale of a kind, with the reason; and the new scales.

    A kind's scale is the greatest median of an exchange's moves so far in this run, this exchange included. The median
    of this exchange alone would not do: where nearly all devices have converged, a device that still learns, is new or
    has the wrong center moves many times further than the median without being hostile. A median is within the honest
    moves while fewer than half of the devices are hostile; of fewer than three moves it says nothing.
    """
    refused: dict[ClientId, str] = {}
    known = dict(scales)
    for what in sorted({what for kinds in moves.values() for what in kinds}):
        far = {who: kinds[what] for who, kinds in sorted(moves.items()) if what in kinds}
        if len(far) >= MIN_UPDATES_FOR_MEDIAN:
            known[what] = max(known.get(what, 0.0), float(np.median(list(far.values()))))
        scale, suffix = known.get(what, 0.0), what.partition(" ")[2]
        most = ratio * _MARGINS.get(suffix, 1.0)
        reason = f"rejected: {_MOVED[suffix]} {{:.3g}} times as far as is usual in this run, at most {most:g}"
        refused |= {who: reason.format(one / scale) for who, one in far.items() if 0 < scale < one / most}
    return refused, known


def _rms(move: Flat) -> float:
    with np.errstate(over="ignore"):  # an overflow to infinity is refused like any large value
        return float(np.sqrt(np.mean(move**2)))


def _counted(question: ReplySpec, n: int) -> int:
    task = question.task
    return n if isinstance(task, Probe) and task.split != "train" else min(n, question.samples)


def _updated(question: ReplySpec, data: bytes) -> Flat:
    """The fitted model [schema.size]: base + delta, both float32, as the simulation computes it."""
    delta = codecs.decode_vector(data, question.schema, kind="delta", codec=question.codec, base=question.base)
    base = question.base_vector
    with np.errstate(over="ignore"):  # `validate_reply` refuses infinities
        update: Flat = delta if base is None else base + delta
    return update


def _check_stats(question: ReplySpec, reply: Reply) -> None:
    """Require exactly the quantities that were asked for, in the shapes of the task; of a fit, its mean loss."""
    task, schema = question.task, question.schema
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
        "errors": reply.errors,
        "positions": reply.positions,
        "labels": reply.labels,
        "inputs": reply.inputs,
        "answers": reply.answers,
    }
    given = {name for name, value in answers.items() if value is not None}
    if given != want:
        raise Malformed("bad_schema", f"statistics hold {sorted(given)}, asked for {sorted(want)}")
    for name in ("loss", "votes", "posterior"):
        value = answers[name]
        if value is not None:
            _check_shape(name, value, (models,))
    if reply.answers is not None:
        classes = question.classes or MAX_CLASSES
        _check_shape("answers", reply.answers, (models, 1 + 2 * vector_size(classes)))
    if reply.grad is not None:
        _check_shape("gradient", reply.grad, (schema.n_params,))
    _check_counts(question, reply, rows)
    if reply.posterior is not None and abs(float(reply.posterior.sum()) - 1) > _ROUNDING:
        raise Malformed("rejected", f"mean responsibilities sum to {reply.posterior.sum():.6g}, not to 1")


def _check_counts(question: ReplySpec, reply: Reply, rows: int) -> None:
    """Require counts of the program's classes, or of one number of classes where the program is not known."""
    if reply.confusion is not None:
        classes = question.classes or reply.confusion.shape[-1]
        _check_shape("confusion", reply.confusion, (rows, classes, classes))
        _check_total(reply.confusion.reshape(rows, -1), reply.n, question.positions)
    for name, scores in (("errors", reply.errors), ("positions", reply.positions)):
        if scores is not None:
            _check_shape(name, scores, (rows, codecs.SCORES))
    codecs.check_scores(reply.errors, reply.positions, reply.n * question.positions)
    if reply.labels is not None:
        _check_shape("labels", reply.labels, (question.classes or len(reply.labels),))
        if reply.labels.max() > MAX_LABEL_COUNT or reply.labels.sum() <= 0:
            raise Malformed("rejected", "label counts are the samples of each class, and some are positive")
    if reply.votes is not None:  # a sample votes unless all its positions are ignored; one at least does
        voted = reply.n if question.positions == 1 else int(np.clip(reply.votes.sum(), 1, reply.n))
        _check_total(reply.votes[None], voted)


def _check_shape(name: str, value: Array, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise Malformed("bad_schema", f"{name} has shape {value.shape}, expected {shape}")


def _check_total(counts: Array, n: int, positions: int = 1) -> None:
    """Require counts that are not negative and whose rows each add up to the `n` samples that were claimed.

    Of several positions in a sample some may be ignored: then all rows add up to the same number, at most all of them.
    """
    total, most = counts.sum(axis=1, dtype=np.float64), n * positions
    right = total == n if positions == 1 else (total == total[0]) & (total <= most)
    if (counts < 0).any() or (counts > most).any() or not right.all():
        raise Malformed("rejected", f"counts do not add up to the {n} samples claimed")
