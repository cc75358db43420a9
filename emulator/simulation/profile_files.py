"""Kinds of devices from a TOML file: one [[profiles]] table each, in the units that a data sheet has.

    [[profiles]]
    name = "phone"
    share = 2             # twice as common as a kind with share = 1, which is also the default
    step-ms = 8           # to train on one batch
    evaluate-ms = 3       # to evaluate one batch
    down-mbit = 40        # megabits per second
    up-mbit = 12
    latency-ms = 80       # of each message
    availability = 0.6    # share of the time that it can be reached; 1
    cycle-s = 3600        # in each such span it is away once; an hour
    dropout = 0.05        # probability that a task is never answered; 0

Reads and checks; what the numbers mean for time is in device_profiles.py.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError
from emulator.simulation.device_profiles import Profile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MBIT = 125_000.0  # bytes per second of one megabit per second


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a table: the profile's field, how many of its units make one, and the numbers that it may be."""

    field: str
    unit: float = 1.0
    zero: bool = False  # whether it may be 0
    most: float = math.inf
    needed: bool = True


KEYS: Mapping[str, Key] = {
    "share": Key(field="share", needed=False),
    "step-ms": Key(field="step_s", unit=1e-3, zero=True),
    "evaluate-ms": Key(field="evaluate_s", unit=1e-3, zero=True),
    "down-mbit": Key(field="down_bytes_s", unit=MBIT),
    "up-mbit": Key(field="up_bytes_s", unit=MBIT),
    "latency-ms": Key(field="latency_s", unit=1e-3, zero=True),
    "availability": Key(field="availability", zero=True, most=1.0, needed=False),
    "cycle-s": Key(field="cycle_s", needed=False),
    "dropout": Key(field="dropout", zero=True, most=1.0, needed=False),
}


def read(path: Path) -> tuple[Profile, ...]:
    """The profiles of a file. Raises ConfigError with the key that is wrong and what to write instead."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as missing:
        raise ConfigError(f"cannot read {path}: {missing.strerror}", hint="pass the path of a TOML file") from missing
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise ConfigError(
            f"{path} is no TOML file: {wrong}", hint="emulator/simulation/profile_files.py has an example"
        ) from wrong
    return from_table(raw)


def from_table(raw: Mapping[str, Any]) -> tuple[Profile, ...]:
    """A parsed file -> its profiles."""
    _known(raw, ["profiles"], "")
    tables = raw.get("profiles")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("no profiles", hint="write at least one [[profiles]] table, each a kind of device")
    kinds = tuple(_profile(table, f"profiles[{i}]") for i, table in enumerate(tables))
    names = [kind.name for kind in kinds]
    if len(set(names)) < len(names):
        raise ConfigError(f"profiles are named {', '.join(names)}", hint="give each [[profiles]] its own name")
    return kinds


def _profile(table: Mapping[str, Any], where: str) -> Profile:
    _known(table, ["name", *KEYS], f"{where}.")
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}.name is {name!r}", hint='every kind of device has a name, as name = "phone"')
    for key, rule in KEYS.items():
        if rule.needed and key not in table:
            raise ConfigError(f"{where}.{key} is missing ({name})", hint=f"write {key} = ... with {_span(rule)}")
    values = {KEYS[key].field: _number(f"{where}.{key}", v, KEYS[key]) for key, v in table.items() if key != "name"}
    return Profile(name=name, **values)


def _number(key: str, value: Any, rule: Key) -> float:  # noqa: ANN401 - a TOML value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= rule.most or (value == 0 and not rule.zero):
        raise ConfigError(f"{key} is {value!r}", hint=f"use {_span(rule)}")
    return float(value * rule.unit)


def _span(rule: Key) -> str:
    least = "a number from 0" if rule.zero else "a number above 0"
    return least if rule.most == math.inf else f"{least} to {rule.most:g}"


def _known(table: Mapping[str, Any], keys: list[str], where: str) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"valid keys: {', '.join(keys)}"
            raise ConfigError(f"unknown key {where}{key}", hint=hint)
