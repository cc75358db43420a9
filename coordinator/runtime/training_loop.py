"""The runs, one after another: rounds of a method from its last stored state to its last round.

A restart calls the same functions: stored exchanges are replayed, the others are sent to the devices. `ask` sends an
exchange and returns its replies.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from coordinator.artifacts.finished_run import RunResult, make_strategy
from coordinator.artifacts.signed_program import CompiledProgram
from coordinator.config import CoordinatorConfig
from coordinator.config_sections import RunConfig
from coordinator.nearest.learn_from_replies import MIN_MEASUREMENTS, look_of_a_device
from coordinator.rounds.asynchronous.options import buffer_of_all
from coordinator.rounds.buffer_bounds import bounded_buffers
from coordinator.rounds.label_counting import check_label_totals
from coordinator.rounds.metrics import RoundReport, scoring_of
from coordinator.rounds.over_selection import goal_of, has_updates, with_over_selection
from coordinator.rounds.privacy_accounting import privacy_spent, with_noise_key
from coordinator.rounds.round import INITIAL_ROUND, first_state, round_rng, run_round
from coordinator.rounds.round_record import SCORES, RoundRecord, SecureRecord, round_record
from coordinator.rounds.sealed_round import check_sealed, is_sealed, too_few_asked, what_is_seen, why_unchanged
from coordinator.rounds.update_validation import ZERO_BASE
from coordinator.runtime.exchange.exchange_driver import Ask
from coordinator.runtime.exchange.interval_tests import RoundPlace
from coordinator.runtime.exchange.masked_sums import STAGES, MaskedSums, told_choices
from coordinator.runtime.exchange.without_rounds import WithoutRounds, oldest_needed
from coordinator.runtime.training_fleet import TrainingFleet
from coordinator.storage.event_log import EventLog
from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.storage.privacy_noise_key import open_noise_key
from coordinator.storage.round_pruning import prune_rounds
from coordinator.storage.store import Store
from coordinator.strategies.base import (
    Exchange,
    Fleet,
    Replies,
    RepliesWithLate,
    State,
    StoredReplies,
    Strategy,
    SumByCenter,
    drive,
    takes_newcomers,
    uses_late,
)
from coordinator.strategies.common.sampling import part_of
from coordinator.strategies.common.setting_checks import spare_centers
from coordinator.strategies.registry import batch_size
from edge_client.errors import ConfigError
from edge_client.protocol import codecs
from edge_client.protocol.message_schemas import MAX_CENTERS
from edge_client.protocol.task import MAX_MODELS, ClientId, Flat, Probe, Reply, Schema

log = logging.getLogger(__name__)
Meter = Callable[[], tuple[float, int, int]]  # seconds, bytes down and bytes up since the server began


def train_runs(trainer: RunTrainer, ask: Ask) -> list[RunResult]:
    """Train every run of the configuration to its end. Devices tell nothing of single centers where sums are sealed."""
    config = trainer.config
    strategies = [make_strategy(run, config) for run in config.runs]
    for run, strategy in zip(config.runs, strategies, strict=True):
        trainer.check(run, strategy)  # before the first round of any: the settings of a folder cannot change
    outcomes = [trainer.run(run, strategy, ask) for run, strategy in zip(config.runs, strategies, strict=True)]
    if not config.teach_newcomers:
        return outcomes
    asked = [o.run.name == config.served_run and not is_sealed(o.strategy) for o in outcomes]
    return [trainer.measure_centers(o, ask) if one else o for o, one in zip(outcomes, asked, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RunTrainer:
    """What all runs share: the fleet, the program with the first model, the store."""

    config: CoordinatorConfig
    store: Store
    event_log: EventLog
    meter: Meter
    prepared: CompiledProgram
    devices: TrainingFleet
    without_rounds: WithoutRounds | None = None  # where no device is waited for

    @property
    def schema(self) -> Schema:
        return self.prepared.program.schema

    def check(self, run: RunConfig, strategy: Strategy) -> None:
        """Raise ConfigError for a run that has not begun, and that its first round would refuse."""
        if run.name not in self.store.states.run_names().values():
            self._begun(strategy, self.devices.fleet_of(run.name, INITIAL_ROUND + 1))

    def _begun(self, strategy: Strategy, fleet: Fleet) -> State:
        """The state before the first round. Raises ConfigError for a model or a fleet that does not suit the method."""
        with_noise_key(strategy, self.schema, lambda: b"")
        check_label_totals(strategy, self.prepared.program)
        check_sealed(strategy, self.schema, fleet)
        state = first_state(strategy, self.prepared.initial, self.schema, fleet, self.config.seed)
        if len(state.centers) > MAX_CENTERS:
            told = f"{len(state.centers)} centers: messages and bundles have numbers for {MAX_CENTERS}"
            raise ConfigError(told, hint=f"use at most {MAX_CENTERS} clusters")
        return state

    def run(self, run: RunConfig, strategy: Strategy, ask: Ask) -> RunResult:
        """Train the rounds of one run that are not stored yet."""
        run_id = self.store.states.run_id(run.name, lambda: secrets.token_hex(8))
        strategy = with_noise_key(strategy, self.schema, lambda: open_noise_key(self.store.folder))
        begun = self.store.states.last(run_id)
        if begun is None:
            fleet = self._let_in(run, run_id, INITIAL_ROUND + 1)
            state = self._begun(strategy, fleet)
            if spare := spare_centers(strategy, len(fleet)):
                log.warning("%s: %s", run.name, spare)
            waits = self.without_rounds and buffer_of_all(self.without_rounds.options.buffer, len(fleet))
            if waits:
                log.warning("%s: %s", run.name, waits)
            asking, _ = with_over_selection(strategy, self.config.round.over_select, len(fleet))
            tested = self.config.round.evaluation.smallest_share(run.rounds)
            if few := too_few_asked(asking, len(fleet), tested=tested):  # more devices may come
                log.warning("%s: %s: %s", run.name, few.message, few.hint)
            self.store.states.put(run_id, INITIAL_ROUND, state)
            begun = (INITIAL_ROUND, state)
        number, state = begun
        while number < run.rounds:
            number += 1
            state = self._round(run, run_id, number, strategy, state, ask)
        return RunResult(run=run, strategy=strategy, state=state)

    def _round(self, run: RunConfig, run_id: str, number: int, strategy: Strategy, state: State, ask: Ask) -> State:
        """Train one round; its state and its record for metrics.jsonl are stored in one transaction."""
        before, fleet = self.meter(), self._fleet(run, run_id, number, strategy)
        scoring = scoring_of(self.prepared.program)
        place = RoundPlace(
            run=run_id,
            number=number,
            of=run.rounds,
            schema=self.schema,
            fleet=fleet,
            scoring=scoring,
            batch=batch_size(strategy),
        )
        if self.without_rounds and self.without_rounds.plays(place, strategy, state):
            after, report, more = self.without_rounds.round(place, strategy, state)
        else:
            after, report, more = self._waiting_round(place, strategy, state, ask)
        seconds, down, up = (now - then for now, then in zip(self.meter(), before, strict=True))
        record = round_record(
            report,
            run=run.name,
            method=run.method,
            round=number,
            of=run.rounds,
            bytes_down=int(down),
            bytes_up=int(up),
            seconds=round(seconds, 3),
        )
        self._tell_more(record, run_id, number, strategy, after, more)
        self._put_round(run, run_id, number, after, record)
        return after

    def _waiting_round(
        self, place: RoundPlace, strategy: Strategy, state: State, ask: Ask
    ) -> tuple[State, RoundReport, dict[str, Any]]:
        """A round that waits for its devices; -> also what its record tells of masked sums that failed."""
        exchange, run_id, number, fleet = -1, place.run, place.number, place.fleet
        asking, wanted = with_over_selection(strategy, self.config.round.over_select, len(fleet))
        keeps = uses_late(strategy)
        late = self._late(run_id, number, fleet) if keeps else {}
        of_sums: int | None = None  # of the sum that is made now: how many devices the round wants of those asked
        masked = MaskedSums(
            ask=lambda key, tasks: ask(key, tasks, of_sums, False),  # noqa: FBT003 - as Ask says
            store=self.store,
            federation=self.config.federation,
        )

        def ask_next(tasks: Exchange) -> Replies:
            nonlocal exchange, of_sums
            exchange += 1
            if isinstance(tasks, SumByCenter):
                exchange += STAGES - 1
                cohort = part_of(asking.fraction_train, len(fleet)) if is_sealed(asking) else 0
                of_sums = goal_of(tasks, wanted) if len(tasks) <= cohort else None
                return masked.sums(ExchangeKey(run_id, number, exchange - STAGES + 1), tasks)
            goal, keep = goal_of(tasks, wanted), keeps and has_updates(tasks)
            replies = ask(ExchangeKey(run_id, number, exchange), told_choices(tasks), goal, keep)
            return RepliesWithLate(replies, late) if late and exchange == 0 else replies

        rng = round_rng(self.config.seed, number)
        exchanges = run_round(
            asking,
            state,
            self.schema,
            fleet,
            rng,
            batch=place.batch,
            evaluation=self.config.round.evaluation,
            scoring=place.scoring,
            round=number,
            of=place.of,
        )
        after, report = drive(exchanges, ask_next)
        failed = masked.failures or why_unchanged(strategy, state, after)
        return after, report, {"failed": failed} if failed else {}

    def _tell_more(
        self, record: RoundRecord, run_id: str, number: int, strategy: Strategy, after: State, more: dict[str, Any]
    ) -> None:
        """Add the fields that not every round has."""
        refused = self.store.exchanges.refusals(run_id, number) | more.get("refused", {})
        if refused:
            record["refused"] = refused
        silent = self.store.exchanges.silent(run_id, number) - refused.keys()
        if silent and self.config.round.over_select == 1 and "asynchronous" not in more:
            record["silent"] = sorted(silent)
        if privacy := privacy_spent(strategy, after):
            record["privacy"] = privacy
        if secure := what_is_seen(strategy):
            record["secure"] = cast("SecureRecord", secure | ({"failed": more["failed"]} if "failed" in more else {}))
        if "asynchronous" in more:
            record["asynchronous"] = more["asynchronous"]

    def _put_round(self, run: RunConfig, run_id: str, number: int, after: State, record: RoundRecord) -> None:
        """Store the round, tell of it, and forget rounds of long ago that no task under way needs."""
        events: list[Mapping[str, Any]] = [record]
        if number == run.rounds:
            last = {key: events[0][key] for key in ("run", "method", *SCORES, "assignment") if key in record}
            events.append({"event": "run-done", "unix_ms": self.event_log.unix_ms(), **last, "rounds": run.rounds})
        if self.store.states.put(run_id, number, after, events):
            for event in events:
                self.event_log.append_stored(event)
        if keep := self.config.keep_rounds:
            prune_rounds(self.store, run_id, oldest_needed(self.store, run_id, after, number - keep))

    def _fleet(self, run: RunConfig, run_id: str, number: int, strategy: Strategy) -> Fleet:
        """Who trains in a round: new devices too, unless the method has a fixed fleet."""
        if takes_newcomers(strategy):
            return self._let_in(run, run_id, number)
        return self.devices.fleet_of(run.name, INITIAL_ROUND + 1)

    def _let_in(self, run: RunConfig, run_id: str, number: int) -> Fleet:
        """Take new devices, unless this round is under way, or one of a later run: a round has its fleet to its end.

        One of a later run is where this one has got more rounds since.
        """
        ids = {name: known for known, name in self.store.states.run_names().items()}
        later = self.config.runs[self.config.runs.index(run) + 1 :]
        asked = [(ids.get(one.name, ""), self.devices.ended(one.name) + 1, one.rounds) for one in later]
        if any(self._has_begun(one, next_) for one, next_, of in [*asked, (run_id, number, number)] if next_ <= of):
            return self.devices.fleet_of(run.name, number)
        return self.devices.let_in(run.name, number)

    def _has_begun(self, run_id: str, number: int) -> bool:
        """Whether a device was asked in a round; its first exchange may have been left out (masked_sums.py)."""
        return self.store.exchanges.has_round(run_id, number) or bool(self.store.journal.steps(run_id, number))

    def measure_centers(self, outcome: RunResult, ask: Ask) -> RunResult:
        """Ask each device how every center does on its samples, with losses of held-out ones.

        A run whose method assigns too few devices for a guide, or that has more centers than fit a probe, is returned
        as it is.
        """
        state = outcome.state
        if len(state.assignment) < MIN_MEASUREMENTS or len(state.centers) > MAX_MODELS:
            return outcome
        program, batch = self.prepared.program, batch_size(outcome.strategy)
        want = look_of_a_device(program.loss, program.classes)
        asked = Probe(models=list(state.centers), want=want, split="test", batch=batch, seed=0)
        run_id = self.store.states.run_id(outcome.run.name, lambda: secrets.token_hex(8))
        key = ExchangeKey(run_id, outcome.run.rounds + 1, 0)
        replies = ask(key, dict.fromkeys(sorted(state.assignment), asked), None, False)  # noqa: FBT003 - as Ask says
        return replace(outcome, measurements=replies)

    def _late(self, run_id: str, number: int, fleet: Fleet) -> Replies:
        """The late updates of earlier rounds; the newest one of each device."""
        newest = {stored.cid: stored for stored in self.store.late_updates.assign(run_id, number)}
        n = {cid: min(stored.n, fleet[cid]) for cid, stored in newest.items()}

        def read(cid: ClientId) -> Reply:
            return Reply(n=n[cid], update=late_model(self.store, newest[cid], self.schema))

        return StoredReplies(newest, read, {"update": n})


def late_model(store: Store, stored: StoredReply, schema: Schema) -> Flat:
    """The model [schema.size] of a late update, as it was decoded when it arrived."""
    delta = codecs.decode_vector(store.updates(stored.cid).read(stored.sha256), schema, kind="delta")
    if stored.base == ZERO_BASE:
        return bounded_buffers(delta, None, schema)
    base = codecs.decode_vector(store.blobs.read(stored.base), schema, kind="model")
    return bounded_buffers(base + delta, base, schema)
