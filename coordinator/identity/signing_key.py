"""The coordinator's secrets: the key that signs what devices run, and the certificate that it connects with.

`signing.key` holds the raw Ed25519 private key in hex (mode 0600), `signing.pub` the raw public key in hex; devices pin
the public key when they join. A key change has two steps: `announce_next_key` creates `signing-next.key`, whose public
key the join files then pin too; `switch_key` makes it the key that signs. Certificates come from
certificate_authority.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from coordinator.config import CoordinatorConfig
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from edge_client.errors import ConfigError
from edge_client.protocol import signing
from edge_client.protocol.blocks import Manifest
from edge_client.transport.blobs import write_atomically
from edge_client.transport.keys import write_private_file
from edge_client.transport.tls import Credentials, check_subject

KEY_BYTES = 32
CURRENT_KEY_FILE, NEXT_KEY_FILE, PUBLIC_KEY_FILE = "signing.key", "signing-next.key", "signing.pub"


@dataclass(frozen=True, kw_only=True)
class SigningKey:
    """An Ed25519 key pair; `repr` leaves out `private`."""

    private: bytes
    public: bytes

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.hex()})"

    def sign_manifest(self, manifest: Manifest, federation: str) -> Manifest:
        return signing.sign_manifest(manifest, self.private, federation)

    def sign_record(self, boot: str, epoch: int, federation: str) -> dict[str, str]:
        """The fields `key` and `sig` of a coordinator's record."""
        return signing.sign_record(boot, epoch, self.private, federation)


def open_signing_key(folder: Path) -> SigningKey:
    """The key in `folder`, created there if there is none. Raises ConfigError for a file that others can read.

    Raises it too where only its public part is left, which devices pin, and where none can be made: a folder that was
    to be mounted is missing.
    """
    with _one_maker(folder):
        if not (folder / CURRENT_KEY_FILE).exists():
            if (folder / PUBLIC_KEY_FILE).exists():
                raise lost_key(folder)
            try:
                _create(folder / CURRENT_KEY_FILE)
            except OSError as wrong:
                if wrong.errno not in (errno.EROFS, errno.EACCES):
                    raise
                told = f"there is no {folder / CURRENT_KEY_FILE}, and none can be made there: {wrong.strerror}"
                hint = "mount the folder of the keys there (a container: one more -v), or correct `signing-folder`"
                raise ConfigError(told, hint=hint) from wrong
        key = _read(folder / CURRENT_KEY_FILE)
        _write_if_changed(folder / PUBLIC_KEY_FILE, key.public.hex() + "\n")
    return key


@contextmanager
def _one_maker(folder: Path) -> Iterator[None]:
    """`serve` and a fleet that begin at once make one key. Not where the disk knows no locks.

    A folder that has both files is not locked: each user who may read it could hold the lock.
    """
    with ExitStack() as stack:
        if not all((folder / name).exists() for name in (CURRENT_KEY_FILE, PUBLIC_KEY_FILE)):
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def read_signing_key(folder: Path) -> SigningKey:
    """The key in `folder`; writes nothing. Raises ConfigError where it cannot be read, or where others can read it."""
    try:
        return _read(folder / CURRENT_KEY_FILE)
    except OSError as wrong:
        hint = "run this where the key is, as its owner"
        raise ConfigError(f"{folder / CURRENT_KEY_FILE} cannot be read: {wrong.strerror}", hint=hint) from wrong


def lost_key(folder: Path) -> ConfigError:
    """What to say where the key is gone that devices pin."""
    path = folder / CURRENT_KEY_FILE
    hint = f"bring it back, or restore it from a backup. If it is lost: `openssl rand -hex 32 > {path}` and "
    hint += f"`chmod 600 {path}` make another one, which each device must be given (docs/security.md)"
    return ConfigError(f"there is no {path}, and the devices trust that key alone", hint=hint)


def public_key(folder: Path) -> str:
    """The public key [hex] of a folder whose private one may be elsewhere. Raises ConfigError for a damaged file."""
    if (folder / CURRENT_KEY_FILE).exists():
        return open_signing_key(folder).public.hex()
    path = folder / PUBLIC_KEY_FILE
    try:
        public = bytes.fromhex(path.read_text(encoding="ascii"))
    except ValueError:
        public = b""
    if len(public) != KEY_BYTES:
        raise ConfigError(f"{path} holds no public key", hint="restore it from a backup")
    return public.hex()


def trusted_keys(folder: Path) -> list[str]:
    """The public keys [hex] that devices must trust: the one in use, then the announced one if there is one."""
    keys = [public_key(folder) if (folder / PUBLIC_KEY_FILE).exists() else open_signing_key(folder).public.hex()]
    if (folder / NEXT_KEY_FILE).exists():
        keys.append(_read(folder / NEXT_KEY_FILE).public.hex())
    return keys


def announce_next_key(folder: Path) -> None:
    """Create the next key, unless there is one; devices must pin it before it signs anything."""
    if not (folder / NEXT_KEY_FILE).exists():
        _create(folder / NEXT_KEY_FILE)


def switch_key(folder: Path) -> None:
    """Make the announced key the current one and keep the old one as a file. Raises ConfigError without one."""
    if not (folder / NEXT_KEY_FILE).exists():
        raise ConfigError(
            "no next signing key is announced",
            hint="`provision --next-signing-key` first, and bring the new join files to the devices",
        )
    _read(folder / NEXT_KEY_FILE)
    old = signing.key_id(open_signing_key(folder).public)
    write_private_file(folder / f"signing-{old}.old", (folder / CURRENT_KEY_FILE).read_bytes())
    (folder / NEXT_KEY_FILE).replace(folder / CURRENT_KEY_FILE)
    open_signing_key(folder)


def coordinator_credentials(config: CoordinatorConfig) -> Credentials:
    """The coordinator's credentials at the broker. Raises ConfigError for no file, or a certificate of another name."""
    for path in (config.tls.ca, config.tls.certificate, config.tls.key):
        if path is not None and not path.is_file():
            hint = "`fedcenters-coordinator provision FOLDER` makes the certificates; docs/security.md"
            raise ConfigError(f"there is no {path}", hint=hint)
    if config.tls.certificate is not None:
        check_subject(config.tls.certificate, name=COORDINATOR_CLIENT_ID, federation=config.federation)
    return Credentials(ca=config.tls.ca, certificate=config.tls.certificate, key=config.tls.key)


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
    write_private_file(path, private.hex().encode("ascii") + b"\n")


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_bytes() != text.encode("utf-8"):
        write_atomically(path, text.encode("utf-8"))
