"""The secret key of the noise of private centers (aggregation/privacy.py), which never leaves its file."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from coordinator.aggregation.privacy import KEY_BYTES
from edge_client.errors import ConfigError


def open_noise_key(folder: Path) -> bytes:
    """Read `folder`/noise.key; the first call creates it. Raises ConfigError for a file that other users can read."""
    path = folder / "noise.key"
    if not path.exists():
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path} can be read by others", hint=f"chmod 600 {path}")
    secret = path.read_bytes()
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"{path} holds {len(secret)} bytes, a key has 32", hint="restore it from a backup")
    return secret
