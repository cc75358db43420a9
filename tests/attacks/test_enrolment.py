"""Tries the enrolment listener: requests that are no requests, names that are no names, and floods."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from coordinator.identity.certificate_authority import read_request
from coordinator.identity.enrolment_server import (
    MAX_OPEN_REQUESTS,
    MAX_OPEN_REQUESTS_PER_ADDRESS,
    EnrolmentServer,
    Registrar,
)
from coordinator.identity.provisioning import Provisioner
from edge_client.config import load_config
from edge_client.errors import Malformed
from edge_client.runtime import enrolment
from edge_client.transport.keys import signing_request, subject_name
from tests.coordinator.identity.test_enrolment_over_https import config_of, listening
from tests.support.guarded_broker import FEDERATION, PATIENCE_S, provision_federation

KEY = ec.generate_private_key(ec.SECP256R1())
HOSTILE_NAMES = ("+", "#", "a/b", "x" * 65, "coordinator.0", "server.broker", "ａ", "a\u0000b", "a b", "..", "$SYS")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Provisioner:
    return provision_federation(tmp_path_factory.mktemp("enrolment") / "keys")


def named(*parts: tuple[x509.ObjectIdentifier, str]) -> bytes:
    name = x509.Name([x509.NameAttribute(oid, value, _validate=False) for oid, value in parts])
    return (
        x509.CertificateSigningRequestBuilder().subject_name(name).sign(KEY, hashes.SHA256()).public_bytes(Encoding.PEM)
    )


CN, ORGANISATION = NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME
REQUESTS = {
    "no text": b"\xff\xfe",
    "empty": b"",
    "no request": b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
    "too long": signing_request(KEY, "d1", FEDERATION) + b"\n" * 10_000,
    "another federation": signing_request(KEY, "d1", "other"),
    "no federation": named((CN, "d1")),
    "two names": named((ORGANISATION, FEDERATION), (CN, "d1"), (CN, "d2")),
    "more than a name": named((ORGANISATION, FEDERATION), (CN, "d1"), (NameOID.COUNTRY_NAME, "XX")),
    "an RSA key": x509.CertificateSigningRequestBuilder()
    .subject_name(subject_name("d1", FEDERATION))
    .sign(rsa.generate_private_key(65537, 2048), hashes.SHA256())
    .public_bytes(Encoding.PEM),
    "another curve": x509.CertificateSigningRequestBuilder()
    .subject_name(subject_name("d1", FEDERATION))
    .sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    .public_bytes(Encoding.PEM),
}


@pytest.mark.parametrize("pem", REQUESTS.values(), ids=REQUESTS.keys())
def test_what_is_no_devices_request_is_refused(pem: bytes) -> None:
    with pytest.raises(Malformed) as refused:
        read_request(pem, FEDERATION)
    assert refused.value.code in ("bad_field", "too_big")


@pytest.mark.filterwarnings("ignore:Attribute's length")  # the library says so of the long one, and goes on
@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_no_certificate_is_made_for_a_name_that_is_none(name: str) -> None:
    with pytest.raises(Malformed):
        read_request(named((ORGANISATION, FEDERATION), (CN, name)), FEDERATION)


def test_a_request_for_somebody_elses_key_is_refused() -> None:
    """The public key of another, with a signature that its owner did not make."""
    der = bytearray(x509.load_pem_x509_csr(signing_request(KEY, "d1", FEDERATION)).public_bytes(Encoding.DER))
    der[-1] ^= 1
    with pytest.raises(Malformed):
        read_request(x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM), FEDERATION)


def test_what_a_request_asks_for_beyond_its_name_is_not_given(work: Provisioner) -> None:
    greedy = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject_name("greedy", FEDERATION))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(KEY, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    work.add_token("greedy")
    token = (work.folder / "devices" / "greedy" / "token").read_text().strip()
    status, answer = registrar(work).handle(json.dumps({"token": token, "csr": greedy.decode()}).encode())
    assert status == 200
    made = x509.load_pem_x509_certificate(answer["certificate"].encode())
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(x509.ExtensionNotFound):
        made.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def registrar(work: Provisioner) -> Registrar:
    return Registrar(authority=work.authority, tokens=work.tokens, tell=lambda _: None)


@given(st.binary(max_size=300) | st.text(max_size=80).map(lambda t: json.dumps({"token": t, "csr": t}).encode()))
def test_no_body_gives_anything_or_ends_the_registrar(work: Provisioner, body: bytes) -> None:
    status, answer = registrar(work).handle(body)
    assert status in (400, 403)
    assert "certificate" not in answer


@pytest.fixture(scope="module")
def server(work: Provisioner) -> Iterator[EnrolmentServer]:
    with listening(work, []) as found:
        yield found


def talk(work: Provisioner, server: EnrolmentServer, said: bytes) -> bytes:
    """Send bytes over TLS; -> the start of the answer, b"" when the connection is closed."""
    tls = ssl.create_default_context(cafile=str(work.folder / "enrolment" / "ca.crt"))
    with suppress(OSError), dial(server) as plain, tls.wrap_socket(plain, server_hostname="localhost") as link:
        link.sendall(said)
        return link.recv(64)
    return b""


def dial(server: EnrolmentServer, number: int = 0) -> socket.socket:
    """A connection from an address that a few numbers share."""
    source = f"127.0.0.{1 + number // MAX_OPEN_REQUESTS_PER_ADDRESS}"
    target = ("127.0.0.1", int(server.server_address[1]))
    return socket.create_connection(target, PATIENCE_S, source_address=(source, 0))


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        (b"GET /enrol HTTP/1.1\r\n\r\n", b"501"),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", b"404"),
        (b"POST /../authority/ca.key HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", b"404"),
        (b"POST /enrol HTTP/1.1\r\n\r\n", b"413"),
        (b"POST /enrol HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"413"),
        (b"POST /enrol HTTP/1.1\r\nContent-Length: 16384\r\n\r\n" + b" " * 16_384, b"400"),
        (b"POST /enrol HTTP/1.1\r\nContent-Length: 16385\r\n\r\n", b"413"),
        (b"POST /enrol HTTP/1.1\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\n", b"413"),
        (b"POST /enrol HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", b"400"),
        (b"POST /enrol HTTP/1.1\r\nContent-Length: 4\r\n\r\n[[[[", b"400"),
        (b"\x00" * 100 + b"\r\n\r\n", b"HTML"),
        (b"A" * 70_000 + b"\r\n\r\n", b"414"),
    ],
)
def test_bytes_that_are_no_request_get_an_error(
    work: Provisioner, server: EnrolmentServer, said: bytes, answered: bytes
) -> None:
    assert answered in talk(work, server, said)[:64]


def test_silent_connections_do_not_keep_a_device_out(work: Provisioner, server: EnrolmentServer) -> None:
    """Silent clients take all connections but one; the listener accepts further ones."""
    work.add_token("patient")
    silent = [dial(server, 1 + i) for i in range(MAX_OPEN_REQUESTS - 1)]
    try:
        enrolment.enrol(config_of(work, "patient", server))
    finally:
        for link in silent:
            link.close()
    assert (work.folder / "devices" / "patient" / "device.crt").exists()


def test_connections_beyond_the_limit_are_closed_at_once(work: Provisioner) -> None:
    with listening(work, []) as server:
        held = [dial(server, i) for i in range(MAX_OPEN_REQUESTS)]
        try:
            with closing(dial(server, MAX_OPEN_REQUESTS)) as late:
                late.sendall(b"\x16\x03\x01")
                with suppress(ConnectionError):
                    assert late.recv(1) == b""
        finally:
            for link in held:
                link.close()


def test_a_token_that_others_can_read_is_not_used(work: Provisioner) -> None:
    work.add_token("careless")
    home = work.folder / "devices" / "careless"
    (home / "token").chmod(0o644)
    with pytest.raises(Exception, match="can be read by others"):
        enrolment.enrol(load_config(home / "client.toml", {}))
