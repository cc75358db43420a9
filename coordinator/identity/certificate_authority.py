"""The federation's certificate authority: who may speak to the broker, until when, and who may no longer.

A folder holds `ca.key` (0600, never leaves it), `ca.crt`, `crl.pem`, and in `issued/` every certificate ever made, as
{name}/{serial}.crt. There is no other record: a name is revoked when the list says so. Each federation has an authority
of its own, and each certificate names the federation (O) and its holder (CN). Time comes in. Knows no broker.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.topics import check_cid, check_federation
from edge_client.transport.blobs import write_atomically
from edge_client.transport.keys import is_p256, open_private_key, subject_name
from edge_client.transport.tls import read_certificate

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
CLOCK_SKEW = dt.timedelta(hours=1)  # a device whose clock is late still accepts a fresh certificate
MAX_REQUEST_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class CertificateAuthority:
    """An open authority; its key stays out of every printout."""

    folder: Path
    federation: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def crl_path(self) -> Path:
        """The certificate revocation list, which the broker reads."""
        return self.folder / "crl.pem"

    def issue_client(self, public: ec.EllipticCurvePublicKey, name: str, now: dt.datetime) -> x509.Certificate:
        """A certificate with which a device, or a coordinator, comes to the broker."""
        return self._issue(public, name, now, ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def issue_server(
        self, public: ec.EllipticCurvePublicKey, name: str, hosts: Sequence[str], now: dt.datetime
    ) -> x509.Certificate:
        """A certificate for a listener that is dialled by one of `hosts`; it does not serve to come as a client."""
        return self._issue(public, name, now, ExtendedKeyUsageOID.SERVER_AUTH, hosts)

    def issued_names(self) -> list[str]:
        """Everybody who ever had a certificate, sorted."""
        return sorted(path.name for path in (self.folder / "issued").glob("*"))

    def certificates_of(self, name: str) -> list[x509.Certificate]:
        """The certificates of a name, the newest last; revoked and expired ones too."""
        files = (self.folder / "issued" / name).glob("*.crt")
        return sorted((read_certificate(path) for path in files), key=lambda c: c.not_valid_before_utc)

    def revoked(self) -> frozenset[int]:
        """The serial numbers on the list."""
        return frozenset(entry.serial_number for entry in self._entries())

    def is_revoked(self, name: str) -> bool:
        """Whether a name may not come back."""
        serials = self.revoked()
        return bool(serials) and any(c.serial_number in serials for c in self.certificates_of(name))

    def revoked_names(self) -> list[str]:
        """Who may not come back, sorted."""
        return [name for name in self.issued_names() if self.is_revoked(name)] if self.revoked() else []

    def revoke(self, name: str, now: dt.datetime) -> bool:
        """List every certificate of a name; -> whether the list changed. Raises ConfigError for a stranger."""
        with _locked(self.folder):
            certificates = self.certificates_of(name) if name in self.issued_names() else []
            if not certificates:
                raise ConfigError(f"no certificate was made for {name!r}", hint="`provision --check` lists the names")
            fresh = [c for c in certificates if c.serial_number not in self.revoked()]
            if fresh:
                builder = x509.RevokedCertificateBuilder().revocation_date(now)
                added = [builder.serial_number(c.serial_number).build() for c in fresh]
                self._write_list([*self._entries(), *added], now)
            return bool(fresh)

    def _issue(
        self,
        public: ec.EllipticCurvePublicKey,
        name: str,
        now: dt.datetime,
        purpose: x509.ObjectIdentifier,
        hosts: Sequence[str],
    ) -> x509.Certificate:
        ends = min(now + dt.timedelta(days=CERTIFICATE_DAYS), self.certificate.not_valid_after_utc)
        builder = (
            _builder(subject_name(name, self.federation), self.certificate.subject, public, now, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(_issuer_id(self.key), critical=False)
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([subject_alternative_name(h) for h in hosts]), critical=False
            )
        made = builder.sign(self.key, hashes.SHA256())
        folder = self.folder / "issued" / name
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{made.serial_number:x}.crt", made.public_bytes(Encoding.PEM))
        return made

    def _entries(self) -> list[x509.RevokedCertificate]:
        return list(self._list())

    def _list(self) -> x509.CertificateRevocationList:
        try:
            return x509.load_pem_x509_crl(self.crl_path.read_bytes())
        except (OSError, ValueError) as wrong:
            raise ConfigError(f"{self.crl_path} is no revocation list", hint="restore it from a backup") from wrong

    def _write_list(self, entries: Sequence[x509.RevokedCertificate], now: dt.datetime) -> None:
        """Valid as long as the authority: a list that expires would lock the whole fleet out of the broker.

        Each list begins later than the one before, by a second at least: a broker that holds both goes by that.
        """
        begins = now - CLOCK_SKEW
        if self.crl_path.exists():
            begins = max(begins, self._list().last_update_utc + dt.timedelta(seconds=1))
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(begins)
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(len(entries)), critical=False)
            .add_extension(_issuer_id(self.key), critical=False)
        )
        for entry in entries:
            builder = builder.add_revoked_certificate(entry)
        write_atomically(self.crl_path, builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM))


def open_authority(folder: Path, federation: str, now: dt.datetime) -> CertificateAuthority:
    """The authority in `folder`, made there if there is none. Raises ConfigError for another federation's."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    path, key = folder / "ca.crt", open_private_key(folder / "ca.key")
    if not path.exists():
        write_atomically(path, _own_certificate(key, check_federation(federation), now).public_bytes(Encoding.PEM))
    certificate = read_certificate(path)
    named = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    if [part.value for part in named] != [federation] or certificate.public_key() != key.public_key():
        raise ConfigError(f"{folder} is not the authority of {federation}", hint="use one folder per federation")
    authority = CertificateAuthority(folder=folder, federation=federation, certificate=certificate, key=key)
    if not authority.crl_path.exists():
        authority._write_list([], now)  # noqa: SLF001 - the first list of a new authority
    return authority


def issue_time_s(certificate: x509.Certificate) -> float:
    """When a certificate of ours was made, in whole Unix seconds."""
    return (certificate.not_valid_before_utc + CLOCK_SKEW).timestamp()


def read_request(pem: bytes, federation: str) -> tuple[str, ec.EllipticCurvePublicKey]:
    """-> (device id, public key) of a signing request; what else it asks for is ignored.

    Raises Malformed: "too_big", or "bad_field" for anything that is not the request of a device of this federation.
    """
    if len(pem) > MAX_REQUEST_BYTES:
        raise Malformed("too_big", f"a signing request of {len(pem)} bytes, {MAX_REQUEST_BYTES} allowed")
    try:
        asked = x509.load_pem_x509_csr(pem)
        key, signed, name = asked.public_key(), asked.is_signature_valid, asked.subject
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as wrong:
        raise Malformed("bad_field", "this is no certificate signing request") from wrong
    if not is_p256(key) or not signed:
        raise Malformed("bad_field", "the request is not signed by a P-256 key")
    named = [part.value for part in name.get_attributes_for_oid(NameOID.COMMON_NAME)]
    cid = check_cid(named[0] if len(named) == 1 else None)
    if name != subject_name(cid, federation):
        raise Malformed("bad_field", f"the request is not for a device of {federation}")
    return cid, key  # type: ignore[return-value]  # just checked


def _own_certificate(key: ec.EllipticCurvePrivateKey, federation: str, now: dt.datetime) -> x509.Certificate:
    name = subject_name("authority", federation)
    return (
        _builder(name, name, key.public_key(), now, now + dt.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _builder(
    name: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: dt.datetime, ends: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _issuer_id(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def subject_alternative_name(name: str) -> x509.GeneralName:
    """A host name or an address as certificates write it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time reads and writes the list."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
