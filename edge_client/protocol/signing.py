"""Signatures: Ed25519 over a short text that names a blob, its kind and the federation, or a coordinator's record.

A record is signed as a blob of the kind "coord" whose hash is its boot and whose size is its epoch.

Keys are raw bytes: 32 private, 32 public. The public keys that a device trusts come with its configuration, never over
MQTT. Making a key needs randomness, so that is the caller's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.messages import parse_json
from edge_client.protocol.topics import check_federation

BUNDLE_KIND = "bundle"  # the kind under which a bundle's manifest is signed
RECORD_KIND = "coord"  # the kind under which a coordinator's record is signed
MAX_EPOCH_JUMP = 1_000_000  # starts of a coordinator that a device or a restored backup may have missed
MAX_SIGNATURE_BYTES = 1024


def signed_text(federation: str, kind: str, sha256: str, size: int) -> bytes:
    """What is signed."""
    return f"fedcenters/v1/blob\n{check_federation(federation)}\n{kind}\n{sha256}\n{size}\n".encode("ascii")


def public_key(private: bytes) -> bytes:
    """The public key [32 bytes] of a private one [32 bytes]."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def key_id(public: bytes) -> str:
    """The 16 hex digits that name a public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def sign(private: bytes, federation: str, kind: str, sha256: str, size: int) -> str:
    """Signature in hex."""
    return Ed25519PrivateKey.from_private_bytes(private).sign(signed_text(federation, kind, sha256, size)).hex()


def verify(public: bytes, federation: str, kind: str, sha256: str, size: int, sig: str) -> None:
    """Return if `sig` is right; Malformed("bad_signature") otherwise."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public)
        key.verify(bytes.fromhex(sig), signed_text(federation, kind, sha256, size))
    except (InvalidSignature, ValueError, UnicodeError) as wrong:
        raise Malformed("bad_signature", f"{kind} {sha256:.16} was not signed by key {key_id(public)}") from wrong


def sign_manifest(manifest: Manifest, private: bytes, federation: str) -> Manifest:
    """The same manifest with `key` and `sig`."""
    sig = sign(private, federation, manifest.kind, manifest.sha256, manifest.size)
    return replace(manifest, key=key_id(public_key(private)), sig=sig)


def verify_manifest(manifest: Manifest, trusted: Sequence[bytes], federation: str) -> None:
    """Return if one of the `trusted` public keys signed this manifest for this federation; Malformed otherwise."""
    _verify_signature(manifest.to_json(), trusted, federation, manifest.kind, manifest.sha256, manifest.size)


def verify_release(offer: Mapping[str, Any], trusted: Sequence[bytes], federation: str) -> None:
    """Return if one of the `trusted` keys signed the release that a `coord` offers; Malformed otherwise."""
    file = Manifest.from_json(offer["file"])
    _verify_signature(offer, trusted, federation, file.kind, file.sha256, file.size)


def sign_record(boot: str, epoch: int, private: bytes, federation: str) -> dict[str, str]:
    """The fields `key` and `sig` of a `coord` with this boot and epoch."""
    return {"key": key_id(public_key(private)), "sig": sign(private, federation, RECORD_KIND, boot, epoch)}


def verify_record(record: Mapping[str, Any], trusted: Sequence[bytes], federation: str, *, known: int) -> int:
    """The epoch of a `coord` that one of the `trusted` keys signed; `known` is the highest epoch so far.

    Raises Malformed("bad_signature"), and Malformed("bad_field") for an epoch more than MAX_EPOCH_JUMP above `known`.
    """
    if "sig" not in record:  # until 23 November 2026
        raise Malformed("bad_signature", "the record is not signed; update the coordinator")
    epoch = int(record["epoch"])
    _verify_signature(record, trusted, federation, RECORD_KIND, record["boot"], epoch)
    if epoch > known + MAX_EPOCH_JUMP:
        raise Malformed("bad_field", f"epoch {epoch} is more than {MAX_EPOCH_JUMP} above {known}")
    return epoch


def _verify_signature(
    signed: Mapping[str, Any], trusted: Sequence[bytes], federation: str, kind: str, sha256: str, size: int
) -> None:
    """Return if the fields `key` and `sig` are one of the `trusted` keys and its signature of the other arguments."""
    for public in trusted:
        if "sig" in signed and signed.get("key") == key_id(public):
            verify(public, federation, kind, sha256, size, signed["sig"])
            return
    raise Malformed("bad_signature", f"{kind} {sha256:.16} is signed by no key that is trusted here")


def verify_bundle(manifest: bytes, signature: bytes, trusted: Sequence[bytes]) -> str:
    """A bundle's manifest.json and manifest.sig -> the federation that signed it.

    Raises Malformed when none of the `trusted` public keys [32 bytes] did.
    """
    said = parse_json(signature.strip(), MAX_SIGNATURE_BYTES)
    if not isinstance(said, dict) or not all(isinstance(said.get(name), str) for name in ("federation", "key", "sig")):
        raise Malformed("bad_signature", "manifest.sig is not {federation, key, sig}")
    for public in trusted:
        if said["key"] == key_id(public):
            digest = hashlib.sha256(manifest).hexdigest()
            verify(public, said["federation"], BUNDLE_KIND, digest, len(manifest), said["sig"])
            return str(said["federation"])
    raise Malformed("bad_signature", f"the manifest is signed by key {said['key']:.16}, which is not trusted here")
