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

from coordinator.artifacts.client_release import offered
from coordinator.artifacts.finished_run import Outcome, strategy_of
from coordinator.artifacts.publish import publish
from coordinator.artifacts.signed_program import Prepared, prepare
from coordinator.config import CoordinatorConfig
from coordinator.identity.signing_key import open_key
from coordinator.runtime.block_server import Downloads
from coordinator.runtime.dispatcher import Reception, Superseded
from coordinator.runtime.exchange_driver import LiveExchange, hold
from coordinator.runtime.presence import Fleet
from coordinator.runtime.sender import Link
from coordinator.runtime.task_messages import Desk
from coordinator.runtime.training_loop import School, train
from coordinator.storage.event_log import Journal
from coordinator.storage.status import Pulse
from coordinator.storage.store import Key, Store
from coordinator.strategies.base import Exchange, Replies
from edge_client.errors import ConfigError, FedcentersError, Malformed, NetworkError
from edge_client.protocol import messages
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected, Lost, Message, Transport, Will
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how long the retained record of an earlier coordinator may take to arrive
NAP_S = 1.0  # the longest wait of the event loop
GLANCE_S = 0.5  # the shortest time between two looks of an observer
SPREAD_PER_DEVICE_MS = 4  # a broker takes about 300 handshakes a second and core

Dial = Callable[[Will | None], Transport]
Watch = Callable[[Mapping[str, Any]], None]


class Stopped(Exception):
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
        watch: Watch = lambda _: None,
        observe: Watch | None = None,
    ) -> None:
        self.config, self.clock, self.store = config, clock, store
        for run in config.runs:
            strategy_of(run, config)  # a wrong method or setting is told before anything is done
        _check_lesson(config, store)
        self.key = open_key(config.keys)
        self.journal = Journal(config.folder / "metrics.jsonl", store, watch)
        self._pulse, self._phase = Pulse(config.folder), "starting"
        self._observe, self._glance_s = observe, math.inf if observe is None else 0.0
        self._dial, self._stopping, self._paused = dial, False, False
        self._closing: Key | None = None
        self._topics = Topics(config.federation)
        self._transport: Transport | None = None
        self._leading = True
        self._began_s = clock.now_s()

    def run(self) -> None:
        """Everything, until the work is done or `stop` is called. Raises what else ended it."""
        try:
            self._lead()
            self._serve()
        except Stopped:
            pass
        except FedcentersError as wrong:
            self._leading = self._leading and not isinstance(wrong, Superseded)
            self.journal.write("error", message=str(wrong))
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

    def close_round(self, key: Key) -> None:
        """Close this exchange as if its deadline had come; nothing when it is not the open one any more."""
        self._closing = key
        self._wake()

    def _wake(self) -> None:
        if self._transport is not None:
            self._transport.wake()

    @property
    def asking(self) -> bool:
        """Whether an exchange is open."""
        return self._transport is not None and self.reception.live is not None

    @property
    def offering(self) -> bool:
        """Whether the centers are published."""
        return self._transport is not None and self.reception.catalog is not None

    def _serve(self) -> None:
        self._beat("compiling")
        prepared = self._prepare()
        self._beat("waiting for devices")
        self._gather(prepared)
        self._beat("aggregating")
        outcomes = self._train(prepared)
        self._beat("exporting")
        self._publish(outcomes, prepared)
        self._beat("serving")
        if not self.config.exit_when_done:
            self._pump(lambda: False)

    # -- the stations of a life

    def _lead(self) -> None:
        """Take a higher epoch than anyone before, connect with a will, say so."""
        epoch = self.store.next_epoch(self._epoch_seen())
        self.link = Link(
            topics=self._topics,
            clock=self.clock,
            epoch=epoch,
            boot=secrets.token_hex(8),
            block=self.config.block,
            spread_ms=SPREAD_PER_DEVICE_MS * len(self.store.enrolled()),
        )
        self.downloads = Downloads(self.store.blobs, self.link, self.config.in_flight)
        self.reception = Reception(
            clock=self.clock,
            store=self.store,
            link=self.link,
            downloads=self.downloads,
            fleet=Fleet(self.config.max_devices),
            journal=self.journal,
        )
        self._offer_release()
        self.link.transport = self._transport = self._dial(self.link.will())
        self._transport.connect()
        self.journal.write("start", epoch=epoch, federation=self.config.federation, unix_ms=self.clock.unix_ms())

    def _offer_release(self) -> None:
        """Boards read in our record that there is a newer client, and fetch it as any other blob."""
        if self.config.release is None:
            return
        found = offered(
            self.config.release,
            blobs=self.store.blobs,
            key=self.key,
            federation=self.config.federation,
            block=self.config.block,
        )
        self.link.release = found
        self.downloads.share([found["file"]])

    def _epoch_seen(self) -> int:
        """The epoch of the retained record, else 0; on a connection of its own, since our will needs our epoch."""
        look = self._dial(None)
        look.connect()
        try:
            until_s = self.clock.now_s() + LOOK_S
            while (left_s := until_s - self.clock.now_s()) > 0 and not self._stopping:
                event = look.receive(left_s)
                if isinstance(event, Connected):
                    look.subscribe(self._topics.coord())
                elif isinstance(event, Message) and event.topic == self._topics.coord():
                    return _epoch_in(event.payload)
            return 0
        finally:
            look.close()

    def _prepare(self) -> Prepared:
        began_s = self.clock.now_s()
        prepared = prepare(self.config, self.store, self.key)
        self.store.once("lesson", lambda: _lesson(self.config))
        self.downloads.share(prepared.blobs())
        self.reception.schema = prepared.program.schema
        engines = {engine: prepared.program.parity.get(engine) for engine in prepared.program.containers}
        seconds = round(self.clock.now_s() - began_s, 3)
        self.journal.write("program", model=self.config.model.name, parity=engines, seconds=seconds)
        return prepared

    def _gather(self, prepared: Prepared) -> None:
        """Wait for the fleet of the first start; it stays the same for all runs and restarts."""
        if self.store.enrolled():
            return
        fleet, engines, needed = self.reception.fleet, prepared.program.containers, self.config.min_devices
        until_s = self.clock.now_s() + self.config.start_timeout_s
        if not self._pump(lambda: len(fleet.devices) >= needed and len(fleet.ready(engines)) >= needed, until_s):
            raise NetworkError(
                f"{len(fleet.ready(engines))} of {needed} devices came within {self.config.start_timeout_s:g} s",
                hint=f"start more devices, or lower min-devices; engines that can train: {', '.join(engines)}",
            )
        self.store.enrol({cid: (device.n, device.engine) for cid, device in fleet.ready(engines).items()})

    def _train(self, prepared: Prepared) -> list[Outcome]:
        members = self.store.enrolled()
        school = School(
            seed=self.config.seed,
            batch=self.config.model.batch_size,
            store=self.store,
            journal=self.journal,
            meter=self._meter,
            schema=prepared.program.schema,
            initial=prepared.initial,
            fleet={cid: n for cid, (n, _) in members.items()},
            evaluation=self.config.evaluation,
            over_select=self.config.over_select,
        )
        desk = Desk(
            config=self.config,
            clock=self.clock,
            store=self.store,
            link=self.link,
            downloads=self.downloads,
            prepared=prepared,
            members=members,
        )

        def ask(key: Key, tasks: Exchange, wanted: int | None, late: bool) -> Replies:  # noqa: FBT001 - as Ask says
            self._rest()
            if not self.store.knows(key):
                self._beat("waiting for devices")
                self._wait_for_connected(key)
            return hold(key, tasks, wanted, desk, self._await, late=late)

        return train(self.config, school, ask)

    def _rest(self) -> None:
        """As long as someone wants a pause."""
        if self._paused:
            self._beat("paused")
            self._pump(lambda: not self._paused)

    def _wait_for_connected(self, key: Key) -> None:
        """Until enough of the fleet is on line to begin an exchange, a deadline long; then as below the quorum."""
        fleet, here = self.store.enrolled(), self.reception.fleet
        needed = math.ceil(self.config.fraction_connected * len(fleet))
        until_s = self.clock.now_s() + self.config.deadline_s
        if self._pump(lambda: here.count(fleet) >= needed, until_s) or self.config.below_quorum == "continue":
            return
        raise NetworkError(
            f"{here.count(fleet)} of {needed} devices were connected for round {key.round}",
            hint="start again to wait for them, or lower `fraction-connected`",
        )

    def _publish(self, outcomes: list[Outcome], prepared: Prepared) -> None:
        """Offer the centers; only then tell that they are there."""
        catalog, manifest, events = publish(outcomes, self.config, self.store, prepared)
        self.downloads.share([manifest, *catalog.blobs()])
        self.reception.catalog, self.reception.catalog_blob = catalog, manifest
        self.link.publish_catalog(catalog.version, manifest)
        for event in events:
            self.journal.show(event)
        if self.store.get("done") is None:
            done = {"event": "done", "seconds": round(self.clock.now_s() - self._began_s, 3)}
            self.store.remember("done", "yes", [done])
            self.journal.show(done)

    def _leave(self) -> None:
        """Say goodbye, unless another one leads: the record is the other's now."""
        if self._transport is not None:
            self._beat("stopped")
            if self._leading:
                self.link.publish_record(online=False)
            self._transport.close()

    # -- the event loop

    def _await(self, live: LiveExchange) -> None:
        """Run the loop until the exchange is closed."""
        self.reception.live = live
        self._beat("asking")
        self._pump(lambda: live.closed)
        self._look()
        self.reception.live = None
        if live.latecomers is not None:
            if self.reception.late is not None:
                self.reception.late.close()
            self.reception.late = live.latecomers
        self._beat("aggregating")

    def _pump(self, done: Callable[[], bool], until_s: float = math.inf) -> bool:
        """Take events until `done`; -> False when `until_s` came first. Raises Stopped."""
        while not done():
            if self._stopping:
                raise Stopped
            live, now_s = self.reception.live, self.clock.now_s()
            if now_s >= self._pulse.due_s:
                self._beat()
            elif now_s >= self._glance_s:
                self._look()
            if now_s >= until_s:
                return False
            if live is not None and live.key == self._closing:
                self._closing = None
                live.close()
                continue
            if live is not None and now_s >= live.wakes_at_s:
                live.tick()
                continue
            wake_s = min(until_s, now_s + NAP_S, math.inf if live is None else live.wakes_at_s)
            self._take(min(wake_s, self.downloads.wakes_at_s) - now_s)
            self.downloads.serve()
        return True

    def _beat(self, phase: str = "") -> None:
        """Leave word of what is going on, for `status` and who else looks."""
        self._phase = phase or self._phase
        self._pulse.beat(self.clock.now_s(), phase, self._numbers())
        self._look()

    def _look(self) -> None:
        """Let the observer see, where there is one."""
        if self._observe is None:
            return
        self._glance_s = self.clock.now_s() + GLANCE_S
        presence = {cid: device.state for cid, device in self.reception.fleet.devices.items()}
        told = {"phase": self._phase, "paused": self._paused, "presence": presence, "names": self.store.run_names()}
        self._observe({**self._numbers(), **told})

    def _numbers(self) -> dict[str, Any]:
        live, fleet = self.reception.live, self.reception.fleet
        return {
            "unix_ms": self.clock.unix_ms(),
            "connected": len(fleet.here()),
            "runtimes": fleet.refusals(),
            "bytes": {"down": self.link.bytes_down, "up": self.reception.bytes_up},
            "exchange": None if live is None else live.progress(),
        }

    def _take(self, timeout_s: float) -> None:
        event = None if self._transport is None else self._transport.receive(timeout_s)
        if isinstance(event, Message):
            self.reception.take(event)
        elif isinstance(event, Connected):
            self._on_connected()
        elif isinstance(event, Lost):
            log.warning("the broker is gone (%s); connecting again", event.reason)

    def _on_connected(self) -> None:
        """The broker has forgotten this connection, and maybe everything: say everything again."""
        if self._transport is not None:
            self._transport.subscribe(self._topics.coord(), *self._topics.coordinator_filters())
        self.link.publish_record(online=True)
        catalog, blob = self.reception.catalog, self.reception.catalog_blob
        if catalog is not None and blob is not None:
            self.link.publish_catalog(catalog.version, blob)
        if self.reception.live is not None:
            self.reception.live.begin()

    def _meter(self) -> tuple[float, int, int]:
        return self.clock.now_s(), self.link.bytes_down, self.reception.bytes_up


def _check_lesson(config: CoordinatorConfig, store: Store) -> None:
    """A folder continues what it began with, nothing else."""
    if store.get("lesson") not in (None, _lesson(config)):
        raise ConfigError(
            f"{config.folder} holds a training with other settings",
            hint="choose another folder, or restore the settings in its config.toml",
        )


def _lesson(config: CoordinatorConfig) -> str:
    return json.dumps(config.lesson(), sort_keys=True)


def _epoch_in(payload: bytes) -> int:
    try:
        return int(messages.read(payload, "coord")["epoch"])
    except Malformed:
        return 0
