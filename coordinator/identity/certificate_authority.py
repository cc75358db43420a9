"""The federation's certificate authority: issues the certificates of devices, coordinators and servers.

A folder holds `ca.key` (mode 0600, never copied), `ca.crt`, `crl.pem` (revocation.py), and in `issued/` every
certificate ever issued, as {name}/{serial}.crt. Each federation has an authority of its own, and each certificate names
the federation (O) and its holder (CN). Time is an argument.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
COPIES = ("broker", "coordinator", "enrolment")  # folders beside the authority's that have its certificate
CLOCK_SKEW = dt.timedelta(hours=1)  # a device whose clock is late still accepts a fresh certificate
MAX_REQUEST_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class CertificateAuthority:
    """An open authority; `repr` leaves out its key."""

    folder: Path
    federation: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    def issue_client(self, public: ec.EllipticCurvePublicKey, name: str, now: dt.datetime) -> x509.Certificate:
        """A certificate with which a device or a coordinator connects to the broker."""
        return self._issue(public, name, now, ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def issue_server(
        self, public: ec.EllipticCurvePublicKey, name: str, hosts: Sequence[str], now: dt.datetime
    ) -> x509.Certificate:
        """A certificate for a listener with the addresses `hosts`; a client cannot connect with it."""
        return self._issue(public, name, now, ExtendedKeyUsageOID.SERVER_AUTH, hosts)

    def issued_names(self) -> list[str]:
        """Every name that ever had a certificate, sorted."""
        return sorted({path.parent.name for path in (self.folder / "issued").glob("*/*.crt")})

    def current(self) -> CertificateAuthority:
        """The same with the certificate of its file, which `provision` may have renewed. Raises ConfigError."""
        return replace(self, certificate=read_certificate(self.folder / "ca.crt"))

    def certificates_of(self, name: str) -> list[x509.Certificate]:
        """The certificates of a name, the newest last, of one second the longest; revoked and expired ones too."""
        files = (self.folder / "issued" / name).glob("*.crt")
        return sorted(
            (read_certificate(path) for path in files), key=lambda c: (c.not_valid_before_utc, c.not_valid_after_utc)
        )

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
            .add_extension(issuer_id(self.key), critical=False)
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


def open_authority(folder: Path, federation: str, now: dt.datetime) -> CertificateAuthority:
    """The authority in `folder`, created there if there is none. Raises ConfigError for another federation's.

    Raises it too for one whose key is gone, and where the folders beside it have certificates of an authority already.
    """
    copies = [each / "ca.crt" for each in (folder, *(folder.parent / name for name in COPIES))]
    there = [path for path in copies if path.exists()]
    if there and not (folder / "ca.key").exists():
        hint = "bring it back, or restore it from a backup: another authority would lock all devices out"
        raise ConfigError(f"there is no {folder / 'ca.key'}, and {there[0]} is of that key", hint=hint)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    path, key = folder / "ca.crt", open_private_key(folder / "ca.key")
    if not path.exists():
        write_atomically(path, _own_certificate(key, check_federation(federation), now).public_bytes(Encoding.PEM))
    certificate = read_certificate(path)
    named = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    if [part.value for part in named] != [federation] or certificate.public_key() != key.public_key():
        raise ConfigError(f"{folder} is not the authority of {federation}", hint="use one folder per federation")
    return CertificateAuthority(folder=folder, federation=federation, certificate=certificate, key=key)


def renew_certificate(authority: CertificateAuthority, now: dt.datetime) -> CertificateAuthority:
    """The same authority with a new certificate of its key, which is written.

    Certificates that it issued before stay valid under the new one, and new ones under the old one until that ends.
    """
    certificate = _own_certificate(authority.key, authority.federation, now)
    write_atomically(authority.folder / "ca.crt", certificate.public_bytes(Encoding.PEM))
    return replace(authority, certificate=certificate)


def issue_time_s(certificate: x509.Certificate) -> float:
    """When this authority issued a certificate, in whole Unix seconds."""
    return (certificate.not_valid_before_utc + CLOCK_SKEW).timestamp()


def read_request(pem: bytes, federation: str) -> tuple[str, ec.EllipticCurvePublicKey]:
    """-> (device id, public key) of a signing request; its other fields are ignored.

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


def issuer_id(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    """The extension that names the authority by its key."""
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def subject_alternative_name(name: str) -> x509.GeneralName:
    """A host name or an IP address as a certificate names it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
