"""What is known of a setting, and the checks: each `check_*` raises ConfigError with a hint that names what is taken.

A setting of a method is written once: a field of its class, made by `setting`, which adds its meaning and its limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from edge_client.errors import ConfigError
from edge_client.printable import counted

Value = TypeVar("Value")
KINDS: dict[str, tuple[type, str]] = {  # type of a setting -> what it accepts
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "str": (str, "a word; docs/methods.md has those of each setting"),
    "bool": (bool, "true or false"),
}

# the words and limits of settings that several classes have
COHORT: Mapping[str, Any] = {
    "words": "share of the fleet that trains in a round, above 0 to 1",
    "low": 1e-9,
    "high": 1.0,
}
RESTARTS: Mapping[str, Any] = {"words": "starts of each k-means, of which the best counts", "low": 1}
WARM_UP: Mapping[str, Any] = {"words": "rounds before the first split or clustering", "low": 0}
WEIGHTS: Mapping[str, Any] = {
    "words": '"equal" devices, or by their number of "samples"',
    "choices": ("equal", "samples"),
}


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """What a setting means, with its unit, and which values it takes: a number from `low` to `high`, or `choices`."""

    words: str
    low: float | None = None
    high: float = math.inf
    choices: Sequence[str] = ()

    def check(self, name: str, value: Any) -> None:  # noqa: ANN401 - of the field's type
        """Raise ConfigError for a value that the setting does not take."""
        if self.choices:
            check_choice(name, value, self.choices)
        if self.low is not None:
            check_range(name, value, low=self.low, high=self.high)


def described(words: str, **takes: Any) -> dict[str, Any]:  # noqa: ANN401 - see `SettingRow`
    """The metadata of a field of a method."""
    return {"setting": SettingRow(words=words, **takes)}


def setting(default: Value, words: str, **takes: Any) -> Value:  # noqa: ANN401 - see `SettingRow`
    """A field of a method: its default, what it means, and which values it takes."""
    return field(default=default, metadata=described(words, **takes))


def setting_rows(kind: type[Any]) -> Iterator[tuple[str, SettingRow]]:
    """The settings of a class that are described, by its fields; a class may give another default and no more."""
    for name in (f.name for f in fields(kind)):
        made = (getattr(base, "__dataclass_fields__", {}).get(name) for base in kind.__mro__)
        rows = (f.metadata.get("setting") for f in made if f is not None)
        if row := next((row for row in rows if isinstance(row, SettingRow)), None):
            yield name, row


def plain_number(value: object) -> object:
    """Numbers of numpy as those of Python, which files of settings take, also in lists; anything else as it is."""
    if isinstance(value, (bool, int, float)) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, Integral):
        return int(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(map(plain_number, value))
    return float(value) if isinstance(value, Real) else value


def check_kind(name: str, value: object, kind: str) -> None:
    """Raise ConfigError unless `value` is of the `kind` "int", "float", "str" or "bool"; others have no check."""
    accepted, words = KINDS.get(kind, (object, ""))
    if words and (isinstance(value, bool) != (kind == "bool") or not isinstance(value, accepted)):
        raise ConfigError(f"{name} is {value!r}", hint=f"use {words}")


def check_range(name: str, value: float, *, low: float, high: float = math.inf) -> None:
    """Raise ConfigError unless `value` is a finite number in [low, high]; `name` is the setting as users type it."""
    finite = isinstance(value, Integral) or math.isfinite(value)  # a whole number may be too large for a float
    if not (finite and low <= value <= high):
        span = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ConfigError(f"{name} is {value}", hint=f"use a number {span}")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of the `allowed` words."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}", hint=f"use one of {', '.join(allowed)}")


def spare_centers(method: object, devices: int) -> str:
    """A warning where a method has more centers than there are devices; else an empty text."""
    clusters = getattr(method, "clusters", None)
    if not isinstance(clusters, int) or clusters <= devices:
        return ""
    return (
        f"clusters is {clusters}, with {counted(devices, 'device')}: "
        f"at least {counted(clusters - devices, 'center')} will have no device"
    )
