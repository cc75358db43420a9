"""Is this answer acceptable: schema, codec, finite, a plausible norm, and what was asked for. Pure.

`admit` turns bytes that are already known to have the announced hash into a `Reply`, or raises Malformed with the code
that the `ack` carries. The same function reads a stored reply again in a replay, so both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import compress
from edge_client.protocol.task import Array, Fit, Flat, Probe, Reply, Schema, Task

ZERO = "zero"  # the base of a delta that is no difference
_LOSS = frozenset({"loss"})  # what answers a fit whose model stays on the device
_ROUNDING = 1e-6  # of a sum of shares


@dataclass(frozen=True, kw_only=True)
class Question:
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
    def what(self) -> str:
        """The kind of blob that answers."""
        return "delta" if isinstance(self.task, Fit) and self.task.upload else "stats"


def admit(question: Question, data: bytes, n: int) -> Reply:
    """Bytes and the number of samples that the device claims -> its reply. Raises Malformed.

    Training samples weigh a reply, so that no device may claim more of them than it was enrolled with.
    """
    task = question.task
    if isinstance(task, Fit) or task.split == "train":
        n = min(n, question.samples)
    if isinstance(task, Fit) and task.upload:
        return Reply(n=n, update=_updated(question, data))
    reply = compress.decode_stats(data, question.schema, n)
    _check_stats(task, question.schema, reply)
    if reply.grad is not None:
        _check_move(reply.grad, question)
    return reply


def _updated(question: Question, data: bytes) -> Flat:
    """The fitted model [schema.size]: base + delta, both float32, as the simulation computes it."""
    delta = compress.decode(data, question.schema, kind="delta", codec=question.codec, base=question.base)
    base = question.base_vector
    if base is not None:
        _check_move(delta[: question.schema.n_params], question)
    with np.errstate(over="ignore"):  # found below
        update: Flat = delta if base is None else base + delta
    if not np.isfinite(update).all():
        raise Malformed("not_finite", "the updated model is not finite")
    return update


def _check_move(move: Flat, question: Question) -> None:
    """How far an update moves the parameters, or a gradient would in a step of length 1: [n_params]."""
    rms = float(np.sqrt(np.mean(move.astype(np.float64) ** 2)))
    if rms > question.max_update_rms:
        raise Malformed("rejected", f"parameters moved by {rms:.3g} on average, at most {question.max_update_rms:g}")


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
