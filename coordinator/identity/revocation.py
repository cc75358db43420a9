"""Revocation: which names the broker must refuse, and the files that tell it.

    authority/crl.pem                       the certificate revocation list (RFC 5280), signed by the authority
    broker/crl.pem                          its copy: the broker refuses new connections of the listed certificates
    broker/mosquitto.acl, emqx.acl.conf     one line per revoked name, which denies every topic to an open connection

A name is revoked when the list holds one of its certificates; there is no other record. A phone has a password and no
certificate: web_passwords.py records its revocation, and the access lists here deny it too. Time is an argument.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.identity import broker_acl
from coordinator.identity.certificate_authority import CLOCK_SKEW, CertificateAuthority, issuer_id, renew_certificate
from edge_client.errors import ConfigError
from edge_client.transport.blobs import write_atomically

CRL_FILE = "crl.pem"


def revoke_certificates(authority: CertificateAuthority, name: str, now: dt.datetime) -> None:
    """Add every certificate of a name to the list. Raises ConfigError for an unknown name. Call it `locked`."""
    certificates = authority.certificates_of(name) if name in authority.issued_names() else []
    if not certificates:
        raise ConfigError(f"no certificate was made for {name!r}", hint="`provision --check --json` lists the names")
    fresh = [c for c in certificates if c.serial_number not in revoked_serials(authority)]
    if fresh:
        builder = x509.RevokedCertificateBuilder().revocation_date(now)
        added = [builder.serial_number(c.serial_number).build() for c in fresh]
        _write_list(authority, [*_read_list(authority), *added], now)


def is_revoked(authority: CertificateAuthority, name: str) -> bool:
    """Whether one of the name's certificates is on the list."""
    serials = revoked_serials(authority)
    return bool(serials) and any(c.serial_number in serials for c in authority.certificates_of(name))


def revoked_names(authority: CertificateAuthority) -> list[str]:
    """The names whose certificates are revoked, sorted."""
    names = authority.issued_names() if revoked_serials(authority) else []
    return [name for name in names if is_revoked(authority, name)]


def revoked_serials(authority: CertificateAuthority) -> frozenset[int]:
    """The serial numbers on the list."""
    return frozenset(entry.serial_number for entry in _read_list(authority))


def broker_files(authority: CertificateAuthority, revoked: Sequence[str]) -> dict[str, bytes]:
    """File name -> content of what the broker reads: the list, and the access lists that deny the `revoked` names."""
    return {
        "mosquitto.acl": broker_acl.mosquitto_acl(authority.federation, revoked).encode(),
        "emqx.acl.conf": broker_acl.emqx_acl(authority.federation, revoked).encode(),
        CRL_FILE: (authority.folder / CRL_FILE).read_bytes(),
    }


def create_list(authority: CertificateAuthority, now: dt.datetime) -> None:
    """Write the empty list of a new authority, unless there is a list. Raises ConfigError where it was lost."""
    path = authority.folder / CRL_FILE
    if not path.exists():
        if authority.issued_names():
            hint = "bring it back: the broker has a copy. With an empty one all revoked devices would be let in"
            raise ConfigError(f"there is no {path}, which says who was revoked", hint=hint)
        _write_list(authority, [], now)


def renew_authority(authority: CertificateAuthority, now: dt.datetime) -> CertificateAuthority:
    """The authority with a new certificate of its key, and the list with a new end: both ended together."""
    with locked(authority.folder):
        renewed = renew_certificate(authority, now)
        _write_list(renewed, list(_read_list(authority)), now)
    return renewed


def _read_list(authority: CertificateAuthority) -> x509.CertificateRevocationList:
    path = authority.folder / CRL_FILE
    try:
        return x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as wrong:
        raise ConfigError(f"{path} is no revocation list", hint="restore it from a backup") from wrong


def _write_list(authority: CertificateAuthority, entries: Sequence[x509.RevokedCertificate], now: dt.datetime) -> None:
    """Valid as long as the authority: a list that expires would lock the whole fleet out of the broker.

    Each list begins at least a second later than the one before, since a broker that holds both takes the later one.
    """
    begins = now - CLOCK_SKEW
    if (authority.folder / CRL_FILE).exists():
        begins = max(begins, _read_list(authority).last_update_utc + dt.timedelta(seconds=1))
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(begins)
        .next_update(authority.certificate.not_valid_after_utc)
        .add_extension(x509.CRLNumber(len(entries)), critical=False)
        .add_extension(issuer_id(authority.key), critical=False)
    )
    for entry in entries:
        builder = builder.add_revoked_certificate(entry)
    signed = builder.sign(authority.key, hashes.SHA256())
    write_atomically(authority.folder / CRL_FILE, signed.public_bytes(Encoding.PEM))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep an authority's folder: of revocations, enrolments and copies for the broker one at a time is under way."""
    # Read only: root may have made the file in the folder of the user who runs `enrol`.
    with os.fdopen(os.open(folder / "lock", os.O_RDONLY | os.O_CREAT, 0o644)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
