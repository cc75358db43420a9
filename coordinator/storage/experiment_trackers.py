"""Experiment trackers, which receive the numbers of each round: TensorBoard, MLflow, Prometheus.

A tracker is chosen by name, and its package is imported only then. A tracker that fails during a run is logged once
and receives no further rounds; the run continues, and metrics.jsonl holds the record.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

from edge_client.errors import ConfigError, NetworkError, RuntimeMissing, install_hint

log = logging.getLogger(__name__)

Event = Mapping[str, Any]
EventHandler = Callable[[Event], None]
PROMETHEUS_PORT = 9464


class Tracker(Protocol):
    """Receives the numbers of each round."""

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
    exported = event.get("centers", {"accuracy": {}})["accuracy"]  # where devices are served other models
    found |= {f"exported_centers_accuracy/{key}": value for key, value in exported.items() if value is not None}
    found |= {
        key: event[key] for key in ("f1_pooled", "seconds", "local_steps", "answered") if event.get(key) is not None
    }
    return {key: float(value) for key, value in found.items()}


@contextmanager
def open_trackers(names: str, folder: Path, config: Mapping[str, Any]) -> Iterator[EventHandler]:
    """Open the trackers of `names`, as "tensorboard,prometheus:9464", and yield the handler of events.

    Raises ConfigError for an unknown name, RuntimeMissing where its package is not installed.
    """
    with ExitStack() as stack:
        sinks: dict[str, Tracker] = {}
        for text in filter(None, map(str.strip, names.split(","))):
            name, _, option = text.partition(":")
            if name not in TRACKERS:
                raise ConfigError(f"unknown logger {name!r}", hint=f"use some of {', '.join(TRACKERS)}")
            sinks[name] = TRACKERS[name](folder, option, config)
            stack.callback(sinks[name].close)

        def tell(event: Event) -> None:
            if event.get("event") != "round":
                return
            numbers = numeric_fields(event)
            for name, sink in list(sinks.items()):
                if not _log_event(sink, event, numbers):
                    log.error("logger %s is told no more", name)
                    del sinks[name]

        yield tell


def _log_event(sink: Tracker, event: Event, numbers: Mapping[str, float]) -> bool:
    try:
        sink.log_round(str(event["run"]), int(event["round"]), numbers)
    except Exception:  # a failure of a tracker's server must not end a training
        log.exception("a logger failed")
        return False
    return True


class TensorBoardTracker:
    """Event files in `folder`/tensorboard/<run>, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, _option: str, _config: Mapping[str, Any]) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as missing:
            _missing("tensorboard", missing)
        self._open, self._folder, self._writers = Writer, folder / "tensorboard", dict[str, Any]()

    def log_round(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        if run not in self._writers:
            self._writers[run] = self._open(str(self._folder / run))
        for name, value in numbers.items():
            self._writers[run].add_scalar(name, value, step)
        self._writers[run].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class MLflowTracker:
    """A run of its own per method, on the server that MLFLOW_TRACKING_URI names, in the experiment mlflow:NAME."""

    def __init__(self, _folder: Path, option: str, config: Mapping[str, Any]) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as missing:
            _missing("mlflow", missing)
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            raise ConfigError("MLFLOW_TRACKING_URI is not set", hint="set it to your server, as http://host:5000")
        self._client, self._config, self._runs = MlflowClient(where), config, dict[str, str]()
        known = self._client.get_experiment_by_name(option or "fedcenters")
        self._experiment = known.experiment_id if known else self._client.create_experiment(option or "fedcenters")

    def log_round(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        if run not in self._runs:
            self._runs[run] = self._client.create_run(self._experiment, run_name=run).info.run_id
            for key, value in self._config.items():
                self._client.log_param(self._runs[run], key, str(value)[:500])
        for name, value in numbers.items():
            self._client.log_metric(self._runs[run], name, value, step=step)

    def close(self) -> None:
        for run_id in self._runs.values():
            self._client.set_terminated(run_id)


class PrometheusTracker:
    """GET /metrics on this machine's port, 9464 or as in prometheus:PORT: the last round of each run.

    A score of a round without a test is that of the last test. Of a center that is no more there is none.
    """

    def __init__(self, _folder: Path, option: str, _config: Mapping[str, Any]) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError as missing:
            _missing("prometheus", missing)
        if option and not option.isdecimal():
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
        self._round.labels(run).set(step)
        for name, value in numbers.items():
            self._value.labels(run, name).set(value)
        known, kinds = self._told.get(run, set()), {_kind(name) for name in numbers}
        gone = {name for name in known - numbers.keys() if _kind(name) in kinds}
        for name in gone:
            self._value.remove(run, name)
        self._told[run] = known.union(numbers) - gone

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
