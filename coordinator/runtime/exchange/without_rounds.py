"""A run over the network that waits for no device: its rounds are only how its updates are counted.

After each round the state of the machine is stored with the round's record. At the beginning of a round that is due for
it devices begin to test the newest centers, while updates go on (updates_and_test.py); the record of the round in which
the test ends has its scores, and names the round whose centers they are. After the last round nothing goes on: all that
are connected test. Of each test the first `quorum` of the answers count, and fewer are no reason to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.rounds.asynchronous import training as machine
from coordinator.rounds.asynchronous.options import Asynchronous, check_asynchronous
from coordinator.rounds.asynchronous.snapshot import Snapshot, pack, unpack
from coordinator.rounds.asynchronous.training import Rules
from coordinator.rounds.metrics import RoundReport
from coordinator.rounds.round import evaluate_round
from coordinator.rounds.round_record import AsynchronousRecord
from coordinator.runtime.exchange.current_exchange import Live
from coordinator.runtime.exchange.exchange_driver import run_exchange
from coordinator.runtime.exchange.interval_tests import IntervalTests, RoundPlace, answers_wanted, may_be_few
from coordinator.runtime.exchange.task_messages import ExchangeContext
from coordinator.runtime.exchange.updates_and_test import UpdatesAndTest
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.store import Store
from coordinator.strategies.base import Exchange, Replies, State, Strategy, drive
from edge_client.protocol.task import ClientId


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a run without rounds needs of the event loop: `open` waits while the run is paused."""

    open: Callable[[ExchangeKey], ExchangeContext]
    run_until_closed: Callable[[Live], None]
    is_online: Callable[[ClientId], bool]
    newcomers: Callable[[], bool]


def oldest_needed(store: Store, run: str, after: State, last: int) -> int:
    """The rounds up to which nothing is needed: of those up to `last`, not the ones of tasks that ended later.

    A test needs the state before the round in which it began.
    """
    found = unpack(after)
    under_way = [] if found is None else [number - 1 for number in found.rounds.values()]
    test = [found.test - 2] if found is not None and found.test else []
    ended = store.journal.oldest_task(run, last)
    return min([last, *under_way, *test, *([] if ended is None else [ended - 1])])


@dataclass(frozen=True, kw_only=True)
class WithoutRounds:
    """What the rounds of one run share."""

    options: Asynchronous
    network: Network
    store: Store
    seed: int
    max_update_ratio: float
    tests: IntervalTests
    live: dict[str, UpdatesAndTest] = field(default_factory=dict)  # by run, once it has begun in this process

    def plays(self, place: RoundPlace, strategy: Strategy, state: State) -> bool:
        """Whether this round waits for no device: not where the method's centers have to come apart first.

        One that has a journal goes on so: an older version did not wait for as many rounds.
        """
        plan = check_asynchronous(strategy, place.fleet).asynchronous_plan(place.fleet)
        begun = unpack(state) is not None or not plan.needs_round(state)
        return begun or bool(self.store.journal.steps(place.run, place.number))

    def round(self, place: RoundPlace, strategy: Strategy, state: State) -> tuple[State, RoundReport, dict[str, Any]]:
        """Play one round; -> the state to be stored, what a test found, and what the record tells beside it."""
        run_id, number = place.run, place.number
        rules = Rules(
            strategy=check_asynchronous(strategy, place.fleet),
            options=self.options,
            schema=place.schema,
            fleet=place.fleet,
            seed=self.seed,
            max_update_ratio=self.max_update_ratio,
        )
        before = unpack(state) or Snapshot(machine.begin_training(state))
        context = self.network.open(ExchangeKey(run_id, number, 0))
        begun = self.live.get(run_id)
        live = begun or UpdatesAndTest(
            run_id, context, is_online=self.network.is_online, newcomers=self.network.newcomers
        )
        self.live[run_id] = live
        live.postpone_tests()
        live.updates.open_round(number, before, rules, context)
        self.tests.begin(place, strategy, before, live, context)
        if begun is None:
            live.updates.begin()  # the tasks of an earlier process go on; those of the test are sent
        if not live.closed:
            self.network.run_until_closed(live)
        played = live.updates.journalled
        after, rounds = machine.served_state(played.training, rules), played.rounds
        told = played.counts.record(played.training.versions)
        more: dict[str, Any] = {"asynchronous": told} | ({"refused": played.refused} if played.refused else {})
        if number == place.of:
            live.finish()
            return after, self._last_test(place, strategy, after, live), more
        report = self._report(place, strategy, after, live, told)
        return pack(Snapshot(replace(played.training, state=after), rounds, self.tests.begun(run_id))), report, more

    def _report(
        self, place: RoundPlace, strategy: Strategy, after: State, live: UpdatesAndTest, told: AsynchronousRecord
    ) -> RoundReport:
        """What the test found that ended in this round; without one, the devices' centers alone."""
        found = self.tests.end(place.run, live)
        nothing = drive(
            evaluate_round(strategy, after, place.schema, [], batch=place.batch, last=False, scoring=place.scoring),
            lambda _: {},
        )
        if found is None:
            return nothing
        report, told["tested"] = found
        return replace(report, assignment=nothing.assignment or report.assignment)

    def _last_test(self, place: RoundPlace, strategy: Strategy, after: State, live: UpdatesAndTest) -> RoundReport:
        """All devices that are free test, or those that were asked when the test began."""
        key = ExchangeKey(place.run, place.number, live.updates.journalled.training.handed)
        asked = self.store.exchanges.task_hashes(key)
        cohort = sorted(asked) if asked else [who for who in sorted(place.fleet) if live.updates.is_free(who)]
        exchanges = evaluate_round(
            strategy, after, place.schema, cohort, batch=place.batch, last=True, scoring=place.scoring
        )

        def ask_next(tasks: Exchange) -> Replies:
            nonlocal key
            now, key = key, key._replace(exchange=key.exchange + 1)
            context = may_be_few(self.network.open(now))
            wanted = answers_wanted(context, len(tasks))
            return run_exchange(now, dict(tasks), wanted, context, self.network.run_until_closed)

        return drive(exchanges, ask_next)
