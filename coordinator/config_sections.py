"""The sections of a coordinator's configuration (config.py), each of which checks its own values.

A message names the key of the configuration file that holds the value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.rounds.asynchronous.options import Asynchronous, options_of
from coordinator.rounds.round import EvaluationPlan
from coordinator.rounds.sample_weights import MAX_SAMPLES_RATIO
from coordinator.rounds.update_validation import MAX_UPDATE_RATIO, MAX_UPDATE_RMS
from coordinator.strategies.common.setting_checks import check_kind
from edge_client.errors import ConfigError
from edge_client.protocol.blocks import BLOCK_BYTES_STEP, MAX_BLOCK_BYTES
from edge_client.protocol.program import ENGINES

CODECS = ("f32", "f16", "i8")
FORMATS = ("onnx", "tflite")
BELOW_QUORUM = ("stop", "continue")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train, and the engines that its program is compiled for."""

    name: str
    batch_size: int = 16  # of runtimes with a fixed batch, and the default of every run
    engines: tuple[str, ...] = ENGINES

    def __post_init__(self) -> None:
        _count("model.batch-size", self.batch_size)
        check_some_of("model.engines", self.engines, ENGINES)
        if not self.engines:
            raise ConfigError("model.engines is empty", hint=f"use some of: {', '.join(ENGINES)}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run: its method, its number of rounds, and the settings of the method, in kebab-case."""

    method: str
    rounds: int
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _count("runs.num-rounds", self.rounds)


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """How many devices enrol before the training starts, how long the coordinator waits, and what a device weighs."""

    min_devices: int = 1
    max_devices: int = 10_000
    start_timeout_s: float = math.inf
    max_samples_ratio: float = MAX_SAMPLES_RATIO  # samples that count of one device, as a multiple of the median

    def __post_init__(self) -> None:
        _count("min-devices", self.min_devices)
        _count("max-devices", self.max_devices)
        if self.min_devices > self.max_devices:
            told = f"min-devices is {self.min_devices}, and max-devices {self.max_devices}: so many are never here"
            raise ConfigError(told, hint=f"set max-devices to {self.min_devices} or more")
        if self.start_timeout_s != math.inf:
            _positive("start-timeout-s", self.start_timeout_s)
        _positive("max-samples-ratio", self.max_samples_ratio)
        if self.max_samples_ratio < 1:
            raise ConfigError(
                f"max-samples-ratio is {self.max_samples_ratio}", hint="1 or more, 10 for ten times the fleet's median"
            )


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """When a round begins, ends and is followed by an evaluation.

    A run's `fraction-train` is the share of the fleet whose updates a round wants. `over_select` times as many devices
    are asked, and the round ends when the wanted number has replied. `quorum` is the share of the wanted updates that
    suffices to aggregate when `deadline_s` has passed. A round does not begin while less than `fraction_connected` of
    the fleet is connected.
    """

    over_select: float = 1.0
    fraction_connected: float = 0.0
    quorum: float = 0.8
    deadline_s: float = 600.0
    below_quorum: str = "stop"  # also when too few devices are connected for a whole deadline
    concurrency: int | None = None  # devices that train at once in runs that wait for none; None: rounds
    buffer: int | None = None  # updates that fill the buffers
    max_staleness: int | None = None  # versions of a center that are made during a task
    evaluate_every: int = 1  # rounds from one evaluation to the next; the last round evaluates the whole fleet
    fraction_evaluate: float = 1.0  # of the devices, in an evaluation before the last

    def __post_init__(self) -> None:
        _positive("deadline-s", self.deadline_s)
        _share("quorum", self.quorum, of="wanted updates")
        _share("fraction-connected", self.fraction_connected, of="fleet")
        _positive("over-select", self.over_select)
        if self.over_select < 1:
            raise ConfigError(
                f"over-select is {self.over_select}", hint="over-select is 1 or more, 1.3 for a third more"
            )
        check_some_of("below-quorum", (self.below_quorum,), BELOW_QUORUM)
        _count("evaluate-every", self.evaluate_every)
        _positive("fraction-evaluate", self.fraction_evaluate)
        for key in ("concurrency", "buffer", "max_staleness"):
            if (value := getattr(self, key)) is not None:
                check_kind(key.replace("_", "-"), value, "int")
        _ = self.evaluation  # an EvaluationPlan checks its own limits
        if self.asynchronous is not None and self.over_select != 1:  # as do the options of runs without rounds
            why = "no device is waited for, so none is asked in another's place"
            raise ConfigError(f"concurrency with over-select: {why}", hint="leave one of them out")

    @property
    def evaluation(self) -> EvaluationPlan:
        return EvaluationPlan(every=self.evaluate_every, fraction=self.fraction_evaluate)

    @property
    def asynchronous(self) -> Asynchronous | None:
        """How runs wait for no device; None where they have rounds."""
        return options_of(self.concurrency, self.buffer, self.max_staleness)


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How updates are encoded, and which ones are refused."""

    codec: str = "i8"  # a device adds the quantisation error of an update to its next one
    max_rms: float = MAX_UPDATE_RMS  # root mean square of an update over its parameters
    max_ratio: float = MAX_UPDATE_RATIO  # the same as a multiple of the usual value in the run

    def __post_init__(self) -> None:
        check_some_of("codec", (self.codec,), CODECS)
        _positive("max-update-rms", self.max_rms)
        _positive("max-update-ratio", self.max_ratio)


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """How blobs travel through the broker."""

    block: int = 65_536  # bytes
    credits: int = 32  # concurrent uploads
    in_flight_mib: int = 24  # of updates, and as much of models: what the broker may have to queue
    task_window: int = 1_000  # devices that are given their task at once; each costs about 6 ms of CPU

    def __post_init__(self) -> None:
        _count("task-window", self.task_window)
        _count("credits", self.credits)
        _count("in-flight-mib", self.in_flight_mib)
        check_kind("block", self.block, "int")
        if self.block % BLOCK_BYTES_STEP or not BLOCK_BYTES_STEP <= self.block <= MAX_BLOCK_BYTES:
            raise ConfigError(f"block is {self.block}", hint="block is a multiple of 4096 from 4096 to 1048576 bytes")

    @property
    def in_flight_bytes(self) -> int:
        return self.in_flight_mib << 20


@dataclass(frozen=True, kw_only=True)
class BundleConfig:
    """Which centers are exported, and as what."""

    formats: tuple[str, ...] = FORMATS  # none: no bundle, and the catalog offers the centers' tensors only
    reference: Path | None = None
    run: str = ""  # name of the run whose centers are exported and served; the first one when empty
    class_names: tuple[str, ...] = ()  # what people call the classes 0, 1, ...; for cards and new devices

    def __post_init__(self) -> None:
        check_some_of("formats", self.formats, FORMATS)
        if any(not isinstance(name, str) or not name.isprintable() for name in self.class_names):
            raise ConfigError("class-names holds what is no text", hint='class-names = ["walking", "sitting"]')


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """The PEM files of the connection to the broker."""

    ca: Path | None = None  # the authority that must have signed the broker's certificate
    certificate: Path | None = None  # the coordinator's own
    key: Path | None = None


@dataclass(frozen=True, kw_only=True)
class WebConfig:
    """Where browsers reach the broker."""

    port: int = 0  # WebSocket listener of a broker that `serve` starts; none when 0
    broker: str = ""  # wss://host:port of a broker elsewhere

    def __post_init__(self) -> None:
        _port("web-port", self.port)


@dataclass(frozen=True, kw_only=True)
class DashboardConfig:
    """Where the dashboard is served, and the files that guard it."""

    address: str = ""  # [HOST:]PORT; no dashboard when empty
    read_token: Path | None = None  # a file of one line; without it only this machine may read
    control_token: Path | None = None  # a file of one line; without it control needs the link that `serve` prints
    certificate: Path | None = None  # for https
    key: Path | None = None


def _count(key: str, value: Any) -> None:  # noqa: ANN401 - not checked yet
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} is {value!r}", hint=f"{key} must be a whole number, at least 1")


def _port(key: str, value: Any) -> None:  # noqa: ANN401 - not checked yet
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**16:
        raise ConfigError(f"{key} is {value!r}", hint=f"{key} is a port, as 9001, or 0 for none")


def _share(key: str, value: Any, *, of: str) -> None:  # noqa: ANN401 - not checked yet
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{key} is {value!r}", hint=f"{key} is a share of the {of}, 0 to 1")


def _positive(key: str, value: Any) -> None:  # noqa: ANN401 - not checked yet
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"{key} is {value!r}", hint=f"{key} must be a positive number")


def check_some_of(key: str, values: Collection[Any], valid: Collection[str]) -> None:
    """Refuse values of a key that are not valid."""
    wrong = [v for v in values if v not in valid]
    if wrong:
        raise ConfigError(f"{key} is {', '.join(map(repr, wrong))}", hint=f"use some of: {', '.join(valid)}")
