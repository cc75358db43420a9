"""The coordinator's own secrets: the key that signs what devices run, and the certificate that it dials with.

`signing.key` holds the raw Ed25519 private key in hex (mode 0600), `signing.pub` the raw public key in hex; devices pin
the public one when they join. A change of keys has two steps: `announce` makes `signing-next.key`, whose public half
the join files then pin too; `switch` signs with it from then on. Certificates are made in certificate_authority.py.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from coordinator.config import CoordinatorConfig
from coordinator.identity.broker_acl import COORDINATOR
from edge_client.errors import ConfigError
from edge_client.protocol import signing
from edge_client.protocol.blocks import Manifest
from edge_client.transport.blobs import write_atomically
from edge_client.transport.keys import write_private
from edge_client.transport.tls import Credentials, check_subject

KEY_BYTES = 32
CURRENT, NEXT = "signing.key", "signing-next.key"


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
    if not (folder / CURRENT).exists():
        _create(folder / CURRENT)
    key = _read(folder / CURRENT)
    _keep(folder / "signing.pub", key.public.hex() + "\n")
    return key


def pins(folder: Path) -> list[str]:
    """The public keys [hex] that devices shall trust: the one in use, and the announced one if there is one."""
    keys = [open_key(folder)]
    if (folder / NEXT).exists():
        keys.append(_read(folder / NEXT))
    return [key.public.hex() for key in keys]


def announce(folder: Path) -> None:
    """Make the next key, unless it is there: devices must pin it before anything is signed with it."""
    if not (folder / NEXT).exists():
        _create(folder / NEXT)


def switch(folder: Path) -> None:
    """Sign with the announced key from now on; the old one is kept aside. Raises ConfigError when none is announced."""
    if not (folder / NEXT).exists():
        raise ConfigError(
            "no next signing key is announced",
            hint="`provision --next-signing-key` first, and bring the new join files to the devices",
        )
    _read(folder / NEXT)
    old = signing.key_id(open_key(folder).public)
    write_private(folder / f"signing-{old}.old", (folder / CURRENT).read_bytes())
    (folder / NEXT).replace(folder / CURRENT)
    open_key(folder)


def credentials_of(config: CoordinatorConfig) -> Credentials:
    """What the coordinator dials with. Raises ConfigError for a certificate that is not a coordinator's."""
    if config.certificate is not None:
        check_subject(config.certificate, name=COORDINATOR, federation=config.federation)
    return Credentials(ca=config.ca, certificate=config.certificate, key=config.key)


def _read(path: Path) -> SigningKey:
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path} can be read by others", hint=f"chmod 600 {path}")
    try:
        private = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except ValueError as wrong:
        raise ConfigError(f"{path} holds no hex key", hint="restore it from a backup") from wrong
    if len(private) != KEY_BYTES:
        raise ConfigError(f"{path} holds {len(private)} bytes, a key has 32", hint="restore it from a backup")
    return SigningKey(private=private, public=signing.public_key(private))


def _create(path: Path) -> None:
    private = Ed25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    write_private(path, private.hex().encode("ascii") + b"\n")


def _keep(path: Path, text: str) -> None:
    """Write a file unless it says so already."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text.encode("utf-8"))
