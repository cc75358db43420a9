"""Phones of a provisioned federation: each has a name and a password, in a link.

    devices/{cid}/link.txt         the link that the phone opens; its holder acts as this device until it is revoked
    devices/{cid}/link.svg         the same link as a QR code
    authority/web-revoked          the revoked names
    broker/mosquitto.passwd        PBKDF2-SHA512 hashes of the passwords, in Mosquitto's format

A browser accepts a client certificate only with its user's help, so a phone has a password instead: 32 random bytes,
which travel in TLS only. The access list limits a phone to its own topics, as it does other devices.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from coordinator.identity.join_links import phone_link, qr_svg
from edge_client.errors import ConfigError
from edge_client.transport.blobs import write_atomically
from edge_client.transport.keys import write_private_file

SECRET_BYTES = 32
SALT_BYTES = 12
HASH_ITERATIONS = 101  # Mosquitto's own number; a random password needs no slower hash


@dataclass
class WebDevices:
    """The phones of one provisioned folder."""

    folder: Path

    def names(self) -> list[str]:
        gone = set(self.revoked())
        return sorted({p.parent.name for p in (self.folder / "devices").glob("*/link.txt")} - gone)

    def revoked(self) -> list[str]:
        path = self.folder / "authority" / "web-revoked"
        try:
            return sorted(path.read_text(encoding="ascii").split()) if path.exists() else []
        except UnicodeDecodeError as wrong:
            raise ConfigError(f"{path} holds no names", hint="restore it from a backup") from wrong

    def add(self, cid: str, folder: Path, page: str) -> list[Path]:
        """Write a link into the device's folder, unless there is one; -> the files written."""
        path = folder / "link.txt"
        if path.exists():
            return []
        link = phone_link(page, device=cid, secret=secrets.token_urlsafe(SECRET_BYTES))
        write_private_file(folder / "link.svg", qr_svg(link).encode())
        write_private_file(path, link.encode("ascii") + b"\n")  # the last: without it both are made again
        return [path, folder / "link.svg"]

    def revoke(self, cid: str) -> bool:
        """Revoke a phone and delete its link; False for a name that is no phone's."""
        before = self.revoked()
        if cid not in (*self.names(), *before):
            return False
        gone = sorted({*before, cid})
        write_atomically(self.folder / "authority" / "web-revoked", "".join(f"{name}\n" for name in gone).encode())
        for name in ("link.txt", "link.svg"):
            (self.folder / "devices" / cid / name).unlink(missing_ok=True)
        return True

    def write_passwords(self) -> list[Path]:
        """Write Mosquitto's password file; -> the files written. A line with the right password keeps its salt."""
        path = self.folder / "broker" / "mosquitto.passwd"
        old = path.read_text(encoding="ascii", errors="replace").splitlines() if path.exists() else []
        kept = dict(line.split(":", 1) for line in old if ":" in line)
        lines = []
        for cid in self.names():
            secret = self._secret(cid)
            known = kept.get(cid, "")
            lines.append(
                f"{cid}:{known if verify_password(known, secret) else hash_password(secret, os.urandom(SALT_BYTES))}\n"
            )
        data = "".join(lines).encode("ascii")
        if path.exists() and path.read_bytes() == data:
            return []
        write_private_file(path, data)
        return [path]

    def _secret(self, cid: str) -> str:
        path = self.folder / "devices" / cid / "link.txt"
        try:
            link = path.read_text(encoding="ascii").strip()
            return parse_qs(urlsplit(link).fragment)["secret"][0]
        except (ValueError, KeyError) as wrong:
            hint = f"restore it from a backup, or remove it: --web-device {cid} makes another one"
            raise ConfigError(f"{path} holds no link", hint=hint) from wrong


def hash_password(secret: str, salt: bytes, iterations: int = HASH_ITERATIONS) -> str:
    """A password as Mosquitto 2 stores it: $7$iterations$salt$hash; salt and PBKDF2-HMAC-SHA512 hash in base64."""
    digest = hashlib.pbkdf2_hmac("sha512", secret.encode(), salt, iterations, dklen=64)
    return "$7$" + "$".join([str(iterations), *(base64.b64encode(part).decode("ascii") for part in (salt, digest))])


def verify_password(stored: str, secret: str) -> bool:
    """Whether a stored hash belongs to this password."""
    parts = stored.split("$")
    if len(parts) != 5 or parts[1] != "7":  # noqa: PLR2004 - "", kind, iterations, salt, digest
        return False
    try:
        return secrets.compare_digest(stored, hash_password(secret, base64.b64decode(parts[3]), int(parts[2])))
    except (ValueError, TypeError, OverflowError):  # a damaged line
        return False
