"""Experiment trackers, which receive the numbers of each round: TensorBoard, MLflow, Prometheus.

A tracker is chosen by name, and its package is imported only then. Each is told by a thread of its own, so that no
round waits for a server. A round that a tracker does not take is lost there; the log says so, the run continues, and
metrics.jsonl holds the record.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NoReturn, Protocol

from edge_client.errors import ConfigError, NetworkError, RuntimeMissing, install_hint
from edge_client.printable import printable_line

log = logging.getLogger(__name__)

Event = Mapping[str, Any]
EventHandler = Callable[[Event], None]
PROMETHEUS_PORT = 9464
MAX_WAITING = 1_000  # rounds that a tracker has not taken yet
PATIENCE_S = 5.0  # at the end, for a tracker that takes no round meanwhile
EVENT_FILES = "events.out.tfevents.*"  # of TensorBoard
MAX_PARAMS = 100  # MLflow takes no more at once


class Tracker(Protocol):
    """Receives the numbers of each round. One that `forgets` hears first of the newest rounds of an earlier process."""

    forgets: bool = False

    def log_round(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log round `step` of a run; the names of `numbers` are paths, as accuracy/micro."""

    def close(self) -> None:
        """Write buffered numbers and release the tracker."""


def numeric_fields(event: Event) -> dict[str, float]:
    """The scalar fields of a round's event, centers by number. Devices have none: a tracker cannot show thousands."""
    found: dict[str, float] = {}
    for name in ("accuracy", "f1_of_devices", "loss", "bytes"):
        if isinstance(value := event.get(name), Mapping):
            found |= {f"{name}/{key}": v for key, v in value.items() if isinstance(v, (int, float))}
    for key, name in (("per_center", "center_accuracy"), ("loss_per_center", "center_loss")):
        found |= {f"{name}/{k}": value for k, value in enumerate(event.get(key, ())) if value is not None}
    for score, average in (event.get("metrics") or {}).items():  # beside accuracy, and the user's own
        name = re.sub(r"[^A-Za-z0-9_./ -]", "_", score)  # MLflow takes no others
        found |= {f"{name}/{key}": average[key] for key in ("micro", "macro") if average.get(key) is not None}
    exported = event.get("centers", {"accuracy": {}})["accuracy"]  # where devices are served other models
    found |= {f"exported_centers_accuracy/{key}": value for key, value in exported.items() if value is not None}
    found |= {
        key: event[key] for key in ("f1_pooled", "seconds", "local_steps", "answered") if event.get(key) is not None
    }
    return {key: float(value) for key, value in found.items()}


@contextmanager
def open_trackers(
    names: str, folder: Path, config: Mapping[str, Any], *, past: Callable[[], Iterable[Event]] = tuple
) -> Iterator[EventHandler]:
    """Open the trackers of `names`, as "tensorboard,prometheus:9464", and yield the handler of events.

    `past` gives the newest rounds of an earlier process, for a tracker that forgets. Raises ConfigError for an unknown
    name, RuntimeMissing where its package is not installed.
    """
    with ExitStack() as stack:
        threads = []
        for text in filter(None, map(str.strip, names.split(","))):
            name, _, option = text.partition(":")
            if name not in TRACKERS:
                raise ConfigError(f"unknown logger {name!r}", hint=f"use some of {', '.join(TRACKERS)}")
            tracker = TRACKERS[name](folder, option, config)
            threads.append(_TrackerThread(name, tracker))
            stack.callback(threads[-1].close)
            for event in past() if tracker.forgets else ():
                threads[-1].tell(_told(event))

        def tell(event: Event) -> None:
            if event.get("event") == "round":
                for thread in threads:
                    thread.tell(_told(event))

        yield tell


Told = tuple[str, int, Mapping[str, float]]  # run, round, numbers


def _told(event: Event) -> Told:
    return str(event["run"]), int(event["round"]), numeric_fields(event)


class _TrackerThread:
    """One tracker and the thread that tells it, in order, what waits for it."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._waiting: SimpleQueue[Told | None] = SimpleQueue()  # None ends it
        self._counting = Lock()  # of the next two
        self._taken = self._lost = 0  # the lost ones are those since the last that was taken
        self._thread = Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def tell(self, told: Told) -> None:
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(told)
        else:
            self._lose(told, f"{MAX_WAITING} earlier ones wait for its server")

    def close(self) -> None:
        """Wait as long as it takes rounds; a tracker that does not answer is left."""
        self._waiting.put(None)
        before = -1
        while self._thread.is_alive() and self._taken + self._lost != before:
            before = self._taken + self._lost
            self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            log.warning(
                "logger %s does not answer, so its last rounds are not there; metrics.jsonl has all", self._name
            )

    def _run(self) -> None:
        while (told := self._waiting.get()) is not None:
            self._log(told)
        try:
            self._tracker.close()
        except Exception as wrong:  # noqa: BLE001 - as below
            log.warning("logger %s did not end in good order: %s", self._name, printable_line(str(wrong)))

    def _log(self, told: Told) -> None:
        try:
            self._tracker.log_round(*told)
        except Exception as wrong:  # noqa: BLE001 - a failure of a tracker's server must not end a training
            self._lose(told, f"{type(wrong).__name__}: {wrong}")
            return
        with self._counting:
            lost, self._lost, self._taken = self._lost, 0, self._taken + 1
        if lost:
            log.warning("logger %s takes rounds again; it lacks %d", self._name, lost)

    def _lose(self, told: Told, why: str) -> None:
        """Say it of the first round in a row."""
        with self._counting:
            self._lost += 1
            first = self._lost == 1
        if first:
            words = "logger %s does not take round %d of %s: %s; the training goes on, and metrics.jsonl has all rounds"
            log.warning(words, self._name, told[1], told[0], printable_line(why))


class TensorBoardTracker(Tracker):
    """Event files in `folder`/tensorboard/<run>, for `tensorboard --logdir`. A run that begins anew replaces them.

    Each start is a session: from the second one on, TensorBoard forgets the rounds that it has from the session's first
    round on, which are played again.
    """

    def __init__(self, folder: Path, _option: str, _config: Mapping[str, Any]) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event as EventRecord
            from tensorboard.compat.proto.event_pb2 import SessionLog
            from tensorboard.plugins.scalar.summary_v2 import scalar_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as missing:
            _missing("tensorboard", missing)
        self._open, self._record, self._scalar = EventFileWriter, EventRecord, scalar_pb
        self._began = SessionLog(status=SessionLog.START)
        self._folder, self._writers = folder / "tensorboard", dict[str, Any]()

    def log_round(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        first = run not in self._writers
        if first:
            for old in (self._folder / run).glob(EVENT_FILES) if step == 1 else ():
                old.unlink()
            self._writers[run] = self._open(str(self._folder / run))
        scalars = [{"summary": self._scalar(name, value)} for name, value in numbers.items()]
        for content in [{"session_log": self._began}, *scalars] if first else scalars:
            self._writers[run].add_event(self._record(step=step, wall_time=time.time(), **content))
        self._writers[run].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class MLflowTracker(Tracker):
    """A run of its own per method, on the server of MLFLOW_TRACKING_URI, in the experiment mlflow:NAME.

    Its id is kept in `folder`/mlflow.json: a run that goes on has its later rounds in the same one. MLflow forgets no
    number, so a round that is played again, from an earlier checkpoint, is not told again: the first numbers stay.
    """

    def __init__(self, folder: Path, option: str, config: Mapping[str, Any]) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as missing:
            _missing("mlflow", missing)
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            raise ConfigError("MLFLOW_TRACKING_URI is not set", hint="set it to your server, as http://host:5000")
        self._client, self._runs = MlflowClient(where), dict[str, str]()
        self._newest = dict[str, int]()  # the last round that a run had when it went on
        self._name, self._experiment, self._kept = option or "fedcenters", "", folder / "mlflow.json"
        self._params = {key: str(value)[:500] for key, value in config.items()}

    def log_round(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        """The first one opens the experiment: a server that is away holds up no start."""
        from mlflow.entities import Metric

        if run not in self._runs:
            self._runs[run] = (self._go_on(run, numbers) if step > 1 else "") or self._begin(run)
        if step <= self._newest.get(run, 0):
            return
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._runs[run], [Metric(name, value, now_ms, step) for name, value in numbers.items()])

    def _begin(self, run: str) -> str:
        from mlflow.entities import Param

        begun = str(self._client.create_run(self._experiment_id(), run_name=run).info.run_id)
        params = [Param(key, value) for key, value in self._params.items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(begun, params=params[start : start + MAX_PARAMS])
        try:
            self._kept.write_text(json.dumps({**self._ids(), run: begun}), encoding="utf-8")
        except OSError as wrong:  # else each round began a run of its own
            log.warning("%s cannot be written, so a resumed run will be another one of MLflow: %s", self._kept, wrong)
        return begun

    def _go_on(self, run: str, names: Iterable[str]) -> str:
        """The id of the run in which the earlier rounds are; empty where this server or experiment has none.

        `names` of numbers are those by which its last round is known.
        """
        from mlflow.exceptions import MlflowException

        if not (known := self._ids().get(run)):
            return ""
        try:
            found = self._client.get_run(known)
        except MlflowException as wrong:
            if wrong.error_code == "RESOURCE_DOES_NOT_EXIST":
                return ""
            raise
        if found.info.lifecycle_stage != "active" or found.info.experiment_id != self._experiment_id():
            return ""
        there = [self._client.get_metric_history(known, name) for name in found.data.metrics.keys() & set(names)]
        self._newest[run] = max((metric.step for history in there for metric in history), default=0)
        self._client.update_run(known, status="RUNNING")
        return str(known)

    def _experiment_id(self) -> str:
        if not self._experiment:
            known = self._client.get_experiment_by_name(self._name)
            self._experiment = known.experiment_id if known else self._client.create_experiment(self._name)
        return self._experiment

    def _ids(self) -> dict[str, Any]:
        """What `mlflow.json` has, by run; nothing where it is missing or damaged."""
        try:
            found = json.loads(self._kept.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        for run_id in self._runs.values():
            self._client.set_terminated(run_id)


class PrometheusTracker(Tracker):
    """GET /metrics on this machine's port, 9464 or as in prometheus:PORT: the last round of each run.

    A score of a round without a test is that of the last test. Of a center that is no more there is none.
    """

    forgets = True  # an alarm for a low accuracy would see nothing from a restart to the next round

    def __init__(self, _folder: Path, option: str, _config: Mapping[str, Any]) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError as missing:
            _missing("prometheus", missing)
        if option and not (option.isdecimal() and int(option) < 1 << 16):
            raise ConfigError(f"prometheus:{option}", hint="write prometheus:9464, with a port")
        registry, port = CollectorRegistry(), int(option or PROMETHEUS_PORT)
        self._value = Gauge("fedcenters_round_value", "Of the last round.", ["run", "name"], registry=registry)
        self._round = Gauge("fedcenters_round", "The last round.", ["run"], registry=registry)
        self._told: dict[str, set[str]] = {}  # names by run
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as taken:
            hint = "choose another port, as prometheus:9465"
            raise NetworkError(f"cannot listen on 127.0.0.1:{port}: {taken.strerror}", hint=hint) from taken

    def log_round(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._value.labels(run, name).set(value)
        known, kinds = self._told.get(run, set()), {_kind(name) for name in numbers}
        gone = {name for name in known - numbers.keys() if _kind(name) in kinds}
        for name in gone:
            self._value.remove(run, name)
        self._told[run] = known.union(numbers) - gone
        self._round.labels(run).set(step)  # last: a page with this round has its values

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


TRACKERS: Mapping[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "prometheus": PrometheusTracker,
}


def _kind(name: str) -> str:
    """center_accuracy of center_accuracy/3."""
    return name.partition("/")[0]


def _missing(extra: str, wrong: ImportError) -> NoReturn:
    raise RuntimeMissing(f"{wrong.name or extra} is not installed", hint=install_hint(extra)) from wrong
