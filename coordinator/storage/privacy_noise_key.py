"""The secret key of the noise of private centers (aggregation/privacy.py), which never leaves its file."""

from __future__ import annotations

import secrets
from pathlib import Path

from coordinator.aggregation.privacy import KEY_BYTES
from edge_client.errors import ConfigError
from edge_client.transport.keys import write_private_file
from edge_client.transport.tls import check_private_file


def open_noise_key(folder: Path) -> bytes:
    """Read `folder`/noise.key; the first call creates it. Raises ConfigError for a file that other users can read."""
    path = folder / "noise.key"
    if not path.exists():
        write_private_file(path, secrets.token_bytes(KEY_BYTES))
    check_private_file(path)
    secret = path.read_bytes()
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"{path} holds {len(secret)} bytes, a key has 32", hint="restore it from a backup")
    return secret
