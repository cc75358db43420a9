"""TLS contexts of both sides, and TLS errors in plain words.

TLS 1.2 or newer, the broker's name is checked, and its certificate must come from `ca` alone when that is given. Files
are read again at every connection, so a renewed certificate needs no restart.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509

EXPIRY_WARNING_DAYS = 30
EXPIRED, NOT_YET, NAME_MISMATCH, ADDRESS_MISMATCH = 10, 9, 62, 64  # X509_V_ERR_* of OpenSSL
UNKNOWN_ISSUER = (18, 19, 20, 21)  # self-signed, or no path to a trusted authority
CLOCK_HINT = "check this machine's clock, then ask for a new certificate: the operator's `provision --renew`"
# What a broker says when it turns a client away, as OpenSSL words the alert.
TLS_ALERTS = (
    ("certificate revoked", "the broker says that our certificate was revoked", "ask the federation's operator"),
    (
        "certificate expired",
        "the broker says that our certificate is expired",
        f"{CLOCK_HINT}; if ours is valid, the broker has an old ca.crt or crl.pem",
    ),
    ("certificate required", "the broker wants a client certificate", "set `certificate` and `key`"),
    ("unknown ca", "the broker does not know the authority of our certificate", "use this federation's certificate"),
    ("bad certificate", "the broker refuses our certificate", "use the certificate made for this federation"),
    ("unsupported certificate", "the broker refuses this kind of certificate", "use the device's own certificate"),
    (
        "eof occurred in violation of protocol",
        "the broker closed the connection in the TLS handshake; it does so when our certificate was revoked",
        "ask the federation's operator whether this device was revoked; the broker's log has the reason",
    ),
    ("wrong version number", "what listens there does not speak TLS", "use mqtt:// on loopback, else the TLS port"),
)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """PEM files: the trusted authorities (None: the system's), and this side's certificate and key, if any."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def is_loopback(host: str) -> bool:
    """Whether a host name or address cannot leave this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def client_context(credentials: Credentials, now: dt.datetime) -> ssl.SSLContext:
    """What a client dials with. Raises ConfigError for a file that is missing, wrong, expired or open to others."""
    if (credentials.certificate is None) != (credentials.key is None):
        raise ConfigError("a client certificate needs its key", hint="set both `certificate` and `key`, or neither")
    _check_file(credentials.ca, "certificate authority", "ca")
    try:
        made = ssl.create_default_context(cafile=None if credentials.ca is None else str(credentials.ca))
    except ssl.SSLError as wrong:
        raise ConfigError(f"{credentials.ca} holds no certificate", hint="point `ca` at a PEM file") from wrong
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    if credentials.certificate is not None and credentials.key is not None:
        _check_validity(credentials.certificate, now)
        check_private_file(credentials.key)
        try:
            made.load_cert_chain(credentials.certificate, credentials.key, password="")  # never asks on a terminal
        except (ssl.SSLError, ValueError) as wrong:
            raise ConfigError(
                f"{credentials.key} is not the key of {credentials.certificate}", hint="take both from one join folder"
            ) from wrong
    return made


def check_private_file(key: Path) -> None:
    """Raise ConfigError when a private key is missing, or when another user can read it."""
    _check_file(key, "private key", "key")
    if os.name == "posix" and stat.S_IMODE(key.stat().st_mode) & 0o077:
        raise ConfigError(f"{key} can be read by others", hint=f"chmod 600 {key}")


def check_subject(certificate: Path, *, name: str, federation: str) -> None:
    """Raise ConfigError when a certificate was made for another device, or for another federation."""
    from cryptography.x509.oid import NameOID

    cn, organisation = NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME
    subject = read_certificate(certificate).subject
    found = {oid: [a.value for a in subject.get_attributes_for_oid(oid)] for oid in (cn, organisation)}
    if found != {cn: [name], organisation: [federation]}:
        raise ConfigError(
            f"{certificate} belongs to {subject.rfc4514_string()}, not to {name} of {federation}",
            hint="use the certificate that was made for this device of this federation",
        )


def read_certificate(path: Path) -> x509.Certificate:
    """The first certificate of a PEM file. Raises ConfigError."""
    from cryptography import x509  # 1.6 MiB that a device without a certificate has no use for

    _check_file(path, "certificate", "certificate")
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as wrong:
        raise ConfigError(f"{path} holds no certificate: {wrong}", hint="it must be a PEM file") from wrong


def expiry_warnings(credentials: Credentials, now: dt.datetime) -> list[str]:
    """A sentence for each certificate of this side that ends within EXPIRY_WARNING_DAYS."""
    ways = {credentials.certificate: "provision --renew", credentials.ca: "provision --renew authority"}
    ends = {path: read_certificate(path).not_valid_after_utc for path in ways if path is not None}
    return [
        f"{path} expires on {end:%Y-%m-%d}, in {(end - now).days} days; renew it with `{ways[path]}`"
        for path, end in ends.items()
        if end - now < dt.timedelta(days=EXPIRY_WARNING_DAYS)
    ]


def unread_alert(receive: Callable[[int], bytes]) -> str:
    """What a broker said before it closed the connection, after a write has failed; "" when it said nothing.

    `receive` is the connection's `recv`.

    In TLS 1.3 a client has sent its first packet before it hears that its certificate is refused.
    """
    try:
        receive(1)
    except ssl.SSLWantReadError:
        return ""
    except OSError as alert:
        return str(alert)
    return ""


def explain_failure(wrong: Exception | str, ca: Path | None = None) -> tuple[str, str]:
    """-> (what went wrong, what to do), for a connection that failed; the hint is "" when TLS is not to blame."""
    text = repr(wrong) if isinstance(wrong, LookupError) else str(wrong)
    if isinstance(wrong, ssl.SSLCertVerificationError):
        return _explain_verification(wrong, ca)
    for words, reason, hint in TLS_ALERTS:
        if words in text.lower().replace("_", " "):
            return f"{reason} ({text})", hint
    return text, ""


def _explain_verification(wrong: ssl.SSLCertVerificationError, ca: Path | None) -> tuple[str, str]:
    """The error for a broker's certificate that is not trusted."""
    quoted = f"(certificate verify failed: {wrong.verify_message})"
    if wrong.verify_code == EXPIRED and ca is not None and _has_ended(ca):
        hint = "ask the federation's operator for the new ca.crt, or check this machine's clock"
        return f"the authority in {ca} is expired {quoted}", hint
    if wrong.verify_code == EXPIRED:
        return (
            f"the broker's certificate is expired {quoted}",
            "check this machine's clock; the operator's `provision --renew server.broker` makes a new one",
        )
    if wrong.verify_code == NOT_YET:
        return f"the broker's certificate is not yet valid {quoted}", "check this machine's clock"
    if wrong.verify_code in UNKNOWN_ISSUER:
        named = "any authority that this system trusts" if ca is None else f"the authority in {ca}"
        where = ", in the file that --config or `serve` names" if ca is None else ""
        hint = f"point `ca` at this federation's ca.crt{where}"
        return f"the broker's certificate is not from {named} {quoted}", hint
    if wrong.verify_code in (NAME_MISMATCH, ADDRESS_MISMATCH):
        name = wrong.verify_message.rpartition(" for ")[2].rstrip(".")  # it ends in: is not valid for 'NAME'.
        return f"the broker's certificate is not valid for {name}", "dial the name that it was made for"
    return f"the broker's certificate is refused {quoted}", "use the broker's own certificate, made by `provision`"


def _has_ended(certificate: Path) -> bool:
    try:
        return read_certificate(certificate).not_valid_after_utc < dt.datetime.now(dt.timezone.utc)
    except ConfigError:
        return False


def _check_file(path: Path | None, what: str, key: str) -> None:
    if path is not None and not path.is_file():
        raise ConfigError(f"no {what} at {path}", hint=f"point `{key}` at a PEM file, or leave it out")
    if path is not None and not os.access(path, os.R_OK):  # OpenSSL's error would name no file
        hint = "as root, give it to the user who runs this: `chown USER FILE`; a key's mode stays 600"
        raise ConfigError(f"this user may not read the {what} {path}", hint=hint)


def _check_validity(path: Path, now: dt.datetime) -> None:
    certificate = read_certificate(path)
    if now > certificate.not_valid_after_utc:
        raise ConfigError(f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC", hint=CLOCK_HINT)
    if now < certificate.not_valid_before_utc:
        raise ConfigError(
            f"{path} is not yet valid: it begins on {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC",
            hint="check this machine's clock",
        )
