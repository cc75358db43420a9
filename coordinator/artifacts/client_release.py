"""The client release that devices are offered: a file of `fedcenters-edge release`, signed and stored as a blob."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.identity.signing_key import SigningKey
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.blocks import manifest_of
from edge_client.transport.blobs import BlobFolder
from edge_client.update.self_update import MAX_BYTES, release_version


def offer_release(path: Path, *, blobs: BlobFolder, key: SigningKey, federation: str, block: int) -> dict[str, Any]:
    """Store a release; -> its version and its signed manifest, for the coordinator's record. Raises ConfigError."""
    hint = "make it with `fedcenters-edge release FILE.tar`"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MiB", hint=hint)
        data = path.read_bytes()
        version = release_version(data)
    except OSError as missing:
        raise ConfigError(f"cannot read the release {path}: {missing.strerror}", hint=hint) from missing
    except Malformed as wrong:
        raise ConfigError(f"{path}: {wrong.message}", hint=hint) from wrong
    blobs.put(data)
    return {"version": version, "file": key.sign_manifest(manifest_of(data, "release", block=block), federation)}
