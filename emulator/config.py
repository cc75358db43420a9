"""What a simulated run is told: one TOML file with flat kebab-case keys, the method's settings among them.

    method = "fesem"
    data-set = "digits"
    num-rounds = 10
    learning-rate = 0.05    # a setting of the method

`-c key=value` and the command's options win over the file. A run's own config.toml is such a file, so a run can be
repeated, changed or resumed from it. An unknown key is refused with the nearest valid one. Reads no data, runs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from coordinator.strategies.common.representation import annotate_representations
from coordinator.strategies.registry import Setting, make_method, method_settings
from edge_client.errors import ConfigError, UsageError
from emulator.help import HELP
from export.plugins import nearest_name_hint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_FILE = (
    "simulate.toml"  # what was asked, in the folder of a run over MQTT, whose config.toml is the coordinator's
)
GROUPS_FILE = "groups.json"  # the true group of each device, beside it
FIELDS = {"num-rounds": "rounds"}  # where the file's word is another one than the field's
FINGERPRINT_KEYS = (
    "method",
    "data-set",
    "model",
    "partition",
    "devices",
    "groups",
    "seed",
    "profiles",
    "codec",
    "hostile",
)
_KINDS = {"str": str, "int": int, "float": float, "Path": Path}


@dataclass(frozen=True, kw_only=True)
class SimulateArgs:
    """What `fedcenters-emulator simulate` was asked; `settings` are the method's, in kebab-case.

    An empty model or partition, and no number of devices, mean those that suit the data set (registry.py).
    """

    method: str = "fesem"
    data_set: str = "digits"
    model: str = ""
    partition: str = ""
    devices: int | None = None
    groups: int | None = None  # replaces the partition's, where it has groups
    rounds: int = 10
    seed: int = 0
    engine: str = "auto"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    data: Path | None = None
    workers: int = 1
    broker: str = ""  # over MQTT, with a broker of this kind or at this URL (simulate_over_mqtt.py)
    ray: str = ""  # host:port of a Ray cluster that does the work instead
    profiles: Path | None = None  # of the devices' kinds; those of device_profiles.py
    codec: str = "f32"  # of updates; i8 with error feedback, as on devices
    hostile: str = ""  # what a share of the devices does, as sign-flip:0.2 (attacks.py)
    evaluate_every: int = 1  # rounds; the last one tests everybody in any case
    fraction_evaluate: float = 1.0
    checkpoint_every: int = 10
    loggers: str = ""  # comma-separated names (coordinator/storage/experiment_trackers.py)
    out: Path = Path("runs")
    name: str = ""  # of the folder in `out`; made from the method and the seed when empty

    @property
    def folder(self) -> Path:
        """The run's own."""
        how = "mqtt" if self.broker else "simulate"
        return self.out / (self.name or f"{how}-{self.method.rpartition(':')[2].lower()}-{self.seed}")


def read_table(path: Path) -> dict[str, Any]:
    """The file's table, not checked yet."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as missing:
        hint = "write one with `fedcenters-emulator init`"
        raise ConfigError(f"cannot read {path}: {missing.strerror}", hint=hint) from missing
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as wrong:
        hint = "compare it with what `fedcenters-emulator init` writes"
        raise ConfigError(f"{path} is no TOML file: {wrong}", hint=hint) from wrong


def parse_pairs(texts: Sequence[str]) -> dict[str, str]:
    """["lam=0.1"] -> {"lam": "0.1"}; each value is read in its setting's own type later."""
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"-c {text!r} is no setting", hint="write it as -c local-steps=20")
        settings[key] = value
    return settings


def make_args(*tables: Mapping[str, Any]) -> SimulateArgs:
    """The question of these tables, the later ones winning. Raises UsageError, ConfigError for what is not valid."""
    table: dict[str, Any] = {}
    for one in tables:
        table |= {key: value for key, value in one.items() if value is not None}
    kinds = {f.name.replace("_", "-"): str(f.type) for f in fields(SimulateArgs) if f.name != "settings"}
    kinds = {key: kinds[FIELDS.get(key, key)] for key in HELP}
    method = make_method(str(table.get("method", SimulateArgs.method)))
    valid = method_settings(method)
    values, settings = {}, {}
    for key, value in table.items():
        if key in kinds:
            values[FIELDS.get(key, key).replace("-", "_")] = _value(key, value, kinds[key])
        elif key in valid:
            settings[key] = value
        else:
            raise ConfigError(f"unknown key {key!r}", hint=nearest_name_hint(key, {*kinds, *valid}))
    make_method(str(table.get("method", SimulateArgs.method)), **settings)
    return SimulateArgs(**values, settings=settings)


def resolved_table(args: SimulateArgs, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """A run's config.toml: every key that has a value, and every setting of the method, defaults included."""
    values = {key: getattr(args, FIELDS.get(key, key).replace("-", "_")) for key in HELP}
    plain = {key: str(v) if isinstance(v, Path) else v for key, v in values.items() if v is not None and v != ""}
    return plain | dict(settings)


def fingerprint(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `resolved_table` that decide the numbers of a run."""
    return {key: value for key, value in table.items() if key in FINGERPRINT_KEYS or key not in HELP}


def example_config(method: str) -> str:
    """A commented file with every key at its default, for `init`."""
    import tomli_w

    args = SimulateArgs(method=method)
    table = resolved_table(args, method_settings(make_method(method)))
    lines = ["# A simulated run: fedcenters-emulator simulate FILE. Keys that stand behind # have no value here."]
    for key, words in HELP.items():
        known = tomli_w.dumps({key: table[key]}).strip() if key in table else f'# {key} = ""'
        lines += ["", f"# {words}", known]
    lines += ["", f"# Settings of {method}; docs/methods.md says what they mean."]
    lines += [tomli_w.dumps({key: value}).strip() for key, value in table.items() if key not in HELP]
    return annotate_representations("\n".join(lines) + "\n")


def _value(key: str, value: Any, kind: str) -> Any:  # noqa: ANN401 - TOML values
    """In the key's own type; a text (of an option) is parsed, a number never becomes a text."""
    make_it = _KINDS[kind.removesuffix(" | None")]
    wrong = ConfigError(f"{key} is {value!r}", hint=f"{key} is {'a number' if make_it in (int, float) else 'a text'}")
    if isinstance(value, bool) or (make_it in (str, Path) and not isinstance(value, (str, Path))):
        raise wrong
    try:
        found = make_it(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    if not isinstance(value, (str, Path)) and found != value:
        raise wrong
    return found
