"""The coordinator's life: lead, wait for a fleet, train, publish the centers, serve them until the process ends.

One thread pulls events from a transport. `dial(will)` makes a transport and `clock` says what time is, so the same
server runs over MQTT, and in virtual time over a broker in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from coordinator.artifacts.finished_run import RunResult, make_strategy
from coordinator.artifacts.publish import publish_centers
from coordinator.artifacts.signed_program import PROGRAM_FACT, CompiledProgram
from coordinator.artifacts.stored_settings import accept_settings, settings_text
from coordinator.config import CoordinatorConfig
from coordinator.identity.revoked_list import RevokedList
from coordinator.identity.signing_key import open_signing_key
from coordinator.rounds.asynchronous.options import check_asynchronous
from coordinator.rounds.privacy_accounting import check_private
from coordinator.rounds.silence import Misses
from coordinator.runtime.announcer import StateAnnouncer, training_state
from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.dispatcher import Dispatcher
from coordinator.runtime.event_loop import AwakeClock, Controls, EventLoop, ServerStopped
from coordinator.runtime.exchange.exchange_driver import run_exchange
from coordinator.runtime.exchange.interval_tests import IntervalTests
from coordinator.runtime.exchange.masked_sums import check_masked
from coordinator.runtime.exchange.task_messages import ExchangeContext, NetworkExchange
from coordinator.runtime.exchange.without_rounds import Network, WithoutRounds
from coordinator.runtime.leadership import Superseded, take_lead
from coordinator.runtime.presence import FleetPresence
from coordinator.runtime.program_on_demand import ProgramOnDemand
from coordinator.runtime.sender import Dial
from coordinator.runtime.status_reporter import EventWatcher, StatusReporter
from coordinator.runtime.training_fleet import TrainingFleet
from coordinator.runtime.training_loop import RunTrainer, train_runs
from coordinator.storage.event_log import EventLog
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.key_value_store import DONE_FACT, SETTINGS_FACT
from coordinator.storage.status import StatusWriter
from coordinator.storage.store import Store
from coordinator.strategies.base import Replies
from coordinator.strategies.common.sampling import part_of
from edge_client.errors import NetworkError, describe_error
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.task import ClientId
from edge_client.transport.clock import Clock


class Server:
    """One coordinator process. `watch` is called with every event of metrics.jsonl as it happens.

    `observe`, where there is one, is called about twice a second with what status.json holds and every device's
    `presence`. `progress` is called with what happens between those events: one more device is here, a part of the
    program is compiled, a round waits for some devices. `beside`: slow work has a thread of its own, so that devices
    are answered meanwhile. `session` exists from the moment that the server leads.
    """

    def __init__(  # noqa: PLR0913 - who is told of what
        self,
        config: CoordinatorConfig,
        store: Store,
        *,
        dial: Dial,
        clock: Clock,
        watch: EventWatcher = lambda _: None,
        observe: EventWatcher | None = None,
        progress: EventWatcher = lambda _: None,
        beside: bool = False,
    ) -> None:
        for run in config.runs:
            strategy = make_strategy(run, config)  # raises for a wrong method or setting before anything is done
            check_private(strategy)
            if config.round.asynchronous is not None:
                check_asynchronous(strategy, {})
            check_masked(strategy, min_devices=config.fleet.min_devices)
        accept_settings(config, store)
        self.session: EventLoop | None = None
        self._config, self._store, self._dial, self._observe = config, store, dial, observe
        self._clock, self._passing = AwakeClock(clock), clock  # the second goes on while there is no broker
        self._key = open_signing_key(config.signing_key_folder)
        self._event_log = EventLog(config.folder / "metrics.jsonl", store.events, watch, clock.unix_ms)
        self._controls = Controls()
        self._progress, self._beside = progress, beside
        self._began_s = self._clock.now_s()

    def run(self) -> None:
        """Everything, until the work is done or `stop` is called. Raises what else ended it."""
        leading = True
        try:
            self.session = self._lead()
            self.session.transport.connect()
            self._subscribe(self.session)
            self._serve(self.session)
        except ServerStopped:
            pass
        except Exception as wrong:  # also a bug: who watches the run learns what ended it
            leading = not isinstance(wrong, Superseded)
            with suppress(Exception):  # what ended it is raised, not what follows from it, as on a full disk
                self._event_log.write("error", message=describe_error(wrong))
            raise
        finally:
            if self.session is not None:
                self._leave(self.session, leading=leading)

    @property
    def busy(self) -> bool:
        """Whether slow work still goes on in a thread of its own; it outlasts `run` when `stop` was called."""
        return self._controls.worker is not None and self._controls.worker.is_alive()

    def stop(self) -> None:
        """Ask the server to end cleanly. From any thread."""
        self._controls.stopping = True
        self._wake()

    def pause(self) -> None:
        """Begin no further exchange until `resume`; the open one goes on to its end. From any thread."""
        self._controls.paused = True
        self._wake()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._controls.paused = False
        self._wake()

    def close_round(self, key: ExchangeKey) -> None:
        """Close this exchange as if its deadline had come; nothing when it is not the open one any more."""
        self._controls.closing = key
        self._wake()

    def _wake(self) -> None:
        if self.session is not None:
            self.session.transport.wake()

    def _lead(self) -> EventLoop:
        """Take the lead, and make the parts that carry its epoch."""
        config, store, clock = self._config, self._store, self._clock
        sender = take_lead(
            config, store, self._key, dial=self._dial, clock=clock, stopping=lambda: self._controls.stopping
        )
        fleet = FleetPresence(config.fleet.max_devices)
        announcer = StateAnnouncer(sender, lambda: len(fleet.devices))
        downloads = BlockServer(store.blobs, sender, config.transfer.in_flight_bytes)
        if sender.release is not None:
            downloads.share([sender.release["file"]])
        dispatcher = Dispatcher(
            clock=clock,
            store=store,
            sender=sender,
            downloads=downloads,
            fleet=fleet,
            event_log=self._event_log,
            newcomers=lambda: announcer.state.get("newcomers", "now"),
            revoked=RevokedList(config.signing_key_folder).names,
        )
        status = StatusReporter(
            StatusWriter(config.folder),
            clock=self._passing,
            announcer=announcer,
            store=store,
            sender=sender,
            dispatcher=dispatcher,
            is_paused=lambda: self._controls.paused,
            observe=self._observe,
            progress=self._progress,
        )
        return EventLoop(
            transport=sender.open(self._dial),
            clock=clock,
            sender=sender,
            downloads=downloads,
            dispatcher=dispatcher,
            status=status,
            controls=self._controls,
        )

    @staticmethod
    def _subscribe(session: EventLoop) -> None:
        """Hear the devices before anything is said: the answer to a task that is quicker than this would be lost."""
        session.run_until(lambda: session.sender.link > 0)

    def _serve(self, session: EventLoop) -> None:
        config, epoch = self._config, session.sender.epoch
        rounds, needs = {run.name: run.rounds for run in config.runs}, config.fleet.min_devices
        offer = session.sender.release
        release = {} if offer is None else {"release": offer["version"]}
        self._event_log.write("start", epoch=epoch, federation=config.federation, rounds=rounds, needs=needs, **release)
        program = ProgramOnDemand(
            config=config,
            store=self._store,
            key=self._key,
            session=session,
            clock=self._clock,
            event_log=self._event_log,
            progress=self._progress,
            on_ready=lambda: self._store.facts.get_or_make(SETTINGS_FACT, lambda: settings_text(config)),
            beside=self._beside,
        )
        if self._store.facts.get(PROGRAM_FACT) is not None:
            program.ensure(())  # read, not compiled
        devices = TrainingFleet(
            self._store,
            session.dispatcher.fleet,
            config.model.engines,
            self._event_log,
            program.ensure,
            max_samples_ratio=config.fleet.max_samples_ratio,
        )
        self._gather(session, devices)
        session.status.write("aggregating")
        outcomes = self._train(session, program, devices)
        prepared = program.ensure(config.compiled_engines, trained=True)  # for devices that never trained
        session.status.announcer.set("export", "no")
        session.status.write("exporting")
        self._publish(session, outcomes, prepared)
        session.status.announcer.set("serve", "no")
        session.status.write("serving")
        if not config.exit_when_done:
            session.run_until(lambda: False)

    def _gather(self, session: EventLoop, devices: TrainingFleet) -> None:
        """Wait for the fleet of the first start; it may grow later, between rounds.

        The program is compiled for the devices that are here first while the others come.
        """
        if devices.members:
            devices.compile_program()
            return
        fleet, told = self._config.fleet, -1
        session.status.write("waiting for devices")

        def enough() -> bool:
            nonlocal told
            here = devices.count_ready()
            if here >= fleet.min_devices:
                return True
            if here != told:
                told = here
                session.status.announcer.set("gather", "now", here=here, needed=fleet.min_devices)
                self._progress({"event": "waiting", "here": here, "needed": fleet.min_devices})
            return False

        until_s = self._clock.now_s() + fleet.start_timeout_s
        if session.run_until(lambda: enough() or devices.is_asked_for(), until_s):
            devices.compile_program()
            told = -1
            session.status.write("waiting for devices")
        if not session.run_until(enough, until_s):
            raise NetworkError(
                f"{told} of {fleet.min_devices} devices came within {fleet.start_timeout_s:g} s",
                hint=f"start more devices, lower min-devices, or leave start-timeout-s out to wait without an end; "
                f"engines that can train: {', '.join(devices.engines)}",
            )
        devices.enrol()

    def _train(self, session: EventLoop, program: ProgramOnDemand, devices: TrainingFleet) -> list[RunResult]:
        trainer = RunTrainer(
            config=self._config,
            store=self._store,
            event_log=self._event_log,
            meter=lambda: (self._clock.now_s(), session.sender.bytes_down, session.dispatcher.bytes_up),
            prepared=program.ensure(()),
            devices=devices,
            without_rounds=self._without_rounds(session, program, devices),
        )
        misses: dict[ClientId, Misses] = {}

        def ask(key: ExchangeKey, tasks: NetworkExchange, wanted: int | None, late: bool) -> Replies:  # noqa: FBT001 - as Ask says
            context = self._open(key, session, program, devices, misses)
            if not self._store.exchanges.exists(key):
                self._wait_for_connected(session, key)
            return run_exchange(key, tasks, wanted, context, session.run_until_closed, late=late)

        return train_runs(trainer, ask)

    def _open(
        self,
        key: ExchangeKey,
        session: EventLoop,
        program: ProgramOnDemand,
        devices: TrainingFleet,
        misses: dict[ClientId, Misses],
    ) -> ExchangeContext:
        """Announce where the training is, wait while it is paused; -> the parts that an exchange uses."""
        names = self._store.states.run_names()
        session.status.announcer.set("train", **training_state(key, self._config, names))
        session.wait_while_paused()
        return ExchangeContext(
            config=self._config,
            clock=self._clock,
            store=self._store,
            sender=session.sender,
            downloads=session.downloads,
            prepared=program.ensure(()),
            members=devices.members_of(names[key.run], key.round),
            misses=misses,
            unable=session.dispatcher.exchange.unable,
            revoked=lambda: session.dispatcher.fleet.revoked,
        )

    def _without_rounds(
        self, session: EventLoop, program: ProgramOnDemand, devices: TrainingFleet
    ) -> WithoutRounds | None:
        """What plays runs that wait for no device; None where runs have rounds."""
        config, here = self._config, session.dispatcher.fleet.devices
        if config.round.asynchronous is None:
            return None
        network = Network(
            open=lambda key: self._open(key, session, program, devices, {}),
            run_until_closed=session.run_until_closed,
            is_online=lambda who: who in here and here[who].is_online,
            newcomers=lambda: bool(devices.ready().keys() - devices.members.keys()),
        )
        return WithoutRounds(
            options=config.round.asynchronous,
            network=network,
            store=self._store,
            seed=config.seed,
            max_update_ratio=config.update.max_ratio,
            tests=IntervalTests(
                evaluation=config.round.evaluation,
                store=self._store,
                seed=config.seed,
                is_online=network.is_online,
            ),
        )

    def _wait_for_connected(self, session: EventLoop, key: ExchangeKey) -> None:
        """Wait, a deadline long, until enough of the fleet is online to begin an exchange; then as below the quorum.

        A pause that comes meanwhile is waited for, too; after it there is a whole deadline.
        """
        config, here = self._config, session.dispatcher.fleet
        enrolled = self._store.states.enrolled().keys()

        def counts() -> tuple[int, int]:
            """How many are connected, and how many must be; a device may be revoked meanwhile."""
            fleet = enrolled - here.revoked
            return here.count(fleet), part_of(config.round.fraction_connected, len(fleet))

        def enough() -> bool:
            connected, needed = counts()
            return connected >= needed

        session.status.write("waiting for devices")
        until_s = self._clock.now_s() + config.round.deadline_s
        while session.run_until(lambda: self._controls.paused or enough(), until_s):
            session.wait_while_paused()
            if enough():
                return
            session.status.write("waiting for devices")
            until_s = self._clock.now_s() + config.round.deadline_s
        if config.round.below_quorum == "continue":
            return
        raise NetworkError(
            "{} of {} devices were connected for round {}".format(*counts(), key.round),
            hint="start again to wait for them, or lower `fraction-connected`",
        )

    def _publish(self, session: EventLoop, outcomes: list[RunResult], prepared: CompiledProgram) -> None:
        """Publish the centers, then log that they are published."""
        unix_ms = self._clock.unix_ms()

        def publish() -> tuple[Catalog, Manifest, list[Mapping[str, Any]]]:
            return publish_centers(outcomes, self._config, self._store, prepared, unix_ms=unix_ms)

        catalog, manifest, events = session.run_beside(publish) if self._beside else publish()
        session.dispatcher.catalog.publish(catalog, manifest, prepared.program.schema)
        for event in events:
            self._event_log.append_stored(event)
        ends = {"ends": True} if self._config.exit_when_done else {}
        if self._store.facts.get(DONE_FACT) is None:
            seconds = round(self._clock.now_s() - self._began_s, 3)
            done = {"event": "done", "unix_ms": self._clock.unix_ms(), "seconds": seconds, **ends}
            self._store.facts.put(DONE_FACT, "yes", [done])
            self._event_log.append_stored(done)
        else:
            self._progress({"event": "serving", **ends})

    @staticmethod
    def _leave(session: EventLoop, *, leading: bool) -> None:
        """Publish that this coordinator is offline, unless another one leads: the record is the other's now."""
        session.status.write("stopped")
        if leading:
            session.sender.publish_record(online=False)
        session.transport.close()
