"""TOML files, read with the parser of this Python's version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

parse_toml = tomllib.loads  # raises ValueError


def read_toml(path: Path, *, hint: str, syntax_hint: str = "") -> dict[str, Any]:
    """The table of a file. Raises ConfigError with `hint`, or with `syntax_hint` for a file that is no TOML."""
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"))
    except OSError as missing:
        raise ConfigError(f"cannot read {path}: {missing.strerror}", hint=hint) from missing
    except (ValueError, RecursionError) as wrong:
        raise ConfigError(f"{path} is no TOML file: {wrong}", hint=syntax_hint or hint) from wrong
