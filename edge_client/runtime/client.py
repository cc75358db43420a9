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
from edge_client.data.dataset import Local, Samples
from edge_client.engines.base import open_engine
from edge_client.engines.golden_run import run_golden
from edge_client.engines.installed import version_of
from edge_client.errors import DeviceRefused, Malformed, ProgramRefused, ProtocolError, RuntimeMissing
from edge_client.protocol import messages, task_codec
from edge_client.protocol.blocks import BLOCK_DEFAULT, Manifest, manifest_of
from edge_client.protocol.message_schemas import CODECS, DETAIL_MAX, NACK_CODES
from edge_client.protocol.program import Program
from edge_client.protocol.topics import Topics
from edge_client.protocol.transfer import WINDOW_MAX
from edge_client.runtime.downloader import Downloads, open_cache
from edge_client.runtime.engine_selection import FILE, Check, Refused, Vetting
from edge_client.runtime.sender import Voice, presence
from edge_client.runtime.state import Key, Result, State, residual_name
from edge_client.runtime.systemd_watchdog import Watchdog
from edge_client.runtime.task_runner import OpenEngine, Outcome, Workshop
from edge_client.runtime.train_conditions import may_train
from edge_client.runtime.uploader import Delivery
from edge_client.transport.base import Connected, Dial, Event, Lost, Message, Will
from edge_client.transport.clock import Clock
from edge_client.update.self_update import Updates

log = logging.getLogger(__name__)

IDLE_S = 60.0  # the longest nap; any event ends it
RETRY_S = 60.0
GLANCE_S = 0.2  # how often a training device looks whether somebody wants it to stop
SOFTWARE = "fedcenters-edge"
UPDATE = "install the version of fedcenters that the coordinator runs"

Life = Generator[float, Event | None, None]  # yields seconds; is sent what came within them, or None


class _Dropped(Exception):
    """The task under way is not wanted any more."""


@dataclass
class _Task:
    """A task that was asked for: its valid message, and when its answer becomes useless."""

    key: Key
    message: Mapping[str, Any]
    until_s: float


class Client:
    """One device. `rng` makes ids and jitter, nothing that is learned depends on it."""

    def __init__(  # noqa: PLR0913 - the parts of a device
        self,
        config: ClientConfig,
        dial: Dial,
        *,
        local: Local,
        clock: Clock,
        rng: np.random.Generator,
        open_engine: OpenEngine = open_engine,
        check: Check = run_golden,
        watchdog: Watchdog | None = None,
        samples: Samples | None = None,
        updates: Updates | None = None,
    ) -> None:
        self.config, self._local, self._clock = config, local, clock
        self._watchdog, self._samples = watchdog or Watchdog({}), samples
        self._round: tuple[str, int] | None = None  # run and round of the last task
        self._updates = updates or Updates(None)
        self._offer: Mapping[str, Any] | None = None  # a release that is wanted
        self.state = State(config.state, federation=config.federation, device_id=config.device_id)
        self._topics = Topics(config.federation)
        self._transport = dial(self._will)
        self._voice = Voice(self._topics, config.device_id, self._transport, clock=clock, rng=rng)
        self._cache = open_cache(config)
        self._downloads = Downloads(self._cache, self._voice.get)
        self._delivery = Delivery(self.state, self._voice, self._transport, clock=clock, rng=rng)
        self._workshop = Workshop(config, self._cache, local, open_engine, Vetting(config.state / FILE, check))
        self._refused: list[Refused] = []  # engines that fail the golden run of the program at hand
        self._task: _Task | None = None
        self._glance_s = 0.0  # when to look next, while training
        self._boot: str | None = None  # of the coordinator's process
        self._block = BLOCK_DEFAULT
        self._failure: ProtocolError | None = None
        self._stopping = threading.Event()
        self._handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "coord": self._on_coord,
            "task": self._on_task,
            "go": self._delivery.on_go,
            "ack": self._delivery.on_ack,
            "stop": self._on_stop,
            "rebirth": self._on_rebirth,
            "err": self._on_error,
        }

    def run(self) -> None:
        """Live until `stop`. Raises NetworkError when the broker cannot be reached, ProtocolError when turned away."""
        with contextlib.closing(self.life()) as life:
            event: Event | None = None
            while (wait_s := _resumed(life, event)) is not None:
                event = self._transport.receive(wait_s)

    def life(self) -> Life:
        """All that `run` does, but for the waiting: yields how long it has nothing to do, and is sent what came."""
        try:
            self._transport.connect()
            self._watchdog.ready()
            while not self._stopping.is_set():
                self._watchdog.alive(self._clock.now_s())
                self._take((yield self._patience_s()))
                if self._task is not None:
                    yield from self._work(self._task)
                else:
                    self._delivery.step()
                    yield from self._update()
        finally:
            self._watchdog.stopping()
            self._downloads.pause()
            self._voice.presence("off", self.state.birth)
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
        wait_s = self._delivery.wait_s()
        return IDLE_S if wait_s is None else min(IDLE_S, wait_s)

    def _take(self, event: Event | None) -> None:
        """Note what an event means."""
        if isinstance(event, Message):
            self._on_message(event)
        elif isinstance(event, Connected):
            self._transport.subscribe(*self._topics.device_filters(self.config.device_id))
            self._say_here()
            self._downloads.link_lost()
            self._delivery.link_up()
        elif isinstance(event, Lost):
            self._delivery.link_lost()

    # -- one task

    def _work(self, task: _Task) -> Life:
        """From a task to its announced result, or to a `nack` that says why not."""
        try:
            outcome, seconds = yield from self._carry_out(task)
            self._keep(task, outcome, seconds)
        except _Dropped:
            log.info("dropped %s", task.key)
        except Exception as wrong:  # noqa: BLE001 - whatever goes wrong, the coordinator must not wait for us
            self._refuse(task, wrong)
        else:
            self._delivery.announce()
        finally:
            self._downloads.pause()
            if self._task is task:
                self._task = None

    def _carry_out(self, task: _Task) -> Generator[float, Event | None, tuple[Outcome, float]]:
        """Fetch in the order of trust: the signed program, what it vouches for, the vectors; then train."""
        run = task.key.run
        may_train(self.config)
        self._look_for_samples((run, task.key.round))
        manifest = Manifest.from_json(task.message["program"])
        needed = task_codec.functions_of(task.message)
        self._workshop.check_signature(manifest)
        yield from self._fetch(task, [manifest])
        program = self._workshop.program(manifest)
        for field, function in needed.items():
            self._workshop.check_container(program, function, Manifest.from_json(task.message[field]))
        message = task_codec.without_spares(
            task.message, lambda slot: self.state.own(run, slot, program.schema) is not None
        )
        vectors = task_codec.task_manifests(message)
        self._workshop.check_signature(*vectors)  # a crafted model could make its update give away the samples
        yield from self._choose_engine(task, manifest, program, set(needed.values()))
        yield from self._fetch(task, vectors)
        began_s = self._clock.now_s()
        outcome = self._workshop.run(
            message,
            own=lambda slot, schema: self.state.own(run, slot, schema),
            residual=lambda schema: self.state.residual(task.key, message.get("center"), schema),
            posterior=lambda: self.state.posterior(task.key),
            between=lambda: self._glance(task),
        )
        return outcome, self._clock.now_s() - began_s

    def _choose_engine(self, task: _Task, manifest: Manifest, program: Program, functions: set[str]) -> Life:
        """Fetch the containers of the first engine that passes the program's golden run; tell of those that fail."""
        before, refused, chosen = (self._workshop.engine_name, self._refused), list[Refused](), None
        for name in self._workshop.engines(program):
            files = self._workshop.containers(program, name, functions, manifest.block)
            self._cache.pin({manifest.sha256, *(file.sha256 for file in files)})
            yield from self._fetch(task, files)
            try:
                failed = self._workshop.use(program, name, manifest.sha256)
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
        if (self._workshop.engine_name, self._refused) != before:
            self._say_here()
            for each in refused:
                log.warning("%s; %s", each, "no other engine is left" if chosen is None else f"using {chosen}")
        if chosen is None:
            raise refused[0].error()

    def _look_for_samples(self, now: tuple[str, int]) -> None:
        """Between two rounds: within one, a probe's responsibilities belong to the samples that it saw."""
        if self._samples is None or now == self._round:
            return
        self._round, fresh = now, self._samples.fresh()
        if fresh is not None:
            self._local = self._workshop.local = fresh
            log.info("%d samples to train on", len(fresh.train))
            self._say_here()

    def _fetch(self, task: _Task, manifests: list[Manifest]) -> Life:
        """Take events until the blobs are here, the task is dropped, or its time is over."""
        self._downloads.start(manifests)
        while (wait_s := self._downloads.step(self._clock.now_s())) is not None:
            self._watchdog.alive(self._clock.now_s())
            self._take((yield min(wait_s, max(0.0, task.until_s - self._clock.now_s()))))
            self._check_wanted(task)

    def _update(self) -> Life:
        """When there is nothing else to do: fetch a newer release and end, so that the launcher starts it."""
        if self._updates.overdue(self._clock.now_s()):
            self._fail("this release has not heard the coordinator in time", hint="the one of before is started again")
        offer = self._offer
        if offer is None or self._delivery.wait_s() is not None:
            return
        manifest, self._offer = Manifest.from_json(offer["file"]), None
        try:
            self._workshop.check_signature(manifest)
            self._downloads.start([manifest])
            while (wait_s := self._downloads.step(self._clock.now_s())) is not None:
                self._watchdog.alive(self._clock.now_s())
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

    def _glance(self, task: _Task) -> None:
        """Between two training steps: take in at most one event, without waiting."""
        if self._stopping.is_set() or self._clock.now_s() >= self._glance_s:
            self._glance_s = self._clock.now_s() + GLANCE_S
            self._watchdog.alive(self._clock.now_s())
            self._take(self._transport.receive(0.0))
            self._check_wanted(task)

    def _check_wanted(self, task: _Task) -> None:
        """End a task that was replaced or stopped, or whose answer would come too late."""
        if self._task is not task or self._stopping.is_set():
            raise _Dropped
        if self._clock.now_s() >= task.until_s:
            raise Malformed("deadline", "the time was over before the task was done")

    def _keep(self, task: _Task, outcome: Outcome, seconds: float) -> None:
        """Durably, before anybody hears of it."""
        schema, rest = outcome.schema, outcome.residual
        result = Result(
            key=task.key,
            n=outcome.n,
            what=outcome.what,
            update=manifest_of(outcome.data, outcome.what, block=self._block, inline=True),
            seconds=seconds,
            metrics=outcome.metrics,
            residual=None if rest is None else residual_name(task.key.run, task.message.get("center"), schema),
            residual_sha256=None if rest is None else self.state.keep_residual(rest, schema),
        )
        self.state.finish(result, outcome.data, schema, own=outcome.own, posterior=outcome.posterior)

    def _refuse(self, task: _Task, wrong: Exception) -> None:
        code, detail, retry_ms = nack_of(wrong)
        log.warning("cannot do %s: %s: %s", task.key, code, detail, exc_info=wrong if code == "internal" else None)
        self._voice.say("nack", re=task.message["id"], **vars(task.key), code=code, detail=detail, retry_ms=retry_ms)

    # -- what the coordinator says

    def _on_message(self, event: Message) -> None:
        try:
            route = self._topics.parse(event.topic)
            if route.kind == "b" and route.label is not None and route.index is not None:
                self._downloads.on_block(route.label, route.index, event.payload)
                return
            if route.kind not in ("t", "coord") or not event.payload:
                return
            message = messages.read(event.payload, route.kind)
        except Malformed as wrong:
            self._on_unreadable(event, wrong)
            return
        if self.state.see_epoch(message["epoch"]):
            self._handlers.get(message["k"], _ignore)(message)
        elif route.kind == "t":
            detail = f"epoch {message['epoch']}; {self.state.epoch} was seen before"
            self._voice.say("nack", re=message["id"], code="old_epoch", detail=detail)

    def _on_unreadable(self, event: Message, wrong: Malformed) -> None:
        """A message that breaks a rule is answered if it can be named, so that nobody waits for its task."""
        log.warning("cannot read a message on %s: %s", event.topic, wrong.message)
        try:
            ident = messages.parse_json(event.payload)["id"]
            self._voice.say("nack", re=ident, code=wrong.code, detail=wrong.message[:DETAIL_MAX])
        except (Malformed, KeyError, TypeError):
            return

    def _on_coord(self, message: Mapping[str, Any]) -> None:
        if messages.VERSION not in message["proto"]:
            self._fail(f"this coordinator speaks version {message['proto']} of the protocol, not {messages.VERSION}")
        self._block = min(BLOCK_DEFAULT, message["block"])
        if self._boot not in (None, message["boot"]):
            self._delivery.coordinator_restarted(message["spread_ms"] / 1000)
        self._boot = message["boot"]
        if message["online"] and self._failure is None:
            self._updates.reported()
        offer = message.get("release")
        self._offer = offer if offer is not None and self._updates.wanted(offer["version"]) else None

    def _on_task(self, message: Mapping[str, Any]) -> None:
        """Begin a new task; one that is done is announced again, one that is running or older is not begun again."""
        key, done = Key.of(message), self.state.result
        if done is not None and done.key == key:
            self._delivery.announce()
        elif done is not None and done.key.run == key.run and key < done.key:
            log.info("ignored %s, which came after %s", key, done.key)
        elif self._task is not None and self._task.key == key:
            self._task.message = message  # the same task under another id
        else:
            self._task = _Task(key, message, self._clock.now_s() + message["left_ms"] / 1000)
            self._delivery.cease()  # whatever came before is late now

    def _on_stop(self, message: Mapping[str, Any]) -> None:
        key, result = Key.of(message), self.state.result
        if self._task is not None and self._task.key == key:
            self._task = None
            self._downloads.pause()
            self._cache.drop_partials()
        if result is not None and result.key == key:
            self._delivery.cease()
            self.state.acknowledged("late")

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
        self._delivery.on_error(message)

    def _fail(self, why: str, *, hint: str = UPDATE) -> None:
        """End `run` with this: nothing gets better by itself."""
        self._failure = ProtocolError(why, hint=hint)
        self._stopping.set()

    # -- what we say about ourselves

    def _say_here(self) -> None:
        caps = {
            "engine": self._workshop.engine_name,
            "n": len(self._local.train),
            "codecs": list(CODECS),
            "window": WINDOW_MAX,
            "disk": shutil.disk_usage(self.config.state).free,
        }
        runtime = version_of(self._workshop.engine_name)
        caps |= {"runtime": runtime} if runtime else {}
        caps |= {"refused": [each.to_json() for each in self._refused]} if self._refused else {}
        self._voice.presence("on", self.state.birth, sw=SOFTWARE, caps=caps)

    def _will(self) -> Will:
        """For the transport, maybe in its thread: each connection is a birth, and its will carries the same number."""
        birth = self.state.next_birth()
        payload = presence("lost", birth, ident=f"lost-{birth}", t_ms=self._clock.unix_ms())
        return Will(self._topics.state(self.config.device_id), payload)


def nack_of(wrong: Exception) -> tuple[str, str, int | None]:
    """-> (code, detail, retry_ms) of the `nack` that tells of an error."""
    if isinstance(wrong, DeviceRefused):
        return "unavailable", wrong.reason[:DETAIL_MAX], int(wrong.retry_s * 1000)
    if isinstance(wrong, Malformed):
        code = wrong.code if wrong.code in NACK_CODES else "internal"
        return code, wrong.message.removeprefix(f"{wrong.code}: ")[:DETAIL_MAX], None
    if isinstance(wrong, RuntimeMissing):
        return "no_engine", wrong.message[:DETAIL_MAX], None
    if isinstance(wrong, ProgramRefused):
        return "bad_program", wrong.message[:DETAIL_MAX], None
    if isinstance(wrong, MemoryError | OSError):
        return "no_space", str(wrong)[:DETAIL_MAX], None
    return "internal", "see this device's own log", None


def _ignore(message: Mapping[str, Any]) -> None:
    log.info("nothing to do for %s", message["k"])


def _resumed(life: Life, event: Event | None) -> float | None:
    """The next wait of a life, None at its end."""
    try:
        return life.send(event)
    except StopIteration:
        return None
