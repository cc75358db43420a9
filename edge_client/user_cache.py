"""The folder in which this user's programs keep what can be fetched or computed again."""

from __future__ import annotations

import os
from pathlib import Path

from edge_client.errors import ConfigError


def user_cache() -> Path:
    """`fedcenters` in XDG_CACHE_HOME, else in ~/.cache. Raises ConfigError for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path.home() / ".cache") / "fedcenters"
    except RuntimeError:  # as of a container's user whom no /etc/passwd names
        hint = "set HOME, or XDG_CACHE_HOME, to a folder that this user may write to"
        raise ConfigError("this user has no home folder", hint=hint) from None
