"""A run over the network that waits for no device: its rounds are only how its updates are counted.

After each round the state of the machine is stored with the round's record. Devices test once, after the last round:
those that are connected then, and the first `quorum` of their answers count. Fewer are no reason to fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coordinator.rounds.asynchronous import training as machine
from coordinator.rounds.asynchronous.options import Asynchronous, check_asynchronous
from coordinator.rounds.asynchronous.snapshot import pack, unpack
from coordinator.rounds.asynchronous.training import Rules
from coordinator.rounds.metrics import RoundReport, Scoring
from coordinator.rounds.round import evaluate_round
from coordinator.runtime.exchange.current_exchange import Live
from coordinator.runtime.exchange.exchange_driver import run_exchange
from coordinator.runtime.exchange.live_updates import LiveUpdates
from coordinator.runtime.exchange.task_messages import ExchangeContext
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.store import Store
from coordinator.strategies.base import Exchange, Fleet, Replies, State, Strategy, drive
from edge_client.protocol.task import ClientId, Schema


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a run without rounds needs of the event loop: `open` waits while the run is paused."""

    open: Callable[[ExchangeKey], ExchangeContext]
    run_until_closed: Callable[[Live], None]
    is_online: Callable[[ClientId], bool]
    newcomers: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class RoundPlace:
    """Round `number` of `of` of a run, by its id: its fleet, the tensors of its models, what its devices test."""

    run: str
    number: int
    of: int
    schema: Schema
    fleet: Fleet
    scoring: Scoring


def oldest_needed(store: Store, run: str, after: State, last: int) -> int:
    """The rounds up to which nothing is needed: of those up to `last`, not the ones of tasks that ended later."""
    found = unpack(after)
    under_way = found[1].values() if found else ()
    ended = store.journal.oldest_task(run, last)
    return min([last, *(number - 1 for number in under_way), *([] if ended is None else [ended - 1])])


@dataclass(frozen=True, kw_only=True)
class WithoutRounds:
    """What the rounds of one run share."""

    options: Asynchronous
    network: Network
    store: Store
    seed: int
    batch: int
    max_update_ratio: float
    live: dict[str, LiveUpdates]  # by run, once it has begun in this process

    def plays(self, strategy: Strategy, state: State, fleet: Fleet) -> bool:
        """Whether the next round waits for no device: not where the method's centers have to come apart first."""
        plan = check_asynchronous(strategy, fleet).asynchronous_plan(fleet)
        return unpack(state) is not None or not plan.needs_round(state)

    def round(self, place: RoundPlace, strategy: Strategy, state: State) -> tuple[State, RoundReport, dict[str, Any]]:
        """Play one round; -> the state to be stored, what the test found, and what the record tells beside it."""
        run_id, number, schema, fleet = place.run, place.number, place.schema, place.fleet
        rules = Rules(
            strategy=check_asynchronous(strategy, fleet),
            options=self.options,
            schema=schema,
            fleet=fleet,
            seed=self.seed,
            max_update_ratio=self.max_update_ratio,
        )
        training, rounds = unpack(state) or (machine.begin_training(state), {})
        context = self.network.open(ExchangeKey(run_id, number, 0))
        live = self.live.get(run_id) or LiveUpdates(
            run_id, context, is_online=self.network.is_online, newcomers=self.network.newcomers
        )
        self.live[run_id] = live
        live.open_round(number, training, rules, rounds)
        if not live.closed:
            self.network.run_until_closed(live)
        after = machine.served_state(live.training, rules)
        more: dict[str, Any] = {"asynchronous": live.counts.record(live.training.versions)}
        if live.refused:
            more["refused"] = live.refused
        last = number == place.of
        rounds = live.rounds
        if last:
            live.finish()
        key = ExchangeKey(run_id, number, live.training.handed)
        cohort = self._cohort(key, fleet, live) if last else []
        exchanges = evaluate_round(strategy, after, schema, cohort, batch=self.batch, last=last, scoring=place.scoring)
        report = drive(exchanges, self._test(key))
        return after if last else pack(replace(live.training, state=after), rounds), report, more

    def _cohort(self, key: ExchangeKey, fleet: Fleet, live: LiveUpdates) -> list[ClientId]:
        """Who tests: the devices that could be given a task, or those that were asked when the test began."""
        asked = self.store.exchanges.task_hashes(key)
        return sorted(asked) if asked else [who for who in sorted(fleet) if live.may_get(who)]

    def _test(self, key: ExchangeKey) -> Callable[[Exchange], Replies]:
        def ask_next(tasks: Exchange) -> Replies:
            nonlocal key
            now, key = key, key._replace(exchange=key.exchange + 1)
            context = self.network.open(now)
            config = replace(context.config, round=replace(context.config.round, below_quorum="continue"))
            wanted = max(1, math.ceil(round(config.round.quorum * len(tasks), 9)))
            return run_exchange(
                now, dict(tasks), wanted, replace(context, config=config), self.network.run_until_closed
            )

        return ask_next
