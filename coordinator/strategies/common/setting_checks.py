"""Checks of a method's settings; each `check_*` raises ConfigError with a hint that names the accepted values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from edge_client.errors import ConfigError

KINDS: dict[str, tuple[type, str]] = {  # type of a setting -> what it accepts
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "str": (str, "a word; docs/methods.md has those of each setting"),
    "bool": (bool, "true or false"),
}


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
    none = clusters - devices
    return (
        f"clusters is {clusters}, with {devices} device{'s' * (devices != 1)}:"
        f" at least {none} center{'s' * (none != 1)} will have no device"
    )
