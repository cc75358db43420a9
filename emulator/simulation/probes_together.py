"""Probes of many devices, whose models are evaluated together where the learner can: one pass instead of one a device.

A probe is run twice: first to learn what it evaluates, then with the answer. What it does beside that is little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeGuard, TypeVar

from edge_client.data.dataset import Dataset
from edge_client.protocol.task import F64, Array, ClientId, Flat, Probe
from edge_client.training.learner import Evaluation, Learner

Answered = TypeVar("Answered")


class EvaluatesTogether(Learner, Protocol):
    """A learner that is faster with several evaluations at once, as the emulator's on a GPU; see `Learner.evaluate`."""

    def evaluate_each(self, asked: Sequence[Evaluation], *, batch: int) -> list[tuple[F64, Array]]:
        """-> losses [M, n] float64 and logits [M, n, *target] of each."""
        ...


def _evaluates_together(learner: Learner) -> TypeGuard[EvaluatesTogether]:
    """As `isinstance` of a protocol with data would say, which takes 10 µs, at each answer of a device."""
    return hasattr(learner, "evaluate_each")


class _Asked(Exception):
    """What a probe wants evaluated."""

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__()
        self.evaluation = evaluation


class _OneEvaluation:
    """The learner, but for its first evaluation: that has the `answer`, or raises `_Asked` where there is none yet."""

    def __init__(self, learner: Learner, answer: tuple[F64, Array] | None = None) -> None:
        self.program, self.fixed_batch = learner.program, learner.fixed_batch
        self.train, self.gradient = learner.train, learner.gradient
        self._learner, self._answer, self._first = learner, answer, True

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:
        first, self._first = self._first, False
        if not first:
            return self._learner.evaluate(models, data, batch=batch)
        if self._answer is None:
            raise _Asked((models, data))
        return self._answer


def probes_for(learner: Learner, probes: Mapping[ClientId, Probe]) -> dict[ClientId, Probe]:
    """The probes as this learner is to run them: one pass over all models and samples leaves none of them out."""
    together = _evaluates_together(learner)
    return {who: replace(probe, least=False) if together and probe.least else probe for who, probe in probes.items()}


def run_probes(
    learner: Learner, probes: Mapping[ClientId, Probe], run: Callable[[Learner, ClientId], Answered]
) -> Iterator[tuple[ClientId, Answered]]:
    """`run(learner, device)` of each device. It asks that learner alone, and may be run again from its start."""
    if not _evaluates_together(learner):
        yield from ((who, run(learner, who)) for who in probes)
        return
    asked: dict[ClientId, Evaluation] = {}
    for who, probe in probes.items():
        if probe.buffers == "batch":  # trains before it evaluates
            yield who, run(learner, who)
            continue
        try:
            yield who, run(_OneEvaluation(learner), who)
        except _Asked as wanted:
            asked[who] = wanted.evaluation
    for batch in {probes[who].batch for who in asked}:
        some = {who: evaluation for who, evaluation in asked.items() if probes[who].batch == batch}
        answers = learner.evaluate_each(list(some.values()), batch=batch)
        for who, answer in zip(some, answers, strict=True):
            yield who, run(_OneEvaluation(learner, answer), who)
