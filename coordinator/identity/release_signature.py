"""The signature of a client release: FILE.sig beside FILE, by a key that need not be on the coordinator's machine.

FILE.sig is one JSON object {"federation", "key", "sig"}, as manifest.sig of a bundle, with the "sha256" of FILE: the
coordinator has no public key to check `sig` by, and boards do not report a release that they do not take.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from coordinator.identity.signing_key import SigningKey
from edge_client.errors import ConfigError, Malformed
from edge_client.protocol import messages, signing, validators
from edge_client.protocol.blocks import manifest_of
from edge_client.transport.blobs import write_atomically
from edge_client.update.self_update import MAX_BYTES, NOTE_FILE, unpack_release

PACK_HINT = "make it with `fedcenters-edge release FILE.tar`"
SIGN_HINT = "where the release key is: `fedcenters-coordinator provision keys --sign-release FILE.tar`"
SIGNATURE_SCHEMA = validators.record(
    validators.required(
        federation=validators.text(32),
        key=validators.matching("[0-9a-f]{16}"),
        sig=validators.matching("[0-9a-f]{128}"),
    )
    | validators.optional(sha256=validators.matching("[0-9a-f]{64}"))
)


def signature_file(release: Path) -> Path:
    """Where the signature of a release is."""
    return release.with_name(release.name + ".sig")


def read_release(path: Path) -> bytes:
    """The bytes of a release. Raises ConfigError for a file that is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MiB", hint=PACK_HINT)
        data = path.read_bytes()
        unpack_release(data)
    except OSError as missing:
        raise ConfigError(f"cannot read the release {path}: {missing.strerror}", hint=PACK_HINT) from missing
    except Malformed as wrong:
        raise ConfigError(f"{path}: {wrong.message}", hint=PACK_HINT) from wrong
    return data


def sign_release(path: Path, key: SigningKey, federation: str) -> Path:
    """Write FILE.sig; -> its path. Raises ConfigError for a file that is no release."""
    signed = key.sign_manifest(manifest_of(read_release(path), "release"), federation)
    file = signature_file(path)
    said = {"federation": federation, "key": signed.key, "sig": signed.sig, "sha256": signed.sha256}
    write_atomically(file, messages.canonical_json(said))
    return file


def read_signature(path: Path, federation: str) -> dict[str, str] | None:
    """The fields `key` and `sig` of FILE.sig, None without that file. Raises ConfigError for one that holds others."""
    file = signature_file(path)
    try:
        said = messages.parse_json(file.read_bytes(), signing.MAX_SIGNATURE_BYTES)
        signature = SIGNATURE_SCHEMA(said, "the signature")
    except FileNotFoundError:
        return None
    except (OSError, Malformed) as wrong:
        raise ConfigError(f"{file} holds no signature: {wrong}", hint=SIGN_HINT) from wrong
    if signature["federation"] != federation:
        raise ConfigError(f"{file} is for the federation {signature['federation']}", hint=SIGN_HINT)
    if signature.get("sha256") not in (None, hashlib.sha256(read_release(path)).hexdigest()):
        raise ConfigError(f"{file} is for another {path.name}: boards would not take it", hint=SIGN_HINT)
    return {"key": signature["key"], "sig": signature["sig"]}


def release_version(data: bytes) -> str:
    """The version of a release. Raises Malformed."""
    return str(json.loads(unpack_release(data)[NOTE_FILE])["version"])
