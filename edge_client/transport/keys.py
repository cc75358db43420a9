"""Private keys of certificates: P-256, made here, written for their owner alone, never printed.

`signing_request` is what a device sends instead of its key.
"""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from edge_client.errors import ConfigError
from edge_client.transport.blobs import write_atomically
from edge_client.transport.tls import check_private_file


def write_private_file(path: Path, data: bytes) -> None:
    """Write a secret, and its folder: a power cut leaves no half key, and its mode is never wider."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data, private=True)


def open_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in a file, made there if there is none. Raises ConfigError when others can read it, or it is damaged."""
    if not path.exists():
        made = ec.generate_private_key(ec.SECP256R1())
        write_private_file(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    check_private_file(path)
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as wrong:
        raise ConfigError(f"{path} holds no private key", hint="restore it from a backup") from wrong
    if not is_p256(key):
        raise ConfigError(f"{path} holds a key of another kind", hint="certificates here are for P-256 keys")
    return key  # type: ignore[return-value]  # just checked


def signing_request(key: ec.EllipticCurvePrivateKey, cid: str, federation: str) -> bytes:
    """A certificate signing request [PEM] that proves who holds the key."""
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject_name(cid, federation))
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )


def subject_name(name: str, federation: str) -> x509.Name:
    """O = federation, CN = device id: what a certificate says about its holder."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, federation),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def is_p256(key: object) -> bool:
    """Whether a key, private or public, is on the one curve that is used here."""
    keys = (ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey)
    return isinstance(key, keys) and isinstance(key.curve, ec.SECP256R1)
