"""Tests of a run without rounds, while its updates go on: which devices test what, and what the test found.

A test of the newest centers begins with a round, and may outlast it. It has the exchange 0 of that round, a number that
no task has once there is a new version to be tested. A restarted coordinator goes on with it: it builds the same tasks
from the state before that round, and a replay finds the same answers in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from coordinator.rounds.asynchronous.snapshot import Snapshot, unpack
from coordinator.rounds.metrics import RoundReport, Scoring
from coordinator.rounds.round import EvaluationPlan, evaluate_round, round_rng
from coordinator.rounds.round_record import TestedRecord
from coordinator.runtime.exchange.exchange_driver import open_exchange, replies_of
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.runtime.exchange.task_messages import ExchangeContext, PreparedTask
from coordinator.runtime.exchange.updates_and_test import UpdatesAndTest
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.store import Store
from coordinator.strategies.base import Fleet, Replies, Strategy, drive
from coordinator.strategies.common.sampling import part_of
from edge_client.protocol.task import ClientId, Schema


@dataclass(frozen=True, kw_only=True)
class RoundPlace:
    """Round `number` of `of` of a run, by its id: its fleet, the tensors of its models, what its devices test.

    `batch`: how many samples a device reads at a time.
    """

    run: str
    number: int
    of: int
    schema: Schema
    fleet: Fleet
    scoring: Scoring
    batch: int


@dataclass(frozen=True, kw_only=True)
class OpenTest:
    """A test that began with round `begun`; `report` makes of its answers what it found."""

    begun: int
    key: ExchangeKey
    versions: tuple[int, ...]
    asked: dict[ClientId, PreparedTask]
    report: Callable[[Replies], RoundReport]


def may_be_few(context: ExchangeContext) -> ExchangeContext:
    """The same parts, for an exchange that does not fail below the quorum."""
    plan = replace(context.config.round, below_quorum="continue")
    return replace(context, config=replace(context.config, round=plan))


def answers_wanted(context: ExchangeContext, asked: int) -> int:
    """So many answers end a test."""
    return max(1, part_of(context.config.round.quorum, asked))


@dataclass(frozen=True, kw_only=True)
class IntervalTests:
    """The tests of all runs of this process; each run has one at a time."""

    evaluation: EvaluationPlan
    store: Store
    seed: int
    is_online: Callable[[ClientId], bool]
    under_way: dict[str, OpenTest] = field(default_factory=dict)  # by run

    def begun(self, run: str) -> int:
        """The round with which the test began that goes on; 0 without one."""
        return self.under_way[run].begun if run in self.under_way else 0

    def begin(
        self, place: RoundPlace, strategy: Strategy, before: Snapshot, live: UpdatesAndTest, context: ExchangeContext
    ) -> None:
        """Go on with the test that an earlier process began, or begin the one that is due with this round.

        Before there is a new version, the exchange 0 is that of the first task.
        """
        if place.run in self.under_way or not (before.test or self._is_due(place, before)):
            return
        begun = before.test or place.number
        key = ExchangeKey(place.run, begun, 0)
        tested = before if begun == place.number else self._before(place.run, begun)
        known = self.store.exchanges.task_hashes(key)
        if tested is None:
            return
        cohort = sorted(known) or self._cohort(place)
        if not cohort:
            return

        evaluate = partial(
            evaluate_round,
            strategy,
            tested.training.state,
            place.schema,
            cohort,
            batch=place.batch,
            last=False,
            scoring=place.scoring,
        )
        tasks, context = next(evaluate()), may_be_few(context)
        asked = open_exchange(key, dict(tasks), context)
        self.under_way[place.run] = OpenTest(
            begun=begun,
            key=key,
            versions=tested.training.versions,
            asked=asked,
            report=lambda replies: drive(evaluate(), lambda _: replies),
        )
        if self.store.exchanges.closed_with(key) is None:
            wanted, has_task = answers_wanted(context, len(asked)), live.updates.has_task
            live.begin_test(LiveExchange(key, tasks, asked, wanted, context, may_ask=lambda who: not has_task(who)))

    def end(self, run: str, live: UpdatesAndTest) -> tuple[RoundReport, TestedRecord] | None:
        """What the test found that goes on, and which centers it tested; None while it goes on, and without one."""
        test = self.under_way.get(run)
        if test is None or self.store.exchanges.closed_with(test.key) is None:
            return None
        del self.under_way[run]
        live.test = None
        report = test.report(replies_of(test.key, test.asked, self.store))
        return report, {"round": test.begun - 1, "versions": list(test.versions)}

    def _before(self, run: str, begun: int) -> Snapshot | None:
        """The machine before round `begun`; None where its state is lost, and with it the test."""
        state = self.store.states.of_round(run, begun - 1)
        return None if state is None else unpack(state)

    def _is_due(self, place: RoundPlace, before: Snapshot) -> bool:
        """Whether the centers with which this round begins are to be tested, and new."""
        return sum(before.training.versions) > 0 and (place.number - 1) % self.evaluation.every == 0

    def _cohort(self, place: RoundPlace) -> list[ClientId]:
        """The devices that the round before draws for its test, as far as they are connected."""
        number = place.number - 1
        drawn = self.evaluation.cohort(place.fleet, round_rng(self.seed, number), round=number, of=place.of)
        return [who for who in drawn if self.is_online(who)]
