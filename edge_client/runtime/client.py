"""A device's life: announce, fetch, check, train, keep, deliver; until it is told to stop.

One thread, one loop: `life` waits for events, the handlers note what they mean, then the next piece of work is done. It
is a generator, so that `run` lives it in a thread of its own, and an emulator many of them in one. Every answer is on
disk before its first message leaves, so a power cut at any line repeats at most the training. task_runner.py knows
numbers and bytes, state.py what survives, downloader.py and uploader.py how things travel.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.config import ClientConfig
from edge_client.data.dataset import DataFolder, DeviceData
from edge_client.engines.base import open_engine
from edge_client.engines.golden_run import run_golden
from edge_client.engines.installed import version_of
from edge_client.errors import DeviceRefused, Malformed, ProgramRefused, ProtocolError, RuntimeMissing
from edge_client.protocol import messages, task_codec
from edge_client.protocol.blocks import DEFAULT_BLOCK_BYTES, Manifest, manifest_of
from edge_client.protocol.message_schemas import CODECS, MAX_DETAIL_CHARS, NACK_CODES
from edge_client.protocol.program import Program
from edge_client.protocol.topics import Topics
from edge_client.protocol.transfer import MAX_WINDOW
from edge_client.runtime.downloader import Downloader, open_cache
from edge_client.runtime.engine_selection import FILE, Check, Refused, Vetting
from edge_client.runtime.sender import DeviceSender, presence_message
from edge_client.runtime.state import DeviceState, StoredResult, TaskKey, residual_name
from edge_client.runtime.systemd_watchdog import Watchdog
from edge_client.runtime.task_runner import OpenEngine, TaskResult, TaskRunner
from edge_client.runtime.train_conditions import check_may_train
from edge_client.runtime.uploader import Uploader
from edge_client.transport.base import Connected, Dial, Disconnected, Event, Message, Will
from edge_client.transport.clock import Clock
from edge_client.update.self_update import SelfUpdater

log = logging.getLogger(__name__)

MAX_IDLE_S = 60.0  # the longest nap; any event ends it
RETRY_S = 60.0
POLL_S = 0.2  # how often a training device looks whether somebody wants it to stop
SOFTWARE = "fedcenters-edge"
UPDATE = "install the version of fedcenters that the coordinator runs"

ClientLoop = Generator[float, Event | None, None]  # yields seconds; is sent what came within them, or None


class _TaskDropped(Exception):
    """The task under way is not wanted any more."""


@dataclass
class _PendingTask:
    """A task that was asked for: its valid message, and when its answer becomes useless."""

    key: TaskKey
    message: Mapping[str, Any]
    until_s: float


class Client:
    """One device. `rng` makes ids and jitter, nothing that is learned depends on it."""

    def __init__(  # noqa: PLR0913 - the parts of a device
        self,
        config: ClientConfig,
        dial: Dial,
        *,
        local: DeviceData,
        clock: Clock,
        rng: np.random.Generator,
        open_engine: OpenEngine = open_engine,
        check: Check = run_golden,
        watchdog: Watchdog | None = None,
        samples: DataFolder | None = None,
        updates: SelfUpdater | None = None,
    ) -> None:
        self.config, self._local, self._clock = config, local, clock
        self._watchdog, self._samples = watchdog or Watchdog({}), samples
        self._round: tuple[str, int] | None = None  # run and round of the last task
        self._updates = updates or SelfUpdater(None)
        self._offer: Mapping[str, Any] | None = None  # a release that is wanted
        self.state = DeviceState(config.state, federation=config.federation, device_id=config.device_id)
        self._topics = Topics(config.federation)
        self._transport = dial(self._will)
        self._sender = DeviceSender(self._topics, config.device_id, self._transport, clock=clock, rng=rng)
        self._cache = open_cache(config)
        self._downloads = Downloader(self._cache, self._sender.request_blocks)
        self._uploader = Uploader(self.state, self._sender, self._transport, clock=clock, rng=rng)
        self._runner = TaskRunner(config, self._cache, local, open_engine, Vetting(config.state / FILE, check))
        self._refused: list[Refused] = []  # engines that fail the golden run of the program at hand
        self._task: _PendingTask | None = None
        self._glance_s = 0.0  # when to look next, while training
        self._boot: str | None = None  # of the coordinator's process
        self._block = DEFAULT_BLOCK_BYTES
        self._failure: ProtocolError | None = None
        self._stopping = threading.Event()
        self._handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "coord": self._on_coord,
            "task": self._on_task,
            "go": self._uploader.on_go,
            "ack": self._uploader.on_ack,
            "stop": self._on_stop,
            "rebirth": self._on_rebirth,
            "err": self._on_error,
        }

    def run(self) -> None:
        """Live until `stop`. Raises NetworkError when the broker cannot be reached, ProtocolError when turned away."""
        with contextlib.closing(self.loop()) as life:
            event: Event | None = None
            while (wait_s := _resume(life, event)) is not None:
                event = self._transport.receive(wait_s)

    def loop(self) -> ClientLoop:
        """All that `run` does, but for the waiting: yields how long it has nothing to do, and is sent what came."""
        try:
            self._transport.connect()
            self._watchdog.notify_ready()
            while not self._stopping.is_set():
                self._watchdog.notify_alive(self._clock.now_s())
                self._take((yield self._patience_s()))
                if self._task is not None:
                    yield from self._work(self._task)
                else:
                    self._uploader.step()
                    yield from self._update()
        finally:
            self._watchdog.notify_stopping()
            self._downloads.pause()
            self._sender.send_presence("off", self.state.birth)
            self._transport.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `run` soon; from any thread."""
        self._stopping.set()
        self._transport.wake()

    def _patience_s(self) -> float:
        if self._task is not None:
            return 0.0
        wait_s = self._uploader.wait_s()
        return MAX_IDLE_S if wait_s is None else min(MAX_IDLE_S, wait_s)

    def _take(self, event: Event | None) -> None:
        """Note what an event means."""
        if isinstance(event, Message):
            self._on_message(event)
        elif isinstance(event, Connected):
            self._transport.subscribe(*self._topics.device_filters(self.config.device_id))
            self._say_here()
            self._downloads.link_lost()
            self._uploader.link_up()
        elif isinstance(event, Disconnected):
            self._uploader.link_lost()

    # -- one task

    def _work(self, task: _PendingTask) -> ClientLoop:
        """From a task to its announced result, or to a `nack` that says why not."""
        try:
            outcome, seconds = yield from self._carry_out(task)
            self._keep(task, outcome, seconds)
        except _TaskDropped:
            log.info("dropped %s", task.key)
        except Exception as wrong:  # noqa: BLE001 - whatever goes wrong, the coordinator must not wait for us
            self._refuse(task, wrong)
        else:
            self._uploader.announce()
        finally:
            self._downloads.pause()
            if self._task is task:
                self._task = None

    def _carry_out(self, task: _PendingTask) -> Generator[float, Event | None, tuple[TaskResult, float]]:
        """Fetch in the order of trust: the signed program, what it vouches for, the vectors; then train."""
        run = task.key.run
        check_may_train(self.config)
        self._look_for_samples((run, task.key.round))
        manifest = Manifest.from_json(task.message["program"])
        needed = task_codec.container_functions(task.message)
        self._runner.check_signature(manifest)
        yield from self._fetch(task, [manifest])
        program = self._runner.program(manifest)
        for field, function in needed.items():
            self._runner.check_container(program, function, Manifest.from_json(task.message[field]))
        message = task_codec.without_unneeded_inits(
            task.message, lambda slot: self.state.own_model(run, slot, program.schema) is not None
        )
        vectors = task_codec.task_manifests(message)
        self._runner.check_signature(*vectors)  # a crafted model could make its update give away the samples
        yield from self._choose_engine(task, manifest, program, set(needed.values()))
        yield from self._fetch(task, vectors)
        began_s = self._clock.now_s()
        outcome = self._runner.run(
            message,
            own=lambda slot, schema: self.state.own_model(run, slot, schema),
            residual=lambda schema: self.state.residual(task.key, message.get("center"), schema),
            posterior=lambda: self.state.posterior(task.key),
            between=lambda: self._poll(task),
        )
        return outcome, self._clock.now_s() - began_s

    def _choose_engine(
        self, task: _PendingTask, manifest: Manifest, program: Program, functions: set[str]
    ) -> ClientLoop:
        """Fetch the containers of the first engine that passes the program's golden run; tell of those that fail."""
        before, refused, chosen = (self._runner.engine_name, self._refused), list[Refused](), None
        for name in self._runner.engines(program):
            files = self._runner.containers(program, name, functions, manifest.block)
            self._cache.pin({manifest.sha256, *(file.sha256 for file in files)})
            yield from self._fetch(task, files)
            try:
                failed = self._runner.use(program, name, manifest.sha256)
            except (RuntimeMissing, ProgramRefused) as wrong:
                if not refused:
                    raise
                log.warning("%s cannot take the place of %s: %s", name, refused[0].engine, wrong.message)
                continue
            if failed is None:
                chosen = name
                break
            refused.append(failed)
        self._refused = refused
        if (self._runner.engine_name, self._refused) != before:
            self._say_here()
            for each in refused:
                log.warning("%s; %s", each, "no other engine is left" if chosen is None else f"using {chosen}")
        if chosen is None:
            raise refused[0].error()

    def _look_for_samples(self, now: tuple[str, int]) -> None:
        """Between two rounds: within one, a probe's responsibilities belong to the samples that it saw."""
        if self._samples is None or now == self._round:
            return
        self._round, fresh = now, self._samples.reload_if_changed()
        if fresh is not None:
            self._local = self._runner.local = fresh
            log.info("%d samples to train on", len(fresh.train))
            self._say_here()

    def _fetch(self, task: _PendingTask, manifests: list[Manifest]) -> ClientLoop:
        """Take events until the blobs are here, the task is dropped, or its time is over."""
        self._downloads.start(manifests)
        while (wait_s := self._downloads.step(self._clock.now_s())) is not None:
            self._watchdog.notify_alive(self._clock.now_s())
            self._take((yield min(wait_s, max(0.0, task.until_s - self._clock.now_s()))))
            self._check_wanted(task)

    def _update(self) -> ClientLoop:
        """When there is nothing else to do: fetch a newer release and end, so that the launcher starts it."""
        if self._updates.overdue(self._clock.now_s()):
            self._fail("this release has not heard the coordinator in time", hint="the one of before is started again")
        offer = self._offer
        if offer is None or self._uploader.wait_s() is not None:
            return
        manifest, self._offer = Manifest.from_json(offer["file"]), None
        try:
            self._runner.check_signature(manifest)
            self._downloads.start([manifest])
            while (wait_s := self._downloads.step(self._clock.now_s())) is not None:
                self._watchdog.notify_alive(self._clock.now_s())
                self._take((yield wait_s))
                if self._task is not None or self._stopping.is_set():
                    self._offer = offer  # later; what has arrived stays
                    return
            self._updates.install(self._cache.read(manifest.sha256), offer["version"])
        except (Malformed, OSError) as wrong:
            log.warning("cannot take release %s: %s", offer["version"], wrong)
        else:
            log.warning("release %s is here; leaving so that it is started", offer["version"])
            self._stopping.set()
        finally:
            self._downloads.pause()

    def _poll(self, task: _PendingTask) -> None:
        """Between two training steps: take in at most one event, without waiting."""
        if self._stopping.is_set() or self._clock.now_s() >= self._glance_s:
            self._glance_s = self._clock.now_s() + POLL_S
            self._watchdog.notify_alive(self._clock.now_s())
            self._take(self._transport.receive(0.0))
            self._check_wanted(task)

    def _check_wanted(self, task: _PendingTask) -> None:
        """End a task that was replaced or stopped, or whose answer would come too late."""
        if self._task is not task or self._stopping.is_set():
            raise _TaskDropped
        if self._clock.now_s() >= task.until_s:
            raise Malformed("deadline", "the time was over before the task was done")

    def _keep(self, task: _PendingTask, outcome: TaskResult, seconds: float) -> None:
        """Durably, before anybody hears of it."""
        schema, rest = outcome.schema, outcome.residual
        result = StoredResult(
            key=task.key,
            n=outcome.n,
            what=outcome.what,
            update=manifest_of(outcome.data, outcome.what, block=self._block, inline=True),
            seconds=seconds,
            metrics=outcome.metrics,
            residual=None if rest is None else residual_name(task.key.run, task.message.get("center"), schema),
            residual_sha256=None if rest is None else self.state.keep_residual(rest, schema),
        )
        self.state.store_result(result, outcome.data, schema, own=outcome.own, posterior=outcome.posterior)

    def _refuse(self, task: _PendingTask, wrong: Exception) -> None:
        code, detail, retry_ms = nack_fields(wrong)
        log.warning("cannot do %s: %s: %s", task.key, code, detail, exc_info=wrong if code == "internal" else None)
        self._sender.send("nack", re=task.message["id"], **vars(task.key), code=code, detail=detail, retry_ms=retry_ms)

    # -- what the coordinator says

    def _on_message(self, event: Message) -> None:
        try:
            route = self._topics.parse(event.topic)
            if route.kind == "b" and route.label is not None and route.index is not None:
                self._downloads.on_block(route.label, route.index, event.payload)
                return
            if route.kind not in ("t", "coord") or not event.payload:
                return
            message = messages.read_message(event.payload, route.kind)
        except Malformed as wrong:
            self._on_unreadable(event, wrong)
            return
        if self.state.see_epoch(message["epoch"]):
            self._handlers.get(message["k"], _ignore)(message)
        elif route.kind == "t":
            detail = f"epoch {message['epoch']}; {self.state.epoch} was seen before"
            self._sender.send("nack", re=message["id"], code="old_epoch", detail=detail)

    def _on_unreadable(self, event: Message, wrong: Malformed) -> None:
        """A message that breaks a rule is answered if it can be named, so that nobody waits for its task."""
        log.warning("cannot read a message on %s: %s", event.topic, wrong.message)
        try:
            ident = messages.parse_json(event.payload)["id"]
            self._sender.send("nack", re=ident, code=wrong.code, detail=wrong.message[:MAX_DETAIL_CHARS])
        except (Malformed, KeyError, TypeError):
            return

    def _on_coord(self, message: Mapping[str, Any]) -> None:
        if messages.VERSION not in message["proto"]:
            self._fail(f"this coordinator speaks version {message['proto']} of the protocol, not {messages.VERSION}")
        self._block = min(DEFAULT_BLOCK_BYTES, message["block"])
        if self._boot not in (None, message["boot"]):
            self._uploader.coordinator_restarted(message["spread_ms"] / 1000)
        self._boot = message["boot"]
        if message["online"] and self._failure is None:
            self._updates.confirm()
        offer = message.get("release")
        self._offer = offer if offer is not None and self._updates.wanted(offer["version"]) else None

    def _on_task(self, message: Mapping[str, Any]) -> None:
        """Begin a new task; one that is done is announced again, one that is running or older is not begun again."""
        key, done = TaskKey.of(message), self.state.result
        if done is not None and done.key == key:
            self._uploader.announce()
        elif done is not None and done.key.run == key.run and key < done.key:
            log.info("ignored %s, which came after %s", key, done.key)
        elif self._task is not None and self._task.key == key:
            self._task.message = message  # the same task under another id
        else:
            self._task = _PendingTask(key, message, self._clock.now_s() + message["left_ms"] / 1000)
            self._uploader.cancel()  # whatever came before is late now

    def _on_stop(self, message: Mapping[str, Any]) -> None:
        key, result = TaskKey.of(message), self.state.result
        if self._task is not None and self._task.key == key:
            self._task = None
            self._downloads.pause()
            self._cache.drop_partials()
        if result is not None and result.key == key:
            self._uploader.cancel()
            self.state.commit_acknowledgement("late")

    def _on_rebirth(self, _message: Mapping[str, Any]) -> None:
        """It does not know us, so it dropped what we asked."""
        self._say_here()
        self._downloads.link_lost()

    def _on_error(self, message: Mapping[str, Any]) -> None:
        log.warning("the coordinator answers %s %s", message["code"], message.get("detail", ""))
        if message["code"] == "not_member":
            self._fail("this device is not enrolled here", hint="ask for a new join file")
        elif message["code"] == "bad_version":
            self._fail(f"the coordinator speaks another version of the protocol: {message.get('detail', '')}")
        wait_s = message.get("retry_ms", RETRY_S * 1000) / 1000
        self._downloads.on_error(message.get("re"), message["code"], self._clock.now_s() + wait_s)
        self._uploader.on_error(message)

    def _fail(self, why: str, *, hint: str = UPDATE) -> None:
        """End `run` with this: nothing gets better by itself."""
        self._failure = ProtocolError(why, hint=hint)
        self._stopping.set()

    # -- what we say about ourselves

    def _say_here(self) -> None:
        caps = {
            "engine": self._runner.engine_name,
            "n": len(self._local.train),
            "codecs": list(CODECS),
            "window": MAX_WINDOW,
            "disk": shutil.disk_usage(self.config.state).free,
        }
        runtime = version_of(self._runner.engine_name)
        caps |= {"runtime": runtime} if runtime else {}
        caps |= {"refused": [each.to_json() for each in self._refused]} if self._refused else {}
        self._sender.send_presence("on", self.state.birth, sw=SOFTWARE, caps=caps)

    def _will(self) -> Will:
        """For the transport, maybe in its thread: each connection is a birth, and its will carries the same number."""
        birth = self.state.next_birth()
        payload = presence_message("lost", birth, ident=f"lost-{birth}", t_ms=self._clock.unix_ms())
        return Will(self._topics.state(self.config.device_id), payload)


def nack_fields(wrong: Exception) -> tuple[str, str, int | None]:
    """-> (code, detail, retry_ms) of the `nack` that tells of an error."""
    if isinstance(wrong, DeviceRefused):
        return "unavailable", wrong.reason[:MAX_DETAIL_CHARS], int(wrong.retry_s * 1000)
    if isinstance(wrong, Malformed):
        code = wrong.code if wrong.code in NACK_CODES else "internal"
        return code, wrong.message.removeprefix(f"{wrong.code}: ")[:MAX_DETAIL_CHARS], None
    if isinstance(wrong, RuntimeMissing):
        return "no_engine", wrong.message[:MAX_DETAIL_CHARS], None
    if isinstance(wrong, ProgramRefused):
        return "bad_program", wrong.message[:MAX_DETAIL_CHARS], None
    if isinstance(wrong, MemoryError | OSError):
        return "no_space", str(wrong)[:MAX_DETAIL_CHARS], None
    return "internal", "see this device's own log", None


def _ignore(message: Mapping[str, Any]) -> None:
    log.info("nothing to do for %s", message["k"])


def _resume(life: ClientLoop, event: Event | None) -> float | None:
    """The next wait of a life, None at its end."""
    try:
        return life.send(event)
    except StopIteration:
        return None
