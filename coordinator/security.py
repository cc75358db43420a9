"""The federation's signing key: made on first start, readable by its owner only, never sent anywhere.

`signing.key` holds the raw Ed25519 private key in hex (mode 0600), `signing.pub` the raw public key in hex; devices pin
the public one when they join. Certificates and the broker's ACL will live here too.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from edge_client.errors import ConfigError
from edge_client.protocol import signing
from edge_client.protocol.blocks import Manifest

KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class SigningKey:
    """An Ed25519 pair; `private` stays out of every printout."""

    private: bytes
    public: bytes

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.hex()})"

    def signed(self, manifest: Manifest, federation: str) -> Manifest:
        """The manifest with this key's id and signature."""
        return signing.signed(manifest, self.private, federation)


def open_key(folder: Path) -> SigningKey:
    """The key in `folder`; made there if there is none. Refuses a key file that others can read."""
    path = folder / "signing.key"
    if not path.exists():
        _create(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path} can be read by others", hint=f"chmod 600 {path}")
    try:
        private = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except ValueError as wrong:
        raise ConfigError(f"{path} holds no hex key", hint="restore it from a backup") from wrong
    if len(private) != KEY_BYTES:
        raise ConfigError(f"{path} holds {len(private)} bytes, a key has 32", hint="restore it from a backup")
    key = SigningKey(private=private, public=signing.public_key(private))
    (folder / "signing.pub").write_text(key.public.hex() + "\n", encoding="ascii")
    return key


def _create(path: Path) -> None:
    """Write a new key beside its place, then rename: a power cut leaves no half key, and its mode is never wider."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    private = Ed25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(private.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
