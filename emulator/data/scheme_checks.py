"""Checks of a partition's settings when it is made: each raises ConfigError with a hint that names what is taken."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from coordinator.strategies.common.setting_checks import check_kind, check_range
from edge_client.errors import ConfigError

MAX_ALPHA = 1e100  # of a Dirichlet distribution; the sum over a fleet must be finite


def check_kinds(scheme: Any) -> None:  # noqa: ANN401 - any dataclass of settings
    """Raise ConfigError unless each setting is of its declared type."""
    for f in fields(scheme):
        kind = f.type.__name__ if isinstance(f.type, type) else str(f.type)
        check_kind(_key(f.name), getattr(scheme, f.name), kind)


def check_counts(scheme: Any, **least: int) -> None:  # noqa: ANN401 - as check_kinds
    """Raise ConfigError for a setting, by its name, that is below the least that it may be."""
    for name, low in least.items():
        check_range(_key(name), getattr(scheme, name), low=low)


def check_alpha(name: str, value: float) -> None:
    """Raise ConfigError for what is no parameter of a Dirichlet distribution."""
    if not value > 0:
        raise ConfigError(f"{_key(name)} is {value}", hint="use a number above 0")
    if value > MAX_ALPHA:
        raise ConfigError(f"{_key(name)} is {value}", hint=f"use a number above 0, at most {MAX_ALPHA:g}")


def check_devices(devices: int) -> None:
    """Raise ConfigError for a fleet without devices, of a partition that does not know how many there are."""
    if devices < 1:
        raise ConfigError(f"{devices} devices", hint="use at least one")


def _key(name: str) -> str:
    return name.replace("_", "-")
