"""One device's words for a sum: its choice, its fits, once in a round, and its contribution.

The numbers are those of training/summed.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from edge_client.data.dataset import DeviceData
from edge_client.errors import Malformed
from edge_client.protocol.summed_task import SummedFit, SummedProbe, Words
from edge_client.protocol.task import F64, Array, Flat
from edge_client.training.fit_probe import run_fit
from edge_client.training.learner import Learner
from edge_client.training.skellam import secret_stream
from edge_client.training.summed import (
    CHOICE_SLOT,
    TrainedChoice,
    choose_after,
    choose_before,
    contribution,
    evaluation_words,
    next_fit,
    plain_fits,
)


@dataclass(frozen=True, kw_only=True)
class SummedMemory:
    """`trained` in this round, if it was; the last `choice` [K]; `own` gives the kept model of a slot, if any."""

    trained: TrainedChoice | None
    choice: F64 | None
    own: Callable[[str], Flat | None]


@dataclass(frozen=True, kw_only=True)
class SummedAnswer:
    """The words of a device, and what it keeps: `own` is (slot, model [schema.size]) where it has trained one."""

    words: Words
    trained: TrainedChoice | None = None
    choice: F64 | None = None
    own: tuple[str, Flat] | None = None


def add_words(
    learner: Learner,
    task: SummedFit | SummedProbe,
    local: DeviceData,
    memory: SummedMemory,
) -> SummedAnswer:
    """Carry one task out. Raises Malformed."""
    if isinstance(task, SummedProbe):
        own: Callable[[str], Flat | None] = lambda slot: memory.choice if slot == CHOICE_SLOT else memory.own(slot)  # noqa: E731
        return SummedAnswer(words=_words(evaluation_words(learner, task, local, own=own, drawn=secret_stream()).words))
    mine, kept = memory.trained, None
    if mine is None:
        mine, kept = _train(learner, task, local, memory)
    choice = memory.choice
    if task.stage in ("choose", "add") and task.choose != "given":
        if task.points is not None and task.stage == "choose":
            mine = choose_after(task, mine.models, None, None)
        choice = mine.kept(task.open)
    words = _words(contribution(task, mine, secret_stream()).words)
    return SummedAnswer(words=words, trained=mine, choice=choice, own=kept)


def _words(words: Array | None) -> Words:
    if words is None:
        raise Malformed("bad_task", "the task adds no words")
    return words


def _train(
    learner: Learner, task: SummedFit, local: DeviceData, memory: SummedMemory
) -> tuple[TrainedChoice, tuple[str, Flat] | None]:
    """The trained models with the choice, and the model that the device keeps as its own."""
    shares: list[F64] = []
    scores, models = choose_before(learner, task, local, memory.choice, shares.append), list[Flat]()
    for fit in plain_fits(task, scores, memory.choice):
        now = replace(fit, upload=True)
        for again in range(task.repeats):
            posterior = shares[0] if shares else None
            vector = run_fit(learner, now, local.train, own=memory.own(now.slot), posterior=posterior).vector.astype(
                np.float32
            )
            if again + 1 < task.repeats or task.move < 1:
                now, moved = next_fit(now, vector, task.move)
                kept, vector = vector, moved
            else:
                kept = vector
        models.append(vector)
    own = (task.slot, kept) if len(models) == 1 else None
    return choose_after(task, np.stack(models), scores, memory.choice), own
