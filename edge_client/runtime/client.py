"""A device's main loop: announce, fetch, check, train, store and upload, until it is told to stop.

One thread and one loop: `loop` waits for events, handlers record what they mean, then the next piece of work is done.
It is a generator, so that `run` drives it in a thread of its own and an emulator drives many of them in one.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import Any

import numpy as np

from edge_client import __version__
from edge_client.config import ClientConfig
from edge_client.data.dataset import DataFolder, DeviceData
from edge_client.engines.base import open_engine
from edge_client.engines.golden_run import run_golden
from edge_client.engines.runtime_versions import runtime_version
from edge_client.errors import Malformed
from edge_client.protocol import messages, signing
from edge_client.protocol.blocks import DEFAULT_BLOCK_BYTES, Manifest
from edge_client.protocol.message_schemas import CODECS
from edge_client.protocol.transfer import MAX_WINDOW
from edge_client.runtime.active_task import ActiveTask, TaskDropped, may_announce
from edge_client.runtime.golden_results import FILE, Check, GoldenResults
from edge_client.runtime.progress import Tell
from edge_client.runtime.session import ClientLoop, Session
from edge_client.runtime.state import StoredResult, TaskKey
from edge_client.runtime.systemd_watchdog import Watchdog
from edge_client.runtime.task_runner import OpenEngine, TaskRunner
from edge_client.runtime.train_conditions import check_may_train
from edge_client.runtime.uploader import Uploader
from edge_client.transport.base import Connected, Dial, Disconnected, Event
from edge_client.transport.clock import Clock
from edge_client.update.self_update import SelfUpdater

log = logging.getLogger(__name__)

MAX_IDLE_S = 60.0  # the longest wait; any event ends it
RETRY_S = 60.0
WAIT_S = 2.0  # the first task of a run follows the record that announces it, and so does the count with this device
SOFTWARE = f"fedcenters-edge {__version__}"
UPDATE_HINT = "install the version of fedcenters that the coordinator runs"


class Client:
    """One device. `rng` draws message ids and jitter; nothing that is learned depends on it.

    `tell` is called with every event of progress.py, in the thread of `run`.
    """

    def __init__(  # noqa: PLR0913 - the parts of a device
        self,
        config: ClientConfig,
        dial: Dial,
        *,
        local: DeviceData,
        clock: Clock,
        rng: np.random.Generator,
        open_engine: OpenEngine = open_engine,
        check: Check | None = None,
        watchdog: Watchdog | None = None,
        samples: DataFolder | None = None,
        updates: SelfUpdater | None = None,
        tell: Tell = lambda _: None,
    ) -> None:
        self.config, self._local, self._clock, self._rng = config, local, clock, rng
        self._watchdog, self._samples = watchdog or Watchdog({}), samples
        self._round: tuple[str, int] | None = None  # run and round of the last task
        self._updates = updates or SelfUpdater(None)
        self._release: Mapping[str, Any] | None = None  # a release to install
        handlers = {"coord": self._on_coord, "task": self._on_task, "stop": self._on_stop, "err": self._on_error}
        self._session = session = Session(
            config, dial, handlers=handlers, presence=self._presence, clock=clock, rng=rng, retry_s=RETRY_S
        )
        self.state = session.state
        if self.state.result is not None and not may_announce(self.state.result, config.secure):
            log.warning("dropped the result of %s: it tells more than `secure` allows now", self.state.result.key)
            self.state.forget_result()
        self._uploader = Uploader(self.state, session.sender, session.transport, clock=clock, rng=rng)
        handlers |= {"go": self._uploader.on_go, "ack": self._on_ack}
        golden = GoldenResults(config.state / FILE, check or partial(run_golden, between=self._alive))
        self._runner = TaskRunner(config, session.cache, local, open_engine, golden)
        self._task: ActiveTask | None = None
        self._boot: str | None = None  # of the coordinator's process
        self._link: tuple[str, int] | None = None  # its process and connection that this device is known to
        self._announce_at_s = inf  # when to announce this device again
        self._online = True  # whether the coordinator is
        self._federation: Mapping[str, Any] = {}  # what the federation does, as the coordinator said last
        self._tell_at_s: float | None = None  # when to tell that it trains without this device; None: nothing to tell
        self._tell = tell
        self._block = DEFAULT_BLOCK_BYTES

    def run(self) -> None:
        """Live until `stop`. Raises NetworkError when the broker cannot be reached, ProtocolError when turned away."""
        with contextlib.closing(self.loop()) as loop, contextlib.suppress(StopIteration):
            wait_s = next(loop)
            while True:
                wait_s = loop.send(self._session.transport.receive(wait_s))

    def loop(self) -> ClientLoop:
        """All that `run` does except the waiting: yields the seconds to wait, and is sent the event that came."""
        try:
            self._session.transport.connect()
            self._watchdog.notify_ready()
            while not self._session.stopping.is_set():
                self._alive()
                self._take((yield self._wait_s()))
                if self._task is not None:
                    yield from self._work(self._task)
                else:
                    self._tell_at_last()
                    self._uploader.step()
                    yield from self._update()
        finally:
            self._watchdog.notify_stopping()
            self._session.close()
        self._session.raise_failure()

    def stop(self) -> None:
        """End `run` soon; from any thread."""
        self._tell({"event": "stopping"})
        self._session.stop()

    def _alive(self) -> None:
        self._watchdog.notify_alive(self._clock.now_s())

    def _wait_s(self) -> float:
        if self._task is not None:
            return 0.0
        until_s = min(self._announce_at_s, inf if self._tell_at_s is None else self._tell_at_s)
        wait_s = self._uploader.wait_s()
        return min(MAX_IDLE_S, max(0.0, until_s - self._clock.now_s()), inf if wait_s is None else wait_s)

    def _take(self, event: Event | None) -> None:
        self._alive()
        if isinstance(event, Connected):  # told before the presence message, which may bring a stop
            self._tell({"event": "connected", "broker": self.config.broker})
        self._session.handle(event)
        if isinstance(event, Connected):
            self._uploader.link_up()
        elif isinstance(event, Disconnected):
            self._tell({"event": "lost", "reason": event.reason})
            self._uploader.link_lost()
        if self._clock.now_s() >= self._announce_at_s:
            self._announce_at_s = inf
            self._session.announce()

    def _work(self, task: ActiveTask) -> ClientLoop:
        """From a task to its announced result, or to a `nack` that says why there is none."""
        try:
            check_may_train(self.config)
            self._reload_samples((task.key.run, task.key.round))
            yield from self._deliver_last(task)
            result, seconds = yield from task.execute()
            task.store(result, seconds, block=self._block)
        except TaskDropped:
            self._tell({"event": "dropped", **self._place(task.key)})
        except Exception as wrong:  # noqa: BLE001 - the coordinator waits for an answer, whatever went wrong
            code, detail = task.refuse(wrong)
            if code == "no_data" and self.state.posterior(task.key) is None:
                self._round = None  # the round may be repeated, with samples that were corrected
            self._tell({"event": "refused", **self._place(task.key), "code": code, "detail": detail})
        else:
            sent = {"what": result.what, "bytes": len(result.data), "seconds": round(seconds, 3)}
            told = {"job": task.message["job"], "loss": result.metrics.get("loss"), **sent}
            self._tell({"event": "result", **self._place(task.key), **told})
            self._uploader.announce()
        finally:
            self._session.downloads.pause()
            self._session.cache.pinned.clear()
            if self._task is task:
                self._task = None

    def _deliver_last(self, task: ActiveTask) -> ClientLoop:
        """Learn first whether the last update was taken: it decides which residual the next one adds."""
        if self.state.owes_answer:
            self._uploader.announce()
        while self.state.owes_answer:
            self._uploader.step()
            self._take((yield min(MAX_IDLE_S, self._uploader.wait_s() or 0.0, task.left_s())))
            task.check_wanted()

    def _reload_samples(self, now: tuple[str, int]) -> None:
        """Look for new samples before a round, and after a refusal for want of samples.

        Within a round nothing else changes them: a probe's responsibilities belong to the samples of its round.
        """
        if self._samples is None or now == self._round:
            return
        self._round, fresh = now, self._samples.reload_if_changed()
        if fresh is not None:
            self._local = self._runner.local = fresh
            log.info("%d samples to train on", len(fresh.train))
            self._session.announce()

    def _update(self) -> ClientLoop:
        """When there is nothing else to do: fetch a newer release and end, so that the launcher starts it."""
        session = self._session
        if self._updates.overdue(self._clock.now_s()):
            hint = "the one of before is started again"
            session.fail("this release has not heard the coordinator in time", hint=hint)
        release = self._release
        if release is None or self._uploader.wait_s() is not None:
            return
        manifest, self._release = Manifest.from_json(release["file"]), None
        try:
            if self._session.config.release_keys:
                signing.verify_release(release, self._session.config.release_keys, self._session.config.federation)
            else:  # a join file of before such keys
                self._runner.check_signature(manifest)
            for wait_s in session.fetch([manifest]):
                self._take((yield wait_s))
                if self._task is not None or session.stopping.is_set():
                    self._release = release  # later; what has arrived stays
                    return
            self._updates.install(session.cache.read(manifest.sha256), release["version"])
        except (Malformed, OSError) as wrong:
            session.note("cannot take release %s: %s", release["version"], wrong)
        else:
            log.warning("release %s is here; leaving so that it is started", release["version"])
            session.stopping.set()
        finally:
            session.downloads.pause()

    # -- what the coordinator sends

    def _on_coord(self, message: Mapping[str, Any]) -> None:
        if messages.VERSION not in message["proto"]:
            why = f"this coordinator speaks version {message['proto']} of the protocol, not {messages.VERSION}"
            self._session.fail(why, hint=UPDATE_HINT)
        self._block = min(DEFAULT_BLOCK_BYTES, message["block"])
        if self._boot not in (None, message["boot"]):
            self._uploader.coordinator_restarted(message["spread_ms"] / 1000)
            self._session.downloads.link_lost()
        self._boot = message["boot"]
        self._note_link(message)
        self._tell_of_federation(message)
        if message["online"] and self._session.failure is None:
            self._updates.confirm()
        release = message.get("release")
        self._release = release if release is not None and self._updates.wanted(release["version"]) else None

    def _note_link(self, message: Mapping[str, Any]) -> None:
        """Announce this device to a connection of the coordinator that is newer than the device's own.

        A broker may not bring it the presence that it retains: some do so for names only, and by node of a cluster.
        """
        link = (message["boot"], message.get("link", 0))
        if self._session.is_live and message["online"] and link != self._link:
            self._announce_at_s = self._clock.now_s() + self._rng.uniform(0.0, message["spread_ms"] / 1000)
        self._link = link

    def _on_task(self, message: Mapping[str, Any]) -> None:
        """Begin a new task; one that is done is announced again, one that is running or older is not begun again."""
        key, done, active = TaskKey.of(message), self.state.result, self._task
        until_s = self._clock.now_s() + message["left_ms"] / 1000
        if done is not None and done.key == key:
            self._uploader.announce()
        elif self.state.is_over(key, message["epoch"]):
            log.info("ignored %s, which came after %s", key, None if done is None else done.key)
        elif active is not None and active.key == key:
            active.ask_again(message, until_s)
            if self.state.owes_answer:  # the coordinator's connection is new; it may have missed the announcement
                self._uploader.announce()
        else:
            if active is not None:
                active.dropped = True
            n = len(self._local.train)
            self._tell({"event": "task", "run": key.run, **self._place(key), "job": message["job"], "n": n})
            self._task = ActiveTask(key, message, until_s, self._session, self._runner, self._take)
            if not self.state.owes_answer:
                self._uploader.cancel()  # an earlier result is late now

    def _on_ack(self, message: Mapping[str, Any]) -> None:
        result = self.state.result
        self._uploader.on_ack(message)
        if result is not None and (result.key, result.update.sha256) == (TaskKey.of(message), message["sha256"]):
            self._tell_answer(result, message["status"], message.get("detail", ""))

    def _tell_answer(self, result: StoredResult, status: str, detail: str) -> None:
        job = "fit" if "loss" in result.metrics else "probe"
        place = self._place(result.key)
        self._tell({"event": "answered", **place, "job": job, "status": status, "detail": detail})

    def _place(self, key: TaskKey) -> dict[str, Any]:
        """The round of a task, and how many the run has, where the coordinator said so."""
        of = self._federation.get("of") if self._federation.get("run") == key.run else None
        return {"round": key.round} if of is None else {"round": key.round, "of": of}

    def _tell_of_federation(self, message: Mapping[str, Any]) -> None:
        """Tell what this device waits for; of a training that it takes part in, its tasks tell."""
        if message["online"] != self._online:
            self._online = message["online"]
            self._tell({"event": "coordinator", "online": self._online})
        before, now = self._federation, message.get("state") or {}
        self._federation = now or before
        if all(now.get(key) == before.get(key) for key in ("doing", "newcomers", "here", "needed", "run")) or not now:
            return
        outdated = now["doing"] == "gather" and not self._session.is_live  # a count without this device: another comes
        waits = outdated or now["doing"] == "train"
        self._tell_at_s = self._clock.now_s() + WAIT_S if waits else None
        if not waits:
            self._tell({"event": "waiting", **now})

    def _tell_at_last(self) -> None:
        """Tell of a training that goes on without this device, and of a count of devices that did not change."""
        if self._tell_at_s is not None and self._clock.now_s() >= self._tell_at_s:
            self._tell_at_s, done = None, self.state.result
            if done is None or done.key.run != self._federation.get("run"):
                self._tell({"event": "waiting", **self._federation})

    def _on_stop(self, message: Mapping[str, Any]) -> None:
        key, result = TaskKey.of(message), self.state.result
        if self._task is not None and self._task.key == key:
            self._task.dropped, self._task = True, None
            self._session.downloads.pause()
            release = self._release
            self._session.cache.drop_partials(but=[Manifest.from_json(release["file"])] if release else [])
        if result is not None and result.key == key:
            self._uploader.cancel()
            self.state.commit_acknowledgement("late")
            if result.status is None:
                self._tell_answer(result, "late", "")

    def _on_error(self, message: Mapping[str, Any]) -> None:
        if message["code"] == "bad_version":
            why = f"the coordinator speaks another version of the protocol: {message.get('detail', '')}"
            self._session.fail(why, hint=UPDATE_HINT)
        before = self.state.result
        self._uploader.on_error(message)
        if before is not None and before is not self.state.result:  # the error is the answer
            self._tell_answer(before, message["code"], message.get("detail", ""))

    def _presence(self) -> dict[str, Any]:
        engine, refused = self._runner.engine_name, self._runner.refused
        caps = {
            "engine": engine,
            "n": len(self._local.train),
            "codecs": list(CODECS),
            "window": MAX_WINDOW,
            "disk": shutil.disk_usage(self.config.state).free,
        }
        runtime = runtime_version(engine)
        caps |= {"runtime": runtime} if runtime else {}
        caps |= {"refused": [each.to_json() for each in refused]} if refused else {}
        return {"sw": SOFTWARE, "caps": caps}
