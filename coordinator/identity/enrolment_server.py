"""Enrolment over HTTPS: a device sends its one-time token and a signing request, and receives its certificate.

One request: POST /enrol with a JSON object {"token", "csr"} of at most 16 KiB; the answer is {"certificate"} or
{"error", "detail"}. The device's key never leaves the device. The server is a process of its own, so that the
coordinator's process does not hold the authority's key. It uses Python's own HTTP server: requests are small and rare,
and bounded here in size, time and number. The operator is told of every certificate and of every refusal but those of
unknown tokens.
"""

from __future__ import annotations

import datetime as dt
import json
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coordinator.identity.certificate_authority import CertificateAuthority, issue_time_s, open_authority, read_request
from coordinator.identity.provision_plan import open_plan
from coordinator.identity.revocation import create_list, is_revoked, locked
from coordinator.identity.tokens import TokenRefused, TokenStore
from edge_client.errors import ConfigError, Malformed, NetworkError
from edge_client.protocol.messages import parse_json
from edge_client.transport.tls import check_private_file
from export.serve.listener import ConnectionSlots
from export.serve.renewed_certificate import renewal_watch

MAX_BODY_BYTES = 16_384
MAX_TOKEN_CHARS = 128
REQUEST_TIMEOUT_S = 20.0  # from the first byte of the handshake to the last of the answer
MAX_OPEN_REQUESTS, MAX_OPEN_REQUESTS_PER_ADDRESS = 32, 8

Report = Callable[[str], None]
WallClock = Callable[[], dt.datetime]


def utc_now() -> dt.datetime:
    """The wall clock, which certificates refer to."""
    return dt.datetime.now(dt.timezone.utc)


@dataclass(frozen=True, kw_only=True)
class Registrar:
    """Decides on requests: token and signing request -> certificate, or a refusal."""

    authority: CertificateAuthority
    tokens: TokenStore
    tell: Report = field(repr=False)
    now: WallClock = utc_now

    def handle(self, body: bytes) -> tuple[int, dict[str, str]]:
        """-> (HTTP status, JSON answer) of one request's body."""
        try:
            return HTTPStatus.OK, {"certificate": self._certificate(body)}
        except Malformed as wrong:
            return HTTPStatus.BAD_REQUEST, {"error": wrong.code, "detail": wrong.message}
        except TokenRefused as wrong:
            if wrong.code != "unknown":
                self.tell(f"refused: {wrong.message}")
            return HTTPStatus.FORBIDDEN, {"error": wrong.code, "detail": wrong.message}
        except (ConfigError, OSError) as wrong:  # a full disk, a damaged file
            self.tell(f"a device could not enrol: {wrong}")
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": "no_space", "detail": "its files need the operator"}

    def _certificate(self, body: bytes) -> str:
        asked = parse_json(body, MAX_BODY_BYTES)
        token, pem = (asked.get("token"), asked.get("csr")) if isinstance(asked, dict) else (None, None)
        if not isinstance(token, str) or not isinstance(pem, str) or len(token) > MAX_TOKEN_CHARS:
            raise Malformed("bad_field", "a request is an object with the texts token and csr")
        cid, key = read_request(pem.encode("utf-8"), self.authority.federation)
        now, der = self.now(), key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        with locked(self.authority.folder):  # a revocation comes before it, or finds the certificate
            used_s = self.tokens.redeem(token, cid, der, now.timestamp())
            if is_revoked(self.authority, cid):
                raise TokenRefused("revoked", f"{cid} was revoked")
            known = [c for c in self.authority.certificates_of(cid) if c.public_key() == key]
            made = [c for c in known if issue_time_s(c) >= int(used_s)]  # the device lost an earlier answer
            certificate = made[-1] if made else self.authority.current().issue_client(key, cid, now)
        self.tell(f"{cid} has a certificate until {certificate.not_valid_after_utc:%Y-%m-%d}")
        return certificate.public_bytes(Encoding.PEM).decode("ascii")


class EnrolmentServer(ThreadingHTTPServer):
    """The listener: a thread per request, at most MAX_OPEN_REQUESTS of them; a further connection is closed at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], tls: ssl.SSLContext, registrar: Registrar, look: Callable[[], object]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.registrar, self._take_renewed_certificate = registrar, look
        self._slots = ConnectionSlots(total=MAX_OPEN_REQUESTS, per_address=MAX_OPEN_REQUESTS_PER_ADDRESS)
        super().__init__(address, _Handler)
        # The handshake runs in the request's own thread: a silent client cannot block the listener.
        self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def get_request(self) -> Any:  # noqa: ANN401 - as socketserver says
        self._take_renewed_certificate()
        return super().get_request()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as socketserver says
        if self._slots.take(client_address[0]):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as socketserver says
        watch = threading.Timer(REQUEST_TIMEOUT_S, _shut_down, (request,))
        watch.daemon = True
        watch.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            watch.cancel()
            self._slots.release(client_address[0])

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as socketserver says
        """Log nothing of a client that disconnects or speaks no TLS."""


class _Handler(BaseHTTPRequestHandler):
    """One request per connection, as in HTTP/1.0."""

    server: EnrolmentServer
    server_version, sys_version = "fedcenters", ""
    timeout = REQUEST_TIMEOUT_S

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != "/enrol":
            self._reply(HTTPStatus.NOT_FOUND, {"error": "bad_kind", "detail": "post to /enrol"})
        elif not length.isdecimal() or not 0 < int(length[:9]) <= MAX_BODY_BYTES or len(length) > len("16384"):
            self._reply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": "too_big", "detail": "at most 16384 bytes"})
        else:
            self._reply(*self.server.registrar.handle(self.rfile.read(int(length))))

    def _reply(self, status: int, answer: dict[str, str]) -> None:
        data = json.dumps(answer).encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - as http.server wants it
        """Log nothing: the registrar reports what the operator needs."""


def open_enrolment_server(folder: Path, listen: str, *, tell: Report, port: int | None = None) -> EnrolmentServer:
    """The listener of a provisioned folder, before it serves. Raises ConfigError, NetworkError."""
    if not (folder / "federation.toml").is_file():
        raise ConfigError(f"{folder} is not provisioned", hint="run `fedcenters-coordinator provision` first")
    plan = open_plan(folder, {})
    authority = open_authority(folder / "authority", plan.federation, utc_now())
    create_list(authority, utc_now())
    tokens = TokenStore(path=folder / "authority" / "tokens.sqlite")
    registrar = Registrar(authority=authority, tokens=tokens, tell=tell, now=utc_now)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    files = folder / "enrolment" / "server.crt", folder / "enrolment" / "server.key"
    check_private_file(files[1])
    tls.load_cert_chain(*files, password="")
    look = renewal_watch(tls, *files)
    try:
        return EnrolmentServer((listen, plan.enrol_port if port is None else port), tls, registrar, look)
    except OSError as wrong:
        raise NetworkError(
            f"cannot listen on {listen}:{plan.enrol_port}: {wrong.strerror or wrong}",
            hint="choose another --enrol-port",
        ) from wrong


def run_enrolment_server(folder: Path, listen: str, *, tell: Report) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    with open_enrolment_server(folder, listen, tell=tell) as server:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
        tell(f"tokens become certificates at port {server.server_address[1]}")
        server.serve_forever()


def _shut_down(request: socket.socket) -> None:
    """Close the connection of a request that takes too long, which ends its thread."""
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is over already
        return
