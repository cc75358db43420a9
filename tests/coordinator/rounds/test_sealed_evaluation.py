"""The test of a run on sums: one sum of what devices say, which tells of no device and of no center alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.metrics import CLASSES, Scoring
from coordinator.rounds.round import round_rng, run_round
from coordinator.rounds.sealed_evaluation import sealed_evaluation
from coordinator.strategies.base import Exchange, Replies, SealedSums, SumByCenter, drive
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.loss_starts import COUNTS_KEY
from edge_client.protocol.summed_task import SummedProbe
from edge_client.protocol.task import Task
from tests.coordinator.rounds.test_sealed_round import CLEAR, LOCAL, SMALL, Watched, trained
from tests.support.methods import build, world


def test_an_evaluation_is_one_sum() -> None:
    clear, sealed = world(build("ifca", CLEAR), LOCAL), world(build("ifca", {**SMALL, "secure": "updates"}), LOCAL)
    one, other = clear.round(), sealed.round()
    assert other.per_device == {}
    assert other.per_center == (None, None)
    assert other.accuracy.micro == one.accuracy.micro
    assert other.accuracy.macro == pytest.approx(one.accuracy.macro, abs=1e-3)  # a score is off by one level at most
    assert other.f1_of_devices.macro == pytest.approx(one.f1_of_devices.macro, abs=1e-3)
    assert other.f1_pooled is None  # it needs counts of labels


@pytest.mark.parametrize(("counts", "usual"), [(None, 0), ((3, 9), 1), ((9, 3), 0)])
def test_a_device_without_a_choice_is_evaluated_with_the_center_of_most_devices(
    counts: tuple[int, int] | None, usual: int
) -> None:
    made = trained("ifca", "updates", rounds=0)
    assert isinstance(made.strategy, LocalSgd)
    extra = dict(made.state.extra) | ({} if counts is None else {COUNTS_KEY: np.array(counts)})
    exchanges = sealed_evaluation(
        made.strategy, replace(made.state, extra=extra), made.fleet, sorted(made.fleet), batch=8, last=True
    )
    works = list(next(exchanges).values())
    assert len(works) == len(LOCAL)
    assert {work.usual for work in works if isinstance(work, SummedProbe)} == {usual}


def no_answers(exchange: Exchange) -> Replies:
    assert isinstance(exchange, SumByCenter)
    return SealedSums(exchange, {})


@pytest.mark.parametrize("asked", [0, len(LOCAL)])
def test_an_evaluation_that_too_few_devices_answer_has_no_averages(asked: int) -> None:
    made = trained("ifca", "updates", rounds=0)
    assert isinstance(made.strategy, LocalSgd)
    report = drive(
        sealed_evaluation(made.strategy, made.state, made.fleet, sorted(made.fleet)[:asked], batch=8, last=True),
        no_answers,
    )
    assert (report.accuracy.micro, report.accuracy.macro, report.f1_of_devices.macro) == (None, None, None)


@pytest.mark.parametrize(
    ("case", "last", "said"), [("fedem", True, True), ("fedem", False, False), ("ifca", True, False)]
)
def test_only_the_last_evaluation_of_mixtures_says_that_centers_have_no_scores(
    case: str, *, last: bool, said: bool
) -> None:
    made = world(build(case, {**SMALL, "secure": "updates"}), LOCAL)
    assert isinstance(made.strategy, LocalSgd)
    asked = sealed_evaluation(made.strategy, made.state, made.fleet, sorted(made.fleet), batch=8, last=last)
    report = drive(asked, no_answers)
    assert (report.centers is not None) == said


@pytest.mark.parametrize(("scoring", "asked"), [(CLASSES, 12), (Scoring(want=frozenset({"loss", "errors"})), 0)])
def test_no_confusion_matrix_is_asked_for_where_targets_are_no_classes(scoring: Scoring, asked: int) -> None:
    """Each device refused the task in each round, and the run called that answers that did not count."""
    made, seen = world(build("fedavg", {**SMALL, "secure": "updates"}), LOCAL), list[Task]()
    watch, program = Watched(made), made.devices.program

    def ask(exchange: Exchange) -> Replies:
        seen.extend(exchange.values())
        return watch.ask(exchange)

    facts: dict[str, Any] = {"batch": 8, "scoring": scoring}
    drive(run_round(made.strategy, made.state, program.schema, made.devices.fleet, round_rng(0, 1), **facts), ask)
    assert sum(isinstance(task, SummedProbe) for task in seen) == asked
