"""TOML files, read with the parser of this Python's version, and the environment's variables that replace keys."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

parse_toml = tomllib.loads  # raises ValueError
PREFIX = "FEDCENTERS_"
LIKE = 0.91  # of 1: names of other commands are less like each other
log = logging.getLogger(__name__)


def read_toml(path: Path, *, hint: str, syntax_hint: str = "") -> dict[str, Any]:
    """The table of a file. Raises ConfigError with `hint`, or with `syntax_hint` for a file that is no TOML."""
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"))
    except OSError as missing:
        raise ConfigError(f"cannot read {path}: {missing.strerror}", hint=hint) from missing
    except (ValueError, RecursionError) as wrong:
        raise ConfigError(f"{path} is no TOML file: {wrong}", hint=syntax_hint or hint) from wrong


def variable_of(key: str) -> str:
    """That of a key of a file: deadline-s -> FEDCENTERS_DEADLINE_S."""
    return PREFIX + key.upper().replace("-", "_")


def warn_of_mistyped(environment: Mapping[str, str], known: Collection[str]) -> None:
    """Tell, once, each variable that is not read and nearly has a `known` name."""
    for name in sorted(environment.keys() - set(known)):
        if name.startswith(PREFIX) and (near := difflib.get_close_matches(name, known, n=1, cutoff=LIKE)):
            _warn(name, near[0])


@cache
def _warn(name: str, near: str) -> None:
    log.warning("%s is not read: did you mean %s?", name, near)
