"""The coordinator's configuration: one TOML file with kebab-case keys, checked when it is read.

The file's keys are flat. Each is a field of the configuration or of one of its sections: its name in kebab-case, or
what `_OTHER_KEYS` says. Its type says whether it takes a text, a path or a list. An unknown key is refused, and the
message names the nearest valid key. The environment variable FEDCENTERS_<KEY> overrides a top-level scalar, as
FEDCENTERS_BROKER overrides `broker`. A relative path starts at the folder of the configuration file.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from coordinator.config_sections import (
    BundleConfig,
    DashboardConfig,
    FleetConfig,
    ModelConfig,
    RoundConfig,
    RunConfig,
    TlsConfig,
    TransferConfig,
    UpdateConfig,
    WebConfig,
    check_some_of,
)
from coordinator.strategies.common.setting_checks import check_kind
from coordinator.strategies.registry import METHODS, setting_types
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.topics import check_federation
from edge_client.toml_files import parse_toml, read_toml, variable_of, warn_of_mistyped

_OTHER_KEYS = {  # (section, field) -> its key, where that is not the name of the field
    ("update", "max_rms"): "max-update-rms",
    ("update", "max_ratio"): "max-update-ratio",
    ("bundle", "run"): "bundle-run",
    ("web", "port"): "web-port",
    ("web", "broker"): "web-broker",
    ("dashboard", "address"): "dashboard",
    ("dashboard", "read_token"): "dashboard-read-token",
    ("dashboard", "control_token"): "dashboard-control-token",
    ("dashboard", "certificate"): "dashboard-certificate",
    ("dashboard", "key"): "dashboard-key",
}
RUN_KEYS = ("method", "num-rounds", "name")  # of [[runs]], beside the settings of the method
MAX_RUN_NAME = 64  # characters, as devices are told it (PROTOCOL.md, `coord`)
_TABLES = ("model", "runs")  # of the file, below its keys
_WORDS = {str: 'a text, as {key} = "..."', int: "a whole number", list: "a list", dict: "a table"}


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Everything that `serve` needs."""

    federation: str
    broker: str
    folder: Path
    model: ModelConfig
    runs: tuple[RunConfig, ...]
    seed: int = 0
    fleet: FleetConfig = field(default_factory=FleetConfig)
    round: RoundConfig = field(default_factory=RoundConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    bundle: BundleConfig = field(default_factory=BundleConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    web: WebConfig = field(default_factory=WebConfig)
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)
    teach_newcomers: bool = False  # ask each device once for every center's loss on its held-out samples (PROTOCOL 12)
    exit_when_done: bool = False
    keep_rounds: int = 10  # of each run, with their updates and models; 0 keeps all
    signing_folder: Path | None = None  # the folder of signing.key; `folder` when absent
    release: Path | None = None  # a newer client for boards, made by `fedcenters-edge release`
    loggers: str = ""  # experiment trackers, as "tensorboard,mlflow" (experiment_trackers.py)

    def __post_init__(self) -> None:
        try:
            check_federation(self.federation)
        except Malformed as wrong:
            raise ConfigError(wrong.words, hint="federation: 1 to 32 of a-z, 0-9 and '-'") from wrong
        for key, value in (("teach-newcomers", self.teach_newcomers), ("exit-when-done", self.exit_when_done)):
            check_kind(key, value, "bool")
        for key, number in (("seed", self.seed), ("keep-rounds", self.keep_rounds)):
            check_kind(key, number, "int")
        if self.keep_rounds < 0 or self.keep_rounds == 1:
            hint = "2 or more, so that a damaged state can be played again; 0 keeps all"
            raise ConfigError(f"keep-rounds is {self.keep_rounds!r}", hint=hint)
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed}", hint="seed is 0 to 2147483647")
        names = [run.name for run in self.runs]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"runs are named {names}", hint="at least one [[runs]], each with its own name")
        check_some_of("bundle-run", (self.served_run,), names)

    @property
    def compiled_engines(self) -> tuple[str, ...]:
        """The engines of the model, and pt2 where the bundle's files are made from it."""
        return tuple(dict.fromkeys((*self.model.engines, *(("pt2",) if self.bundle.formats else ()))))

    @property
    def served_run(self) -> str:
        return self.bundle.run or self.runs[0].name

    @property
    def signing_key_folder(self) -> Path:
        """The folder of the signing key; the first start creates the key."""
        return self.signing_folder or self.folder

    def fingerprint(self) -> dict[str, Any]:
        """The settings that decide the results; a folder with stored rounds continues only with equal ones."""
        plan = self.round
        return {
            "federation": self.federation,
            "model": {
                "name": self.model.name,
                "batch-size": self.model.batch_size,
                "engines": list(self.model.engines),
            },
            "seed": self.seed,
            "codec": self.update.codec,
            "runs": [{"name": r.name, "method": r.method, "rounds": r.rounds, **r.settings} for r in self.runs],
            # A replay needs the same exchanges. Folders that are older than these keys do not contain them.
            **({} if plan.evaluate_every == 1 else {"evaluate-every": plan.evaluate_every}),
            **({} if plan.fraction_evaluate == 1 else {"fraction-evaluate": plan.fraction_evaluate}),
            **({} if plan.over_select == 1 else {"over-select": plan.over_select}),
            **({} if plan.asynchronous is None else {"asynchronous": asdict(plan.asynchronous)}),
            **({"teach-newcomers": True} if self.teach_newcomers else {}),
        }

    def to_toml(self) -> dict[str, Any]:
        """The configuration with its defaults, in the file's keys; `read_config` reads it."""
        out = {}
        for key, (section, name) in _KEYS.items():
            value = getattr(getattr(self, section) if section else self, name)
            if value not in (None, ""):
                out[key] = _plain(value)
        decided = self.fingerprint()
        runs = [{"num-rounds": run.pop("rounds"), **run} for run in decided["runs"]]
        return out | {"model": decided["model"], "runs": runs}


_SECTIONS: Mapping[str, type[Any]] = {
    f.name: cast("type[Any]", f.default_factory) for f in fields(CoordinatorConfig) if f.default_factory is not MISSING
}


def _file_fields() -> Iterator[tuple[str, Field[Any]]]:
    """Each field that is a key of the file, and its section; section "" is the configuration itself."""
    for f in fields(CoordinatorConfig):
        if f.name in _SECTIONS:
            yield from ((f.name, inner) for inner in fields(_SECTIONS[f.name]))
        elif f.name not in _TABLES:
            yield "", f


def _key(section: str, name: str) -> str:
    return _OTHER_KEYS.get((section, name), name.replace("_", "-"))


def _of_type(*types: str) -> frozenset[str]:
    return frozenset(_key(section, f.name) for section, f in _file_fields() if f.type in types)


_KEYS: Mapping[str, tuple[str, str]] = {_key(section, f.name): (section, f.name) for section, f in _file_fields()}
TOP_LEVEL_KEYS = frozenset(_KEYS)  # of the file: after [model] or [[runs]] they would be keys of that table
_PATH_KEYS = _of_type("Path", "Path | None")
_TEXT_KEYS = _PATH_KEYS | _of_type("str")
_LIST_KEYS = _of_type("tuple[str, ...]")


def changed_settings(before: Any, now: Any, where: str = "") -> list[str]:  # noqa: ANN401 - JSON values
    """Each value that differs between two fingerprints, as "runs.fesem.clusters = 2, now 3"."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [f"{where} = {before}, now {now}"]
    parts = [
        changed_settings(before.get(key, "unset"), now.get(key, "unset"), f"{where}.{key}" if where else str(key))
        for key in dict.fromkeys([*before, *now])
    ]
    return [line for lines in parts for line in lines]


def read_config(path: Path, *, environ: Mapping[str, str] = os.environ, **overrides: str) -> CoordinatorConfig:
    """Read and check one file. `overrides` (command-line flags) win over the environment, which wins over the file."""
    hint, syntax_hint = "pass the path of a TOML file", "docs/settings.md has the keys, README.md an example"
    raw = read_toml(path, hint=hint, syntax_hint=syntax_hint)
    return config_from_table(raw | overrides_from_environment(environ) | overrides, base=path.resolve().parent)


def overrides_from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """FEDCENTERS_DEADLINE_S=5 -> {"deadline-s": 5}. A value that is no TOML is text. Lists stay in the file.

    So is FEDCENTERS_DASHBOARD=8080, because the key is of texts.
    """
    out: dict[str, Any] = {}
    names = {variable_of(key): key for key in _KEYS}
    warn_of_mistyped(environ, names)
    for name, key in names.items():
        text = environ.get(name)
        if text is None:
            continue
        try:
            value = parse_toml(f"v = {text}")["v"]
        except ValueError:
            value = text
        out[key] = text if key in _TEXT_KEYS and not isinstance(value, str) else value
    return out


def config_from_table(raw: Mapping[str, Any], *, base: Path) -> CoordinatorConfig:
    """The checked configuration of a parsed file; relative paths start at `base`."""
    table = dict(raw)
    _check_known(table, [*_KEYS, *_TABLES], "")
    for needed in ("federation", "broker", "folder", "model", "runs"):
        if needed not in table:
            raise ConfigError(
                f"{needed!r} is missing", hint="federation, broker, folder, [model] and [[runs]] are needed"
            )
    for key in sorted(_TEXT_KEYS & table.keys()):
        _typed(key, table[key], str)
    for key in _PATH_KEYS & table.keys():
        if not table[key]:
            raise ConfigError(f"{key} is empty", hint="write a path, or leave it out")
        table[key] = base / table[key]
    for key in sorted(_LIST_KEYS & table.keys()):
        table[key] = tuple(_typed(key, table[key], list))
    model = _typed("model", table.pop("model"), dict)
    _check_known(model, [_key("model", f.name) for f in fields(ModelConfig)], "model.")
    if "name" not in model:
        raise ConfigError("'name' of [model] is missing", hint="`fedcenters-emulator list` has the models' names")
    _typed("model.name", model["name"], str)
    model = {key.replace("-", "_"): value for key, value in model.items()}
    if "engines" in model:
        model["engines"] = tuple(_typed("model.engines", model["engines"], list))
    runs = _typed("runs", table.pop("runs"), list)
    try:
        return config_from_keys(table, model=ModelConfig(**model), runs=_runs(runs))
    except TypeError as wrong:
        raise ConfigError(
            f"a value has the wrong type: {wrong}", hint="compare with the example in README.md"
        ) from wrong


def config_from_keys(table: Mapping[str, Any], *, model: ModelConfig, runs: tuple[RunConfig, ...]) -> CoordinatorConfig:
    """The configuration whose sections hold the values of the flat keys of `table`."""
    fields: dict[str, dict[str, Any]] = {section: {} for section in ("", *_SECTIONS)}
    for key, value in table.items():
        section, name = _KEYS[key]
        fields[section][name] = value
    sections = {section: make(**fields[section]) for section, make in _SECTIONS.items()}
    return CoordinatorConfig(model=model, runs=runs, **fields[""], **sections)


def _runs(rows: list[Any]) -> tuple[RunConfig, ...]:
    """Each [[runs]] table: `method`, `num-rounds`, `name`; the rest are the method's settings.

    Without a name the run has the method's; that of a class, as "angles:Angles", in lower case: "angles".
    """
    out = []
    for row in rows:
        settings = dict(_typed("runs", row, dict))
        if "method" not in settings or "num-rounds" not in settings:
            hint = 'method = "fesem" and num-rounds = 5'
            raise ConfigError("a [[runs]] table needs method and num-rounds", hint=hint)
        method = _typed("method", settings.pop("method"), str)
        rounds = _typed("num-rounds", settings.pop("num-rounds"), int)
        named = re.sub("[^a-z0-9-]", "-", method.rpartition(":")[2].lower())
        name = _typed("name", settings.pop("name", named), str)
        if not name or len(name) > MAX_RUN_NAME or set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-"):
            hint = f"name = with a-z, 0-9 and '-' alone, at most {MAX_RUN_NAME} characters"
            raise ConfigError(f"run name {name!r} names a folder too", hint=hint)
        out.append(RunConfig(method=method, rounds=rounds, name=name, settings=settings))
    return tuple(out)


def _check_known(raw: Mapping[str, Any], valid: Collection[str], where: str) -> None:
    """Refuse an unknown key with the nearest valid one."""
    for key in raw:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"valid keys: {', '.join(sorted(valid))}"
            hint = top_level_hint(key) if key in TOP_LEVEL_KEYS else hint
            if not where and _is_of_a_run(key):
                hint = f"{key} belongs below [[runs]], to the run that it is for"
            raise ConfigError(f"unknown key {where}{key}", hint=hint)


def _is_of_a_run(key: str) -> bool:
    return key in RUN_KEYS or any(key in setting_types(method) for method in METHODS.values())


def top_level_hint(key: str) -> str:
    """Where a key of the file belongs that stands in a table."""
    return f"{key} belongs at the top of the file, above [model]"


def _typed(key: str, value: Any, kind: type) -> Any:  # noqa: ANN401 - TOML values
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        hint = f"{key} must be {_WORDS[kind].format(key=key)}"
        raise ConfigError(f"{key} is {value!r}", hint="write [[runs]] for each run" if key == "runs" else hint)
    return value


def _plain(value: Any) -> Any:  # noqa: ANN401 - TOML values
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
