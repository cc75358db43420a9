"""Third step of a simulated run: the rounds, with the server's strategies and the client's training code.

Updates are rounded as the wire's f32 codec rounds them, so that a simulation and a run over MQTT with the same seed,
the same engine and the same data end with the same assignments and the same centers.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.rounds.asynchronous.options import check_asynchronous
from coordinator.rounds.asynchronous.training import Rules
from coordinator.rounds.label_counting import check_label_totals
from coordinator.rounds.metrics import RoundReport, scoring_of
from coordinator.rounds.over_selection import with_over_selection
from coordinator.rounds.privacy_accounting import privacy_spent, with_noise_key
from coordinator.rounds.round import evaluate_round, first_state, round_rng, run_round, serving_probe
from coordinator.rounds.round_record import RoundRecord, round_record
from coordinator.rounds.sealed_round import check_sealed, too_few_asked, what_is_seen, why_unchanged
from coordinator.strategies.base import Fleet, State, Strategy, drive
from coordinator.strategies.common.assignment import told_assignment
from coordinator.strategies.numbered_fleet import sorted_names
from coordinator.strategies.registry import method_name
from edge_client.protocol.program import Program
from edge_client.protocol.task import ClientId, Flat, Schema
from emulator.reports.pictures.recorder import DEFAULT_REPRESENTATION, RunRecorder
from emulator.reports.pictures.records import PictureData
from emulator.run.live_run import LiveRun
from emulator.run.own_metrics import measure_own
from emulator.run.settings import RunSettings
from emulator.run.summary import clustering_scores
from emulator.simulation.asynchronous_network import AsynchronousNetwork
from emulator.simulation.checkpoint import COST, Checkpoints
from emulator.simulation.device_profiles import draw_profiles
from emulator.simulation.emulated_devices import EmulatedDevices, own_slots
from emulator.simulation.virtual_network import VirtualNetwork

log = logging.getLogger(__name__)
Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """One JSON object per round, the state after the last round, and the data that the run's pictures are drawn from.

    `real_seconds` are those of each round on this machine. They are no part of the records, which are the same whenever
    and wherever a run is repeated. `whole` is false where `state` has the centers alone: an interrupted run's
    folder has no more of the rounds before.
    """

    records: Sequence[RoundRecord]
    real_seconds: Sequence[float]
    state: State
    schema: Schema
    virtual_seconds: float
    kept: PictureData = field(default=PictureData(), repr=False)
    whole: bool = True

    def scores(self, groups: Mapping[ClientId, int]) -> dict[str, float | None]:
        """`ari`, `nmi` and `purity` of the last assignment against the true groups."""
        return clustering_scores(groups, self.state.assignment)


def run_simulation(
    strategy: Strategy,
    start: Flat,
    devices: EmulatedDevices,
    settings: RunSettings,
    *,
    progress: Progress = lambda _: None,
    checkpoints: Checkpoints | None = None,
) -> SimulationResult:
    """Run the strategy from the common model `start` [schema.size], or from the latest checkpoint."""
    live = open_run(strategy, start, devices, settings, checkpoints=checkpoints)
    for _ in run_rounds(live, settings, checkpoints=checkpoints):
        progress({**live.records[-1], "real_seconds": live.real_seconds[-1]})
    return live_result(live)


def open_run(
    strategy: Strategy,
    start: Flat,
    devices: EmulatedDevices,
    settings: RunSettings,
    *,
    checkpoints: Checkpoints | None = None,
) -> LiveRun:
    """A run before its first round, or after the round of the latest checkpoint."""
    schema, fleet = devices.program.schema, devices.fleet
    strategy = with_emulated_key(strategy, schema, settings.seed)
    kind = getattr(strategy, "representation", DEFAULT_REPRESENTATION)
    network = _make_network(devices, fleet, settings)
    live = LiveRun(
        strategy=strategy,
        devices=devices,
        fleet=fleet,
        network=network,
        asynchronous=_without_rounds(strategy, network, fleet, schema, settings),
        recorder=RunRecorder(fleet, schema, rounds=settings.rounds, kind=kind),
        profiles=settings.profiles_checksum,
    )
    if before := checkpoints.latest() if checkpoints else None:
        live.restore(*before, rounds=settings.rounds)
    else:
        live.state = begin_run(strategy, start, devices.program, fleet, settings)
    return live


def begin_run(strategy: Strategy, start: Flat, program: Program, fleet: Fleet, settings: RunSettings) -> State:
    """The state before the first round. Raises ConfigError for a model or a fleet that does not suit the method."""
    check_sealed(strategy, program.schema, fleet)
    asking, _ = with_over_selection(strategy, settings.over_select, len(fleet))
    if few := too_few_asked(asking, len(fleet), tested=settings.evaluation.smallest_share(settings.rounds)):
        raise few
    check_label_totals(strategy, program)
    return first_state(strategy, start, program.schema, fleet, settings.seed)


def with_emulated_key(strategy: Strategy, schema: Schema, seed: int) -> Strategy:
    """`with_noise_key` by the seed: an emulated fleet has no privacy to protect."""
    return with_noise_key(strategy, schema, hashlib.sha256(f"emulated/{seed}".encode()).digest)


def run_rounds(
    live: LiveRun, settings: RunSettings, *, checkpoints: Checkpoints | None = None
) -> Generator[int, bool | None, None]:
    """Yield the number of each round after it has been played; the run ends early when True is sent back."""
    cheap_from_s = 0.0  # when the last checkpoint has cost no more than its share of the time
    for number in range(len(live.records) + 1, settings.rounds + 1):
        began = time.perf_counter()
        live.state, record = _run_round(live, settings, number)
        live.records.append(record)
        live.real_seconds.append(round(time.perf_counter() - began, 3))
        stop = yield number
        began = time.perf_counter()
        last = number if stop else settings.rounds
        if checkpoints and checkpoints.due(number, last, cheap=began >= cheap_from_s):
            _save(live, checkpoints, number)
            ended = time.perf_counter()
            cheap_from_s = ended + (ended - began) / COST
        if stop:
            return


def _save(live: LiveRun, checkpoints: Checkpoints, number: int) -> None:
    try:
        live.save(checkpoints, number)
    except OSError as wrong:
        if checkpoints.needed:
            raise
        log.warning(
            "no checkpoint could be written among the temporary files (%s): the result is whole, but the run does not "
            "go on from it, and it lacks models that devices keep. Free that disk, or set TMPDIR",
            wrong.strerror,
        )


def live_result(live: LiveRun) -> SimulationResult:
    """What a run has so far. It stays as it is when the run goes on; its state has the assignment that records have."""
    assignment = told_assignment(live.strategy, live.state, live.fleet)
    return SimulationResult(
        records=live.records.so_far(),
        real_seconds=tuple(live.real_seconds),
        state=replace(live.state, assignment=assignment),
        schema=live.devices.program.schema,
        virtual_seconds=live.network.now_s,
        kept=live.recorder.picture_data(),
    )


def _make_network(devices: EmulatedDevices, fleet: Fleet, settings: RunSettings) -> VirtualNetwork:
    return VirtualNetwork(
        devices,
        draw_profiles(fleet, settings.seed, settings.profiles),
        seed=settings.seed,
        channel=settings.channel(devices.program.schema),
        attack=settings.attack,
        deadline_s=settings.deadline_s,
        max_update_ratio=settings.max_update_ratio,
    )


def _without_rounds(
    strategy: Strategy, network: VirtualNetwork, fleet: Fleet, schema: Schema, settings: RunSettings
) -> AsynchronousNetwork | None:
    """What plays a run that waits for no device. Raises ConfigError for a method that needs whole rounds."""
    if settings.asynchronous is None:
        return None
    rules = Rules(
        strategy=check_asynchronous(strategy, fleet),
        options=settings.asynchronous,
        schema=schema,
        fleet=fleet,
        seed=settings.seed,
        max_update_ratio=settings.max_update_ratio,
    )
    return AsynchronousNetwork(network, rules, deadline_s=settings.deadline_s)


def _play(live: LiveRun, settings: RunSettings, number: int) -> tuple[State, RoundReport]:
    """The state after round `number` and what its evaluation found."""
    strategy, schema, fleet, network = live.strategy, live.devices.program.schema, live.fleet, live.network
    rng, scoring = round_rng(settings.seed, number), scoring_of(live.devices.program)
    if live.asynchronous and not live.asynchronous.needs_round(live.state):
        state = live.asynchronous.play(live.state, number)
        cohort = settings.evaluation.cohort(fleet, rng, round=number, of=settings.rounds)
        last = number == settings.rounds
        test = evaluate_round(strategy, state, schema, cohort, batch=settings.batch, last=last, scoring=scoring)
        return state, drive(test, network.ask_beside)
    asking, network.wanted = with_over_selection(strategy, settings.over_select, len(fleet))
    exchanges = run_round(
        asking,
        live.state,
        schema,
        fleet,
        rng,
        batch=settings.batch,
        evaluation=settings.evaluation,
        scoring=scoring,
        round=number,
        of=settings.rounds,
    )
    return drive(exchanges, live.recorder.record_exchanges(network.ask, number, live.state))


def _run_round(live: LiveRun, settings: RunSettings, number: int) -> tuple[State, RoundRecord]:
    """-> the state after round `number`, and the round's record."""
    strategy, network, before = live.strategy, live.network, live.state
    network.open_round(number)
    state, report = _play(live, settings, number)
    _keep_own_models(live, state, settings.batch)
    live.recorder.record_round_end(number, state)
    method, which = method_name(strategy), {"round": number, "of": settings.rounds}
    record = round_record(
        report,
        run=method,
        method=method,
        bytes_down=network.bytes_down,
        bytes_up=network.bytes_up,
        seconds=network.now_s - network.opened_s,
        local_steps=network.local_steps,
        **which,
    )
    cohort = settings.evaluation.cohort(live.fleet, round_rng(settings.seed, number), **which)
    if settings.metrics and cohort:
        own = measure_own(settings.metrics, strategy, state, live.devices, settings.batch, cohort=cohort)
        record["metrics"] = {**record.get("metrics", {}), **own}
    if live.asynchronous:
        record["asynchronous"] = live.asynchronous.record()
    record["answered"] = network.answered / network.asked if network.asked else None
    if privacy := privacy_spent(strategy, state):
        record["privacy"] = privacy
    if secure := what_is_seen(strategy):
        failed = network.no_sum or why_unchanged(strategy, before, state)
        record["secure"] = secure | ({"failed": failed} if failed else {})
    if network.refused:
        record["refused"] = dict(sorted(network.refused.items()))
    return state, record


def _keep_own_models(live: LiveRun, state: State, batch: int) -> None:
    """Where devices are served models of their own, these last: a later evaluation may be the first to name one."""
    if not live.devices.asks_own:
        first = sorted_names(live.fleet)[0]
        some = first if first in state.assignment else next(iter(state.assignment), first)
        live.devices.asks_own = bool(own_slots(serving_probe(live.strategy, state, some, batch=batch)))
