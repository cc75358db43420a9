"""manifest.sig: one line of JSON that signs a bundle's manifest with a federation's Ed25519 key.

    {"federation", "key", "sig"}     `sig` signs the text of edge_client/protocol/signing.py with the kind "bundle"

The manifest names every other file by its hash, so one signature covers all files. Keys are raw bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from edge_client.protocol import signing
from edge_client.protocol.messages import canonical_json


def make_signer(private: bytes, federation: str) -> Callable[[bytes], str]:
    """A function from manifest.json's bytes to the text of manifest.sig. `private`: 32 bytes."""

    def sign(manifest: bytes) -> str:
        sig = signing.sign(
            private, federation, signing.BUNDLE_KIND, hashlib.sha256(manifest).hexdigest(), len(manifest)
        )
        key = signing.key_id(signing.public_key(private))
        return canonical_json({"federation": federation, "key": key, "sig": sig}).decode() + "\n"

    return sign


def check_manifest_signature(manifest: bytes, signature: bytes, trusted: Sequence[bytes]) -> str:
    """The federation that signed, when one of the `trusted` public keys [32 bytes] did; raises Malformed otherwise."""
    return signing.verify_bundle(manifest, signature, trusted)
