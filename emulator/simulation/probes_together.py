"""Probes of many devices, whose models are evaluated together where the learner can: one pass instead of one a device.

A probe is run twice: first to learn what it evaluates, then with the answer. What it does beside that is little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from edge_client.data.dataset import Dataset
from edge_client.protocol.program import Program
from edge_client.protocol.task import F64, Array, ClientId, Flat, Probe
from edge_client.training.learner import EvaluatesTogether, Evaluation, Learner, TrainedModel, TrainingJob

Answered = TypeVar("Answered")


class _Delegating:
    """The learner, but for its evaluations."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @property
    def program(self) -> Program:
        return self._learner.program

    @property
    def fixed_batch(self) -> int | None:
        return self._learner.fixed_batch

    def train(self, jobs: Sequence[TrainingJob], between: Callable[[], None] = lambda: None) -> Iterator[TrainedModel]:
        return self._learner.train(jobs, between)

    def gradient(self, model: Flat, data: Dataset, *, batch: int, seed: int) -> Flat:
        return self._learner.gradient(model, data, batch=batch, seed=seed)


class _Asked(Exception):
    """What a probe wants evaluated."""

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__()
        self.evaluation = evaluation


class _Asking(_Delegating):
    """Raises `_Asked` at the first evaluation."""

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:  # noqa: ARG002
        raise _Asked((models, data))


class _Answering(_Delegating):
    """Has the answer to the first evaluation; the learner does those that follow."""

    def __init__(self, learner: Learner, answer: tuple[F64, Array]) -> None:
        super().__init__(learner)
        self._answers = [answer]

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:
        return self._answers.pop() if self._answers else self._learner.evaluate(models, data, batch=batch)


def run_probes(
    learner: Learner, probes: Mapping[ClientId, Probe], run: Callable[[Learner, ClientId], Answered]
) -> Iterator[tuple[ClientId, Answered]]:
    """`run(learner, device)` of each device. It asks that learner alone, and may be run again from its start."""
    if not isinstance(learner, EvaluatesTogether):
        yield from ((who, run(learner, who)) for who in probes)
        return
    asked: dict[ClientId, Evaluation] = {}
    for who, probe in probes.items():
        if probe.buffers == "batch":  # trains before it evaluates
            yield who, run(learner, who)
            continue
        try:
            yield who, run(_Asking(learner), who)
        except _Asked as wanted:
            asked[who] = wanted.evaluation
    for batch in {probes[who].batch for who in asked}:
        some = {who: evaluation for who, evaluation in asked.items() if probes[who].batch == batch}
        answers = learner.evaluate_each(list(some.values()), batch=batch)
        for who, answer in zip(some, answers, strict=True):
            yield who, run(_Answering(learner, answer), who)
