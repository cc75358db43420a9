"""What the coordinator is told: one TOML file with kebab-case keys, checked once, wrong keys refused by name.

Scalars of the top level can be overridden by FEDCENTERS_<KEY> (`broker` by FEDCENTERS_BROKER). Relative paths count
from the folder of the configuration file. Opens no connection, imports no torch.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.rounds.round import EvaluationPlan
from coordinator.rounds.update_validation import MAX_UPDATE_RATIO, MAX_UPDATE_RMS
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.blocks import BLOCK_BYTES_STEP, MAX_BLOCK_BYTES
from edge_client.protocol.topics import check_federation

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES = ("onnx", "litert", "pt2")
CODECS = ("f32", "f16", "i8")
FORMATS = ("onnx", "tflite")
BELOW_QUORUM = ("stop", "continue")
PATH_KEYS = (
    "folder",
    "reference",
    "ca",
    "certificate",
    "key",
    "signing_folder",
    "release",
    "dashboard_read_token",
    "dashboard_control_token",
    "dashboard_certificate",
    "dashboard_key",
)
TABLE_KEYS = ("model", "runs")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained and for which engines its program is compiled."""

    name: str
    batch_size: int = 16  # the fixed batch of runtimes that need one, and the default of every run
    engines: tuple[str, ...] = ENGINES

    def __post_init__(self) -> None:
        _at_least("model.batch-size", self.batch_size, 1)
        _some_of("model.engines", self.engines, ENGINES)
        if not self.engines:
            raise ConfigError("model.engines is empty", hint=f"use some of: {', '.join(ENGINES)}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run: a method, how many rounds, and the method's own settings in kebab-case."""

    method: str
    rounds: int
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least("runs.num-rounds", self.rounds, 1)


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Everything `serve` needs.

    Four settings decide about a round. A run's `fraction-train` is the share of the fleet that it wants. With fewer
    than `fraction-connected` of the fleet on line it is not begun. `quorum` is the share of the wanted updates that is
    enough to aggregate; `deadline-s` is when the round ends with those that it has. `over-select` asks more devices
    than wanted, and ends the round when as many as wanted have answered.
    """

    federation: str
    broker: str
    folder: Path
    model: ModelConfig
    runs: tuple[RunConfig, ...]
    min_devices: int = 1
    max_devices: int = 10_000
    start_timeout_s: float = 300.0
    over_select: float = 1.0
    fraction_connected: float = 0.0
    quorum: float = 0.8
    deadline_s: float = 600.0
    below_quorum: str = "stop"  # also when too few are connected for a whole deadline
    codec: str = "i8"  # of updates; what it loses, a device adds to its next one
    seed: int = 0
    block: int = 65_536
    credits: int = 32  # uploads under way at the same time
    in_flight_mib: int = 24  # of updates and as much of models: what the broker may have to hold for us
    evaluate_every: int = 1  # rounds from one test to the next; the last round tests everybody
    fraction_evaluate: float = 1.0  # of the devices, in a test before the last
    max_update_rms: float = MAX_UPDATE_RMS  # how far an update may move a parameter on average
    max_update_ratio: float = MAX_UPDATE_RATIO  # the same as a multiple of what is usual in the run
    formats: tuple[str, ...] = FORMATS  # none: no bundle, the catalog offers the centers' tensors only
    reference: Path | None = None
    bundle_run: str = ""  # name of the run whose centers are exported and served; the first one when empty
    teach_newcomers: bool = False  # ask devices once how every center does on their held-out samples (PROTOCOL.md 12)
    exit_when_done: bool = False
    ca: Path | None = None  # PEM file of the authority that the broker's certificate must come from
    certificate: Path | None = None  # the coordinator's own, and its key
    key: Path | None = None
    signing_folder: Path | None = None  # where signing.key lies; `folder` when absent
    release: Path | None = None  # a newer client for boards, made by `fedcenters-edge release`
    web_port: int = 0  # of the WebSocket listener of a broker that `serve` starts: what browsers dial; none when 0
    web_broker: str = ""  # the same of a broker elsewhere: wss://host:port
    loggers: str = ""  # who else is told of each round, as "tensorboard,mlflow" (experiment_trackers.py)
    dashboard: str = ""  # [HOST:]PORT of the page that shows the run and steers it; none when empty
    dashboard_read_token: Path | None = None  # files of one line; without them only this machine may look
    dashboard_control_token: Path | None = None  # and steering needs the link that the command prints
    dashboard_certificate: Path | None = None  # for https, with its key
    dashboard_key: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what could not work, by the name that the user typed."""
        try:
            check_federation(self.federation)
        except (Malformed, ValueError) as wrong:
            raise ConfigError(str(wrong), hint="federation: 1 to 32 of a-z, 0-9 and '-'") from wrong
        for key in ("min_devices", "max_devices", "credits", "in_flight_mib", "evaluate_every"):
            _at_least(key.replace("_", "-"), getattr(self, key), 1)
        for key in ("start_timeout_s", "deadline_s", "max_update_rms", "max_update_ratio"):
            _positive(key.replace("_", "-"), getattr(self, key))
        _share("quorum", self.quorum, of="wanted updates")
        _share("fraction-connected", self.fraction_connected, of="fleet")
        _port("web-port", self.web_port)
        if not isinstance(self.teach_newcomers, bool):
            raise ConfigError(f"teach-newcomers is {self.teach_newcomers!r}", hint="true or false")
        _positive("over-select", self.over_select)
        if self.over_select < 1:
            raise ConfigError(
                f"over-select is {self.over_select}", hint="over-select is 1 or more, 1.3 for a third more"
            )
        _positive("fraction-evaluate", self.fraction_evaluate)
        EvaluationPlan(every=self.evaluate_every, fraction=self.fraction_evaluate)
        if self.block % BLOCK_BYTES_STEP or not BLOCK_BYTES_STEP <= self.block <= MAX_BLOCK_BYTES:
            raise ConfigError(f"block is {self.block}", hint="block is a multiple of 4096 from 4096 to 1048576 bytes")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed}", hint="seed is 0 to 2147483647")
        _some_of("codec", (self.codec,), CODECS)
        _some_of("below-quorum", (self.below_quorum,), BELOW_QUORUM)
        _some_of("formats", self.formats, FORMATS)
        if self.formats and "pt2" not in self.model.engines:
            raise ConfigError(
                "the bundle's files are made from the program for pt2",
                hint='add "pt2" to model.engines, or set formats = []',
            )
        names = [run.name for run in self.runs]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"runs are named {names}", hint="at least one [[runs]], each with its own name")
        _some_of("bundle-run", (self.served_run,), names)

    @property
    def served_run(self) -> str:
        """Name of the run whose centers become the bundle."""
        return self.bundle_run or self.runs[0].name

    @property
    def signing_key_folder(self) -> Path:
        """The folder of the signing key, which the first start makes if nobody did."""
        return self.signing_folder or self.folder

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of updates, and as many of models, that may be on their way."""
        return self.in_flight_mib << 20

    @property
    def evaluation(self) -> EvaluationPlan:
        """Who is tested, and after which rounds."""
        return EvaluationPlan(every=self.evaluate_every, fraction=self.fraction_evaluate)

    def fingerprint(self) -> dict[str, Any]:
        """What decides the results; a folder that holds stored rounds can only be continued with an equal lesson."""
        return {
            "federation": self.federation,
            "model": {
                "name": self.model.name,
                "batch-size": self.model.batch_size,
                "engines": list(self.model.engines),
            },
            "seed": self.seed,
            "codec": self.codec,
            "runs": [{"name": r.name, "method": r.method, "rounds": r.rounds, **r.settings} for r in self.runs],
            # An exchange more or less would mislead a replay. Folders from before these keys say nothing of them.
            **({} if self.evaluate_every == 1 else {"evaluate-every": self.evaluate_every}),
            **({} if self.fraction_evaluate == 1 else {"fraction-evaluate": self.fraction_evaluate}),
            **({} if self.over_select == 1 else {"over-select": self.over_select}),
            **({"teach-newcomers": True} if self.teach_newcomers else {}),
        }

    def to_toml(self) -> dict[str, Any]:
        """The configuration in use, defaults included, in the file's own keys; `read_config` understands it."""
        plain = {key: getattr(self, key) for key in _keys() if getattr(self, key) not in (None, "")}
        out = {key.replace("_", "-"): _plain(value) for key, value in plain.items()}
        lesson = self.fingerprint()
        runs = [{"num-rounds": run.pop("rounds"), **run} for run in lesson["runs"]]
        return out | {"model": lesson["model"], "runs": runs}


def read_config(path: Path, *, environ: Mapping[str, str] = os.environ, **overrides: str) -> CoordinatorConfig:
    """Read and check one file; `overrides` (a command line's flags) win over the environment, that over the file."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as missing:
        raise ConfigError(f"cannot read {path}: {missing.strerror}", hint="pass the path of a TOML file") from missing
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise ConfigError(f"{path} is no TOML file: {wrong}", hint="see coordinator/config.py for the keys") from wrong
    return config_from_table(raw | overrides_from_environment(environ) | overrides, base=path.resolve().parent)


def overrides_from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """FEDCENTERS_DEADLINE_S=5 -> {"deadline-s": 5}; values are read as TOML, else as text. Lists stay in the file."""
    out: dict[str, Any] = {}
    for key in _keys():
        text = environ.get(f"FEDCENTERS_{key.upper()}")
        if text is None:
            continue
        try:
            out[key.replace("_", "-")] = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            out[key.replace("_", "-")] = text
    return out


def config_from_table(raw: Mapping[str, Any], *, base: Path) -> CoordinatorConfig:
    """A parsed file -> the checked configuration."""
    table = _known(raw, [*_keys(), *TABLE_KEYS], "")
    for needed in ("federation", "broker", "folder", "model", "runs"):
        if needed not in table:
            raise ConfigError(
                f"{needed!r} is missing", hint="federation, broker, folder, [model] and [[runs]] are needed"
            )
    for key in PATH_KEYS:
        if table.get(key):
            table[key] = base / _typed(key.replace("_", "-"), table[key], str)
    if "formats" in table:
        table["formats"] = tuple(_typed("formats", table["formats"], list))
    model = _known(_typed("model", table.pop("model"), dict), ["name", "batch_size", "engines"], "model.")
    if "engines" in model:
        model["engines"] = tuple(_typed("model.engines", model["engines"], list))
    runs = _typed("runs", table.pop("runs"), list)
    try:
        return CoordinatorConfig(model=ModelConfig(**model), runs=_runs(runs), **table)
    except TypeError as wrong:
        raise ConfigError(
            f"a value has the wrong type: {wrong}", hint="compare with the example in README.md"
        ) from wrong


def _runs(rows: list[Any]) -> tuple[RunConfig, ...]:
    """Each [[runs]] table: `method`, `num-rounds`, `name` (else the method's); the rest are the method's settings."""
    out = []
    for row in rows:
        settings = dict(_typed("runs", row, dict))
        if "method" not in settings or "num-rounds" not in settings:
            hint = 'method = "fesem" and num-rounds = 5'
            raise ConfigError("a [[runs]] table needs method and num-rounds", hint=hint)
        method = _typed("method", settings.pop("method"), str)
        rounds = _typed("num-rounds", settings.pop("num-rounds"), int)
        name = _typed("name", settings.pop("name", method), str)
        if not name or set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-"):
            raise ConfigError(f"run name {name!r} names a folder too", hint="use a-z, 0-9 and '-'")
        out.append(RunConfig(method=method, rounds=rounds, name=name, settings=settings))
    return tuple(out)


def _keys() -> list[str]:
    return [key for key in CoordinatorConfig.__dataclass_fields__ if key not in TABLE_KEYS]


def _known(raw: Mapping[str, Any], keys: Collection[str], where: str) -> dict[str, Any]:
    """Kebab-case keys to field names; an unknown key is refused with the nearest valid one."""
    valid = {key.replace("_", "-"): key for key in keys}
    for key in raw:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"valid keys: {', '.join(sorted(valid))}"
            raise ConfigError(f"unknown key {where}{key}", hint=hint)
    return {valid[key]: value for key, value in raw.items()}


def _typed(key: str, value: Any, kind: type) -> Any:  # noqa: ANN401 - TOML values
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{key} is {value!r}", hint=f"{key} must be a {kind.__name__}")
    return value


def _plain(value: Any) -> Any:  # noqa: ANN401 - TOML values
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def _at_least(key: str, value: Any, least: int) -> None:  # noqa: ANN401 - not checked yet
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} is {value!r}", hint=f"{key} must be a whole number, at least {least}")


def _port(key: str, value: Any) -> None:  # noqa: ANN401 - not checked yet
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**16:
        raise ConfigError(f"{key} is {value!r}", hint=f"{key} is a port, as 9001, or 0 for none")


def _share(key: str, value: Any, *, of: str) -> None:  # noqa: ANN401 - not checked yet
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{key} is {value!r}", hint=f"{key} is a share of the {of}, 0 to 1")


def _positive(key: str, value: Any) -> None:  # noqa: ANN401 - not checked yet
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"{key} is {value!r}", hint=f"{key} must be a positive number")


def _some_of(key: str, values: Collection[Any], valid: Collection[str]) -> None:
    wrong = [v for v in values if v not in valid]
    if wrong:
        raise ConfigError(f"{key} is {', '.join(map(repr, wrong))}", hint=f"use some of: {', '.join(valid)}")
