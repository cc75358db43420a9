"""Several federations in one process: a thread each, a broker where the configuration wants one, and signals.

SIGTERM and SIGINT ask every coordinator to stop where nothing is half done. A second signal ends the process at once.
So does the first one after two seconds, if a coordinator is still busy; accepted replies are on disk. The federations
share only the process: the failure of one is reported, and the others go on.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from coordinator import local_broker as brokers
from coordinator.artifacts.finished_run import make_strategy
from coordinator.artifacts.signed_program import PROGRAM_FACT
from coordinator.artifacts.stored_settings import accept_settings
from coordinator.config import CoordinatorConfig, read_config
from coordinator.config_sections import RunConfig
from coordinator.dashboard.endpoint import Endpoint, dashboard_endpoint
from coordinator.identity.signing_key import coordinator_credentials
from coordinator.models.members import check_model_name
from coordinator.runtime.server import Server
from coordinator.storage.experiment_trackers import open_trackers
from coordinator.storage.status import newest_rounds
from coordinator.storage.store import Store
from coordinator.strategies.common.representation import annotate_representations
from coordinator.strategies.registry import kept_settings
from edge_client.errors import EXIT_OK, ConfigError, FedcentersError
from edge_client.malloc import give_back_large_blocks
from edge_client.transport.base import Transport, Will
from edge_client.transport.blobs import write_atomically
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport
from export.bundle.bundle_contents import LabelledSamples
from export.containers.installed_packages import check_installed
from export.silence import name_threads, show_progress, write_stderr

if TYPE_CHECKING:
    from coordinator.dashboard.event_hub import Hub
    from coordinator.dashboard.server import DashboardServer

STOP_TIMEOUT_S = 2.0  # after a signal; what takes longer is abandoned, and a restart continues
POLL_S = 0.5  # a signal whose handler another thread took does not wake the main thread
_DISK_REMEDIES = {  # of errors that pass without a change of the configuration, by errno
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space"),
    errno.EIO: "free disk space, look at dmesg whether the disk fails",
    errno.EROFS: "look at dmesg why the disk is read-only, and mount it writable again",
}
EventReporter = Callable[[Mapping[str, Any]], None]  # called with every event of metrics.jsonl


def run_service(paths: Sequence[Path], *, broker: str, dashboard: str, insecure: bool, tell: EventReporter) -> None:
    """Serve the federations of these files until all are done, or a signal came. Raises the first failure.

    A signal ends the process: SIGTERM with 0, SIGINT with 130. `broker` replaces that of every file, `dashboard` that
    of the only one.
    """
    show_progress("export.bundle")
    flags: dict[str, Any] = {key: text for key, text in (("broker", broker), ("dashboard", dashboard)) if text}
    settings = [read_config(path, **flags) for path in paths]
    several = len(settings) > 1
    _check_apart(settings)
    name_threads(config.federation for config in settings if several)
    _check_files(settings)
    if dashboard and several:
        raise ConfigError("--dashboard is for one federation", hint="write `dashboard` with a port into each file")
    give_back_large_blocks()
    endpoints = [dashboard_endpoint(config) if config.dashboard.address else None for config in settings]
    with ExitStack() as stack:
        stack.enter_context(_private_files())
        opened = [(config, stack.enter_context(closing(open_store(config)))) for config in settings]
        counter = _DeviceCounter(sum(len(store.states.enrolled()) for config, store in opened if _embedded(config)))
        federations = []
        for config, store in opened:
            past = functools.partial(newest_rounds, config.folder)
            log = stack.enter_context(open_trackers(config.loggers, config.folder, config.to_toml(), past=past))
            say = _with_name(tell, config) if several else tell
            watch = _call_both(log, counter.watch(config, say))
            federations.append(_FederationThread(config, store, watch, say, insecure=insecure))
        for federation, endpoint in zip(federations, endpoints, strict=True):
            if endpoint is not None:
                stack.callback(federation.serve_dashboard(endpoint).close)
        started = [stack.enter_context(one) for one in _brokers(settings)]
        came = _SignalWaiter(federations, [one.pid for one in started if one.pid is not None]).wait()
    failures = [federation.failure for federation in federations if federation.failure is not None]
    if failures:
        raise failures[0]
    if came:
        _end_process(came)


def _end_process(came: int) -> NoReturn:
    """End after a signal, when everything is closed; see edge_client/console_script.py."""
    if came == signal.SIGINT:
        write_stderr("interrupted")
    raise SystemExit(EXIT_OK if came == signal.SIGTERM else 128 + came)


@contextmanager
def _private_files() -> Iterator[None]:
    """What the process writes is for its user alone: run folders hold the devices' updates."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _call_both(first: EventReporter, second: EventReporter) -> EventReporter:
    def tell(event: Mapping[str, Any]) -> None:
        first(event)
        second(event)

    return tell


def _with_name(tell: EventReporter, config: CoordinatorConfig) -> EventReporter:
    """`tell` with one more field, `among`: which of several federations it is."""
    return lambda event: tell({**event, "among": config.federation})


class _FederationThread:
    """One federation: its server, and the thread that runs it."""

    def __init__(
        self, config: CoordinatorConfig, store: Store, watch: EventReporter, tell: EventReporter, *, insecure: bool
    ) -> None:
        url = brokers.broker_url(config.broker)
        client_id = f"{config.federation}.coordinator.0"

        def dial(will: Will | None) -> Transport:
            return MqttTransport(
                url, client_id, will=will, credentials=coordinator_credentials(config), insecure=insecure
            )

        self.name, self._config, self._store = config.federation, config, store
        self.failure: BaseException | None = None
        self._hub: Hub | None = None
        if config.dashboard.address:
            self._hub, watch = _hub(store, watch)
        observe = None if self._hub is None else self._hub.status
        self.server = Server(
            config, store, dial=dial, clock=SystemClock(), beside=True, watch=watch, observe=observe, progress=tell
        )

    def start(self, ended: Callable[[_FederationThread], None]) -> None:
        """Run the server in a thread, which calls `ended` last."""
        threading.Thread(target=self._run, args=(ended,), name=self.name, daemon=True).start()

    def serve_dashboard(self, endpoint: Endpoint) -> DashboardServer:
        """Serve its dashboard and print the link."""
        from coordinator.dashboard.server import DashboardServer

        if self._hub is None:
            raise ValueError(f"{self.name} has no dashboard")
        running = DashboardServer(endpoint, self._config, self._hub, self.server)
        write_stderr(f"dashboard: {running.link_in_logs}")
        return running

    def _run(self, ended: Callable[[_FederationThread], None]) -> None:
        try:
            self.server.run()
        except BaseException as wrong:  # noqa: BLE001 - raised again in the main thread
            self.failure = wrong
        ended(self)


def _hub(store: Store, watch: EventReporter) -> tuple[Hub, EventReporter]:
    """A hub with the stored events, and a `watch` that passes later events to it."""
    from coordinator.dashboard.displayed_metrics import replay_events
    from coordinator.dashboard.event_hub import Hub

    hub = Hub(replay_events(store.events.lines()))
    return hub, _call_both(hub.event, watch)


class _SignalWaiter:
    """Waits for the federations' threads and for a signal, whose handler takes no lock that a thread may hold."""

    def __init__(self, federations: Sequence[_FederationThread], helpers: Sequence[int]) -> None:
        self._federations, self._helpers, self._came = federations, helpers, 0
        self._news = SimpleQueue[_FederationThread | None]()  # one that has ended; None: a signal came

    def wait(self) -> int:
        """Run the threads to their ends; -> the signal that ended them, or 0."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for federation in self._federations:
                federation.start(self._news.put)
            self._follow()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._came

    def _follow(self) -> None:
        running, leave_s = len(self._federations), math.inf
        while running:
            try:
                ended = self._news.get(timeout=POLL_S)
            except Empty:
                if time.monotonic() > leave_s:
                    self._leave_now(EXIT_OK if self._came == signal.SIGTERM else 128 + self._came)
                continue
            if ended is None:
                leave_s = time.monotonic() + STOP_TIMEOUT_S
                self._stop()
                continue
            running -= 1
            if ended.failure is not None and len(self._federations) > 1:
                write_stderr(f"{ended.name} has ended, until `serve` is started again: {ended.failure}")

    def _stop(self) -> None:
        for federation in self._federations:
            federation.server.stop()
        again = "Ctrl-C" if self._came == signal.SIGINT else "signal"
        soon = f"stopping within {STOP_TIMEOUT_S:.0f} s (a second {again}: at once)"
        write_stderr(f"{soon}; started again, it continues where it was")

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._came:
            self._leave_now(128 + number)
        self._came = number
        self._news.put(None)

    def _leave_now(self, code: int) -> NoReturn:
        """End the process at once; no thread, library or child broker may delay it."""
        for pid in self._helpers:
            os.kill(pid, signal.SIGTERM)
        os._exit(code)


class _DeviceCounter:
    """Counts devices that join over the embedded broker, and warns once when there are too many for it."""

    def __init__(self, known: int) -> None:
        self._known, self._lock, self._told = known, threading.Lock(), False
        self._advise()

    def watch(self, config: CoordinatorConfig, tell: EventReporter) -> EventReporter:
        """The `watch` of one federation, which tells of its events by `tell`."""
        return _call_both(tell, self._count) if _embedded(config) else tell

    def _count(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "joined":
            with self._lock:
                self._known += 1
                self._advise()

    def _advise(self) -> None:
        if not self._told and (words := brokers.embedded_broker_warning(self._known)):
            self._told = True
            write_stderr(words)


def _embedded(config: CoordinatorConfig) -> bool:
    own = brokers.local_broker(config.broker)
    return own is not None and own[0] == "embedded"


def _brokers(settings: Iterable[CoordinatorConfig]) -> Iterable[brokers.Broker]:
    """Start once each local broker that a configuration names, with the ports for browsers of all that name it."""
    wanted: dict[tuple[str, int], list[CoordinatorConfig]] = {}
    for config in settings:
        if (own := brokers.local_broker(config.broker)) is not None:
            wanted.setdefault(own, []).append(config)
    for (kind, port), users in wanted.items():
        web_ports = sorted({config.web.port for config in users} - {0})
        started = brokers.start_broker(users[-1].folder / "broker", kind, port=port, web_ports=web_ports)
        browsers = f", for browsers at {' and '.join(started.web)}" if started.web else ""
        write_stderr(f"{started.kind} broker at {started.url}{browsers}, for this machine only")
        yield started


def _check_apart(settings: Sequence[CoordinatorConfig]) -> None:
    for name, what in (("federation", "name"), ("folder", "folder")):
        values = [str(getattr(config, name)) for config in settings]
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ConfigError(
                f"two configurations have the {name} {twice[0]}", hint=f"give each federation a {what} of its own"
            )


def _check_files(settings: Sequence[CoordinatorConfig]) -> None:
    """Raise before a training for what would be missed after its last round."""
    for config in settings:
        check_installed(config.compiled_engines, config.bundle.formats)
        if config.bundle.formats and config.bundle.reference is not None:
            LabelledSamples.read(config.bundle.reference)


def open_store(config: CoordinatorConfig) -> Store:
    """Open the store, and write config.toml beside it: the whole configuration, defaults included.

    Raises ConfigError for a setting that no method has, and for a folder with a training that has other settings, or
    that another coordinator uses: their config.toml stays. Raises FedcentersError for a disk that is full or fails.
    """
    import tomli_w

    parts = [tomli_w.dumps(config.to_toml()), *(_every_setting(run, config) for run in config.runs)]
    with ExitStack() as opened:
        try:
            config.folder.mkdir(parents=True, exist_ok=True)
            store = opened.enter_context(closing(Store(config.folder / "store")))
            accept_settings(config, store)
            if store.facts.get(PROGRAM_FACT) is None:  # else nothing is made of the model any more
                check_model_name(config.model.name)
            write_atomically(config.folder / "config.toml", "\n".join(parts).encode())
        except OSError as wrong:
            told = f"cannot write to {config.folder}: {wrong.strerror}"
            if remedy := _DISK_REMEDIES.get(wrong.errno or 0):  # no ConfigError: a service manager tries again
                raise FedcentersError(told, hint=f"{remedy}, or choose another `folder`") from wrong
            hint = "choose another `folder`"
            if wrong.errno in {errno.EACCES, errno.EPERM}:  # as of a folder that root copied here
                hint = f"give all of it to this user (as root: chown -R USER {config.folder}), or {hint}"
            raise ConfigError(told, hint=hint) from wrong
        opened.pop_all()
    return store


def _every_setting(run: RunConfig, config: CoordinatorConfig) -> str:
    """All settings of a run's method as comments, with the defaults that the configuration does not set."""
    import tomli_w

    settings = kept_settings(run.method, make_strategy(run, config))
    lines = annotate_representations(tomli_w.dumps(settings)).splitlines()
    return "\n".join(f"# {line}" for line in (f"Every setting of run {run.name}, {run.method}:", *lines)) + "\n"
