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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError
from edge_client.toml_files import read_toml
from emulator.simulation.device_profiles import DeviceProfile

BYTES_PER_MBIT = 125_000.0  # bytes per second of one megabit per second


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """One key of a table: the profile's field, how many of its units make one, and the numbers that it may be."""

    field: str
    unit: float = 1.0
    zero: bool = False  # whether it may be 0
    most: float = math.inf
    needed: bool = True


PROFILE_KEYS: Mapping[str, ProfileKey] = {
    "share": ProfileKey(field="share", needed=False),
    "step-ms": ProfileKey(field="step_s", unit=1e-3, zero=True),
    "evaluate-ms": ProfileKey(field="evaluate_s", unit=1e-3, zero=True),
    "down-mbit": ProfileKey(field="down_bytes_s", unit=BYTES_PER_MBIT),
    "up-mbit": ProfileKey(field="up_bytes_s", unit=BYTES_PER_MBIT),
    "latency-ms": ProfileKey(field="latency_s", unit=1e-3, zero=True),
    "availability": ProfileKey(field="availability", zero=True, most=1.0, needed=False),
    "cycle-s": ProfileKey(field="cycle_s", needed=False),
    "dropout": ProfileKey(field="dropout", zero=True, most=1.0, needed=False),
}


def read_profiles(path: Path) -> tuple[DeviceProfile, ...]:
    """The profiles of a file. Raises ConfigError with the key that is wrong and what to write instead."""
    hint, syntax_hint = "pass the path of a TOML file", "docs/emulate-a-fleet.md has an example"
    return profiles_from_table(read_toml(path, hint=hint, syntax_hint=syntax_hint))


def profiles_from_table(raw: Mapping[str, Any]) -> tuple[DeviceProfile, ...]:
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


def _profile(table: Mapping[str, Any], where: str) -> DeviceProfile:
    _known(table, ["name", *PROFILE_KEYS], f"{where}.")
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}.name is {name!r}", hint='every kind of device has a name, as name = "phone"')
    for key, rule in PROFILE_KEYS.items():
        if rule.needed and key not in table:
            raise ConfigError(f"{where}.{key} is missing ({name})", hint=f"write {key} = ... with {_span(rule)}")
    values = {
        PROFILE_KEYS[key].field: _number(f"{where}.{key}", v, PROFILE_KEYS[key])
        for key, v in table.items()
        if key != "name"
    }
    return DeviceProfile(name=name, **values)


def _number(key: str, value: Any, rule: ProfileKey) -> float:  # noqa: ANN401 - a TOML value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= rule.most or (value == 0 and not rule.zero):
        raise ConfigError(f"{key} is {value!r}", hint=f"use {_span(rule)}")
    return float(value * rule.unit)


def _span(rule: ProfileKey) -> str:
    least = "a number from 0" if rule.zero else "a number above 0"
    return least if rule.most == math.inf else f"{least} to {rule.most:g}"


def _known(table: Mapping[str, Any], keys: list[str], where: str) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"valid keys: {', '.join(keys)}"
            raise ConfigError(f"unknown key {where}{key}", hint=hint)
