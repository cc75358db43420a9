"""When a test of the newest centers begins beside updates, which devices it asks, and what its end tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.asynchronous.options import Asynchronous
from coordinator.rounds.asynchronous.snapshot import Snapshot, pack
from coordinator.rounds.metrics import CLASSES
from coordinator.rounds.round import EvaluationPlan, round_rng
from coordinator.runtime.exchange.interval_tests import IntervalTests, RoundPlace, answers_wanted, may_be_few
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.registry import make_method
from edge_client.protocol import codecs
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.task import Reply
from tests.support.updates_run import UpdatesRun
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, WiredCoordinator

OF = 9


@dataclass
class RunWithTests(UpdatesRun):
    """The same run with tests; its one center is in version `version`."""

    version: int = 1
    evaluation: EvaluationPlan = field(default_factory=lambda: EvaluationPlan(every=2))

    def make_tests(self) -> IntervalTests:
        return IntervalTests(
            evaluation=self.evaluation,
            store=self.coordinator.store,
            seed=5,
            is_online=lambda who: who in self.online,
        )

    @property
    def before(self) -> Snapshot:
        return Snapshot(replace(self.live.updates.journalled.training, versions=(self.version,)))

    def begin_in(self, number: int, tests: IntervalTests, before: Snapshot | None = None) -> None:
        parts: dict[str, Any] = {"schema": self.rules.schema, "fleet": self.rules.fleet, "scoring": CLASSES}
        place = RoundPlace(run="run1", number=number, of=OF, batch=8, **parts)
        tests.begin(
            place, make_method("fedavg"), self.before if before is None else before, self.live, self.coordinator.context
        )

    def asked(self) -> list[tuple[str, int]]:
        """The devices that were sent the task of a test, and its round."""
        return sorted((cid, m["round"]) for cid, m in self.said() if m["k"] == "task" and m["job"] == "probe")

    def answer(self, cid: str, number: int) -> None:
        confusion = np.zeros((1, 4, 4), np.int64)
        confusion[0, 0] = [6, 4, 0, 0]
        schema = self.coordinator.context.prepared.program.schema
        data = codecs.encode_stats(Reply(n=10, confusion=confusion, losses=np.array([0.5])), schema)
        about = {**ExchangeKey("run1", number, 0)._asdict(), "attempt": 0, "n": 10, "seconds": 1.0}
        self.coordinator.hear(cid, "rdy", **about, what="stats", update=manifest_of(data, "stats", inline=True))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWithTests]:
    """No device has a task: all are free for a test."""
    clock = VirtualClock()
    made = RunWithTests(WiredCoordinator(tmp_path, clock, 0, 4), clock, Asynchronous(concurrency=1, buffer=4))
    made.online = set()
    made.begin()
    made.online = set(DEVICES)
    yield made
    made.coordinator.store.close()


@pytest.mark.parametrize(
    ("number", "version", "every", "due"),
    [(3, 1, 2, True), (2, 1, 2, False), (4, 1, 3, True), (3, 0, 2, False), (2, 1, 1, True)],
)
def test_a_test_begins_with_every_so_many_rounds_where_there_are_new_centers(
    run: RunWithTests,
    number: int,
    version: int,
    every: int,
    due: bool,  # noqa: FBT001 - a row
) -> None:
    run.version, run.evaluation = version, EvaluationPlan(every=every)
    tests = run.make_tests()
    run.begin_in(number, tests)
    assert run.asked() == ([(cid, number) for cid in DEVICES] if due else [])
    assert tests.begun("run1") == (number if due else 0)
    assert tests.begun("another run") == 0
    assert (run.live.test is not None) == due


def test_it_asks_the_devices_that_the_round_before_draws_and_that_are_here(run: RunWithTests) -> None:
    run.evaluation = EvaluationPlan(every=2, fraction=0.5, last=1.0)
    drawn = run.evaluation.cohort(run.rules.fleet, round_rng(5, 2), round=2, of=OF)
    assert len(drawn) == 2
    run.online.discard(drawn[0])
    run.begin_in(3, run.make_tests())
    assert run.asked() == [(drawn[1], 3)]


def test_where_none_of_them_is_here_no_test_begins(run: RunWithTests) -> None:
    run.online.clear()
    tests = run.make_tests()
    run.begin_in(3, tests)
    assert (run.asked(), tests.begun("run1"), run.live.test) == ([], 0, None)


def test_a_run_has_one_test_at_a_time_whose_end_tells_what_it_found_and_which_centers(run: RunWithTests) -> None:
    tests = run.make_tests()
    assert tests.end("run1", run.live) is None
    run.begin_in(3, tests)
    run.asked()
    run.begin_in(5, tests)
    assert (run.asked(), tests.begun("run1")) == ([], 3)
    assert tests.end("run1", run.live) is None
    run.answer("d1", 3)  # the first answer ends it: there is no quorum
    found = tests.end("run1", run.live)
    assert found is not None
    report, told = found
    assert told == {"round": 2, "versions": [1]}
    assert (report.per_device, report.loss_per_device) == ({"d1": 0.6}, {"d1": 0.5})
    assert report.centers is None  # they are measured at the end of a run
    assert (tests.begun("run1"), run.live.test, tests.end("run1", run.live)) == (0, None, None)
    run.asked()
    run.begin_in(5, tests)
    free = [cid for cid in DEVICES if not run.live.updates.has_task(cid)]
    assert len(free) == 3  # one trains since the test is over
    assert run.asked() == [(cid, 5) for cid in free]


def test_another_process_goes_on_with_the_test_whose_answers_it_finds(run: RunWithTests) -> None:
    tests = run.make_tests()
    run.coordinator.store.states.put("run1", 2, pack(run.before))
    run.begin_in(3, tests)
    run.asked()
    again = run.make_tests()
    run.begin_in(4, again, run.before._replace(test=3))  # in a round that is not due itself
    assert run.asked() == [(cid, 3) for cid in DEVICES]
    assert again.begun("run1") == 3
    run.answer("d2", 3)
    after = run.make_tests()
    run.begin_in(4, after, run.before._replace(test=3))
    assert run.asked() == []  # it has closed
    found = after.end("run1", run.live)
    assert found is not None
    assert (found[0].per_device, found[1]["round"]) == ({"d2": 0.6}, 2)


def test_a_test_whose_centers_are_lost_is_lost_with_them(run: RunWithTests) -> None:
    run.begin_in(3, run.make_tests())
    run.asked()
    again = run.make_tests()
    run.begin_in(4, again, run.before._replace(test=3))  # no state of round 2 is stored
    assert (run.asked(), again.begun("run1")) == ([], 0)


@pytest.mark.parametrize(
    ("quorum", "asked", "wanted"), [(0.0, 4, 1), (0.5, 4, 2), (0.51, 4, 3), (0.7, 10, 7), (1.0, 4, 4)]
)
def test_a_test_ends_with_the_quorum_of_its_answers_and_never_fails_below(
    run: RunWithTests, quorum: float, asked: int, wanted: int
) -> None:
    plan = replace(run.coordinator.config.round, quorum=quorum, below_quorum="stop")
    context = replace(run.coordinator.context, config=replace(run.coordinator.config, round=plan))
    assert answers_wanted(context, asked) == wanted
    few = may_be_few(context)
    assert few.config.round == replace(plan, below_quorum="continue")
    assert replace(few, config=context.config) == context
