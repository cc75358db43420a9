"""The coordinator's life: lead, gather a fleet, train, publish the centers, serve whoever asks. Decides nothing itself.

One thread pulls events from a transport; exchange_rules.py decides, the store writes first, the link speaks.
`dial(will)` makes a transport and `clock` says what time is, so the same server runs over MQTT, and in virtual time
over a broker in memory. What people ask of it from another thread (stop, pause, resume, close a round) its loop does
where nothing is half done.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.artifacts.client_release import offer_release
from coordinator.artifacts.finished_run import RunResult, make_strategy
from coordinator.artifacts.publish import publish_centers
from coordinator.artifacts.signed_program import CompiledProgram, prepare_program
from coordinator.config import CoordinatorConfig
from coordinator.identity.signing_key import open_signing_key
from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.dispatcher import Dispatcher, Superseded
from coordinator.runtime.exchange_driver import run_exchange
from coordinator.runtime.live_exchange import LiveExchange
from coordinator.runtime.presence import FleetPresence
from coordinator.runtime.sender import CoordinatorSender
from coordinator.runtime.task_messages import ExchangeContext
from coordinator.runtime.training_loop import RunTrainer, train_runs
from coordinator.storage.event_log import EventLog
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.status import StatusWriter
from coordinator.storage.store import Store
from coordinator.strategies.base import Exchange, Replies
from edge_client.errors import ConfigError, FedcentersError, Malformed, NetworkError
from edge_client.protocol import messages
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected, Disconnected, Message, Transport, Will
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)

RECORD_WAIT_S = 1.0  # how long the retained record of an earlier coordinator may take to arrive
MAX_WAIT_S = 1.0  # the longest wait of the event loop
OBSERVE_INTERVAL_S = 0.5  # the shortest time between two looks of an observer
SPREAD_PER_DEVICE_MS = 4  # a broker takes about 300 handshakes a second and core

Dial = Callable[[Will | None], Transport]
EventWatcher = Callable[[Mapping[str, Any]], None]


class ServerStopped(Exception):
    """The server was asked to stop, and noticed it where nothing is half done."""


class Server:
    """One coordinator process. `watch` is told every event of metrics.jsonl as it happens.

    `observe`, where there is one, is told about twice a second what status.json holds, and every device's `presence`.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        *,
        dial: Dial,
        clock: Clock,
        watch: EventWatcher = lambda _: None,
        observe: EventWatcher | None = None,
    ) -> None:
        self.config, self.clock, self.store = config, clock, store
        for run in config.runs:
            make_strategy(run, config)  # a wrong method or setting is told before anything is done
        _check_fingerprint(config, store)
        self.key = open_signing_key(config.signing_key_folder)
        self.event_log = EventLog(config.folder / "metrics.jsonl", store.events, watch)
        self._pulse, self._phase = StatusWriter(config.folder), "starting"
        self._observe, self._glance_s = observe, math.inf if observe is None else 0.0
        self._dial, self._stopping, self._paused = dial, False, False
        self._closing: ExchangeKey | None = None
        self._topics = Topics(config.federation)
        self._transport: Transport | None = None
        self._leading = True
        self._began_s = clock.now_s()

    def run(self) -> None:
        """Everything, until the work is done or `stop` is called. Raises what else ended it."""
        try:
            self._lead()
            self._serve()
        except ServerStopped:
            pass
        except FedcentersError as wrong:
            self._leading = self._leading and not isinstance(wrong, Superseded)
            self.event_log.write("error", message=str(wrong))
            raise
        finally:
            self._leave()

    def stop(self) -> None:
        """Ask the server to end cleanly; from a signal handler or another thread."""
        self._stopping = True
        self._wake()

    def pause(self) -> None:
        """Begin no further exchange until `resume`; the open one goes on to its end. From any thread."""
        self._paused = True
        self._wake()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self._wake()

    def close_round(self, key: ExchangeKey) -> None:
        """Close this exchange as if its deadline had come; nothing when it is not the open one any more."""
        self._closing = key
        self._wake()

    def _wake(self) -> None:
        if self._transport is not None:
            self._transport.wake()

    @property
    def asking(self) -> bool:
        """Whether an exchange is open."""
        return self._transport is not None and self.dispatcher.live is not None

    @property
    def offering(self) -> bool:
        """Whether the centers are published."""
        return self._transport is not None and self.dispatcher.catalog is not None

    def _serve(self) -> None:
        self._write_status("compiling")
        prepared = self._prepare()
        self._write_status("waiting for devices")
        self._gather(prepared)
        self._write_status("aggregating")
        outcomes = self._train(prepared)
        self._write_status("exporting")
        self._publish(outcomes, prepared)
        self._write_status("serving")
        if not self.config.exit_when_done:
            self._pump(lambda: False)

    # -- the stations of a life

    def _lead(self) -> None:
        """Take a higher epoch than anyone before, connect with a will, say so."""
        epoch = self.store.facts.next_epoch(self._epoch_seen())
        self.sender = CoordinatorSender(
            topics=self._topics,
            clock=self.clock,
            epoch=epoch,
            boot=secrets.token_hex(8),
            block=self.config.block,
            spread_ms=SPREAD_PER_DEVICE_MS * len(self.store.states.enrolled()),
        )
        self.downloads = BlockServer(self.store.blobs, self.sender, self.config.in_flight_bytes)
        self.dispatcher = Dispatcher(
            clock=self.clock,
            store=self.store,
            sender=self.sender,
            downloads=self.downloads,
            fleet=FleetPresence(self.config.max_devices),
            event_log=self.event_log,
        )
        self._offer_release()
        self.sender.transport = self._transport = self._dial(self.sender.will())
        self._transport.connect()
        self.event_log.write("start", epoch=epoch, federation=self.config.federation, unix_ms=self.clock.unix_ms())

    def _offer_release(self) -> None:
        """Boards read in our record that there is a newer client, and fetch it as any other blob."""
        if self.config.release is None:
            return
        found = offer_release(
            self.config.release,
            blobs=self.store.blobs,
            key=self.key,
            federation=self.config.federation,
            block=self.config.block,
        )
        self.sender.release = found
        self.downloads.share([found["file"]])

    def _epoch_seen(self) -> int:
        """The epoch of the retained record, else 0; on a connection of its own, since our will needs our epoch."""
        look = self._dial(None)
        look.connect()
        try:
            until_s = self.clock.now_s() + RECORD_WAIT_S
            while (left_s := until_s - self.clock.now_s()) > 0 and not self._stopping:
                event = look.receive(left_s)
                if isinstance(event, Connected):
                    look.subscribe(self._topics.coord())
                elif isinstance(event, Message) and event.topic == self._topics.coord():
                    return _epoch_in(event.payload)
            return 0
        finally:
            look.close()

    def _prepare(self) -> CompiledProgram:
        began_s = self.clock.now_s()
        prepared = prepare_program(self.config, self.store, self.key)
        self.store.facts.get_or_make("lesson", lambda: _fingerprint(self.config))
        self.downloads.share(prepared.blobs())
        self.dispatcher.schema = prepared.program.schema
        engines = {engine: prepared.program.parity.get(engine) for engine in prepared.program.containers}
        seconds = round(self.clock.now_s() - began_s, 3)
        self.event_log.write("program", model=self.config.model.name, parity=engines, seconds=seconds)
        return prepared

    def _gather(self, prepared: CompiledProgram) -> None:
        """Wait for the fleet of the first start; it stays the same for all runs and restarts."""
        if self.store.states.enrolled():
            return
        fleet, engines, needed = self.dispatcher.fleet, prepared.program.containers, self.config.min_devices
        until_s = self.clock.now_s() + self.config.start_timeout_s
        if not self._pump(lambda: len(fleet.devices) >= needed and len(fleet.ready(engines)) >= needed, until_s):
            raise NetworkError(
                f"{len(fleet.ready(engines))} of {needed} devices came within {self.config.start_timeout_s:g} s",
                hint=f"start more devices, or lower min-devices; engines that can train: {', '.join(engines)}",
            )
        self.store.states.enrol({cid: (device.n, device.engine) for cid, device in fleet.ready(engines).items()})

    def _train(self, prepared: CompiledProgram) -> list[RunResult]:
        members = self.store.states.enrolled()
        trainer = RunTrainer(
            seed=self.config.seed,
            batch=self.config.model.batch_size,
            store=self.store,
            event_log=self.event_log,
            meter=self._meter,
            schema=prepared.program.schema,
            initial=prepared.initial,
            fleet={cid: n for cid, (n, _) in members.items()},
            evaluation=self.config.evaluation,
            over_select=self.config.over_select,
        )
        context = ExchangeContext(
            config=self.config,
            clock=self.clock,
            store=self.store,
            sender=self.sender,
            downloads=self.downloads,
            prepared=prepared,
            members=members,
        )

        def ask(key: ExchangeKey, tasks: Exchange, wanted: int | None, late: bool) -> Replies:  # noqa: FBT001 - as Ask says
            self._wait_while_paused()
            if not self.store.exchanges.exists(key):
                self._write_status("waiting for devices")
                self._wait_for_connected(key)
            return run_exchange(key, tasks, wanted, context, self._await, late=late)

        return train_runs(self.config, trainer, ask)

    def _wait_while_paused(self) -> None:
        """As long as someone wants a pause."""
        if self._paused:
            self._write_status("paused")
            self._pump(lambda: not self._paused)

    def _wait_for_connected(self, key: ExchangeKey) -> None:
        """Until enough of the fleet is on line to begin an exchange, a deadline long; then as below the quorum."""
        fleet, here = self.store.states.enrolled(), self.dispatcher.fleet
        needed = math.ceil(self.config.fraction_connected * len(fleet))
        until_s = self.clock.now_s() + self.config.deadline_s
        if self._pump(lambda: here.count(fleet) >= needed, until_s) or self.config.below_quorum == "continue":
            return
        raise NetworkError(
            f"{here.count(fleet)} of {needed} devices were connected for round {key.round}",
            hint="start again to wait for them, or lower `fraction-connected`",
        )

    def _publish(self, outcomes: list[RunResult], prepared: CompiledProgram) -> None:
        """Offer the centers; only then tell that they are there."""
        catalog, manifest, events = publish_centers(outcomes, self.config, self.store, prepared)
        self.downloads.share([manifest, *catalog.blobs()])
        self.dispatcher.catalog, self.dispatcher.catalog_blob = catalog, manifest
        self.sender.publish_catalog(catalog.version, manifest)
        for event in events:
            self.event_log.append_stored(event)
        if self.store.facts.get("done") is None:
            done = {"event": "done", "seconds": round(self.clock.now_s() - self._began_s, 3)}
            self.store.facts.put("done", "yes", [done])
            self.event_log.append_stored(done)

    def _leave(self) -> None:
        """Say goodbye, unless another one leads: the record is the other's now."""
        if self._transport is not None:
            self._write_status("stopped")
            if self._leading:
                self.sender.publish_record(online=False)
            self._transport.close()

    # -- the event loop

    def _await(self, live: LiveExchange) -> None:
        """Run the loop until the exchange is closed."""
        self.dispatcher.live = live
        self._write_status("asking")
        self._pump(lambda: live.closed)
        self._notify_observer()
        self.dispatcher.live = None
        if live.late_updates is not None:
            if self.dispatcher.late is not None:
                self.dispatcher.late.close()
            self.dispatcher.late = live.late_updates
        self._write_status("aggregating")

    def _pump(self, done: Callable[[], bool], until_s: float = math.inf) -> bool:
        """Take events until `done`; -> False when `until_s` came first. Raises Stopped."""
        while not done():
            if self._stopping:
                raise ServerStopped
            live, now_s = self.dispatcher.live, self.clock.now_s()
            if now_s >= self._pulse.due_s:
                self._write_status()
            elif now_s >= self._glance_s:
                self._notify_observer()
            if now_s >= until_s:
                return False
            if live is not None and live.key == self._closing:
                self._closing = None
                live.close()
                continue
            if live is not None and now_s >= live.wakes_at_s:
                live.tick()
                continue
            wake_s = min(until_s, now_s + MAX_WAIT_S, math.inf if live is None else live.wakes_at_s)
            self._take(min(wake_s, self.downloads.wakes_at_s) - now_s)
            self.downloads.send_due()
        return True

    def _write_status(self, phase: str = "") -> None:
        """Leave word of what is going on, for `status` and who else looks."""
        self._phase = phase or self._phase
        self._pulse.write(self.clock.now_s(), phase, self._numbers())
        self._notify_observer()

    def _notify_observer(self) -> None:
        """Let the observer see, where there is one."""
        if self._observe is None:
            return
        self._glance_s = self.clock.now_s() + OBSERVE_INTERVAL_S
        presence = {cid: device.state for cid, device in self.dispatcher.fleet.devices.items()}
        names = self.store.states.run_names()
        told = {"phase": self._phase, "paused": self._paused, "presence": presence, "names": names}
        self._observe({**self._numbers(), **told})

    def _numbers(self) -> dict[str, Any]:
        live, fleet = self.dispatcher.live, self.dispatcher.fleet
        return {
            "unix_ms": self.clock.unix_ms(),
            "connected": len(fleet.online()),
            "runtimes": fleet.refusals(),
            "bytes": {"down": self.sender.bytes_down, "up": self.dispatcher.bytes_up},
            "exchange": None if live is None else live.progress(),
        }

    def _take(self, timeout_s: float) -> None:
        event = None if self._transport is None else self._transport.receive(timeout_s)
        if isinstance(event, Message):
            self.dispatcher.dispatch(event)
        elif isinstance(event, Connected):
            self._on_connected()
        elif isinstance(event, Disconnected):
            log.warning("the broker is gone (%s); connecting again", event.reason)

    def _on_connected(self) -> None:
        """The broker has forgotten this connection, and maybe everything: say everything again."""
        if self._transport is not None:
            self._transport.subscribe(self._topics.coord(), *self._topics.coordinator_filters())
        self.sender.publish_record(online=True)
        catalog, blob = self.dispatcher.catalog, self.dispatcher.catalog_blob
        if catalog is not None and blob is not None:
            self.sender.publish_catalog(catalog.version, blob)
        if self.dispatcher.live is not None:
            self.dispatcher.live.begin()

    def _meter(self) -> tuple[float, int, int]:
        return self.clock.now_s(), self.sender.bytes_down, self.dispatcher.bytes_up


def _check_fingerprint(config: CoordinatorConfig, store: Store) -> None:
    """A folder continues what it began with, nothing else."""
    if store.facts.get("lesson") not in (None, _fingerprint(config)):
        raise ConfigError(
            f"{config.folder} holds a training with other settings",
            hint="choose another folder, or restore the settings in its config.toml",
        )


def _fingerprint(config: CoordinatorConfig) -> str:
    return json.dumps(config.fingerprint(), sort_keys=True)


def _epoch_in(payload: bytes) -> int:
    try:
        return int(messages.read_message(payload, "coord")["epoch"])
    except Malformed:
        return 0
