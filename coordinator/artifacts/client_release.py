"""The client release that devices are offered: a file of `fedcenters-edge release`, signed and stored as a blob.

Boards take it by the signature of the release key, which is in a file beside it (release_signature.py). The signature
of the coordinator is for boards whose join file is of before that key.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from coordinator.identity.release_signature import (
    SIGN_HINT,
    read_release,
    read_signature,
    release_version,
    signature_file,
)
from coordinator.identity.signing_key import SigningKey
from edge_client.protocol.blocks import manifest_of
from edge_client.transport.blobs import BlobFolder

log = logging.getLogger(__name__)


def offer_release(path: Path, *, blobs: BlobFolder, key: SigningKey, federation: str, block: int) -> dict[str, Any]:
    """Store a release; -> its version, its signed manifest and its signature, for the record. Raises ConfigError."""
    data, signature = read_release(path), read_signature(path, federation)
    if signature is None:
        missing = signature_file(path)
        log.warning("boards that pin a release key will not take %s: there is no %s; %s", path, missing, SIGN_HINT)
    blobs.put(data)
    file = key.sign_manifest(manifest_of(data, "release", block=block), federation)
    return {"version": release_version(data), "file": file, **(signature or {})}
