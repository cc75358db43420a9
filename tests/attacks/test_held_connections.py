"""Attacks on the HTTP servers by connections that are held: half a request, no request, an answer that is not read."""

from __future__ import annotations

import resource
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from coordinator.identity.enrolment_server import open_enrolment_server
from export.serve.http_gate import create_gated_app
from export.serve.listener import MAX_UNSENT_BYTES, ConnectionSlots, affordable_connections, open_listener
from export.serve.uvicorn_settings import MAX_QUEUED, MAX_UNANSWERED_BYTES
from tests.support.guarded_broker import provision_federation
from tests.support.served_app import PATIENCE_S, serve_app
from tests.support.served_dashboard import serve_dashboard

Served = AbstractContextManager[tuple[int, uvicorn.Server]]
HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
LARGE = 32 << 20  # bytes; more than the buffers of both kernels hold
BOTH_PARSERS = pytest.mark.parametrize("fast", [False, True], ids=["h11", "httptools"])


async def _small(_: Request) -> Response:
    return PlainTextResponse("here")


async def _large(_: Request) -> Response:
    return Response(bytes(LARGE))


def _serve(*, total: int = 64, per_address: int = 8, timeout_s: float = 0.5, fast: bool = False) -> Served:
    app = create_gated_app([Route("/", _small), Route("/large", _large)])
    return serve_app(app, total=total, per_address=per_address, timeout_s=timeout_s, fast=fast)


def _connect(stack: ExitStack, port: int, sent: bytes, address: str = "127.0.0.1") -> socket.socket:
    opened = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S, source_address=(address, 0)))
    opened.sendall(sent)
    return opened


def _status(port: int, address: str = "127.0.0.2") -> bytes:
    """The status line that a client elsewhere is answered with; empty where its connection is closed instead."""
    with ExitStack() as stack, suppress(ConnectionResetError):
        asked = _connect(stack, port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", address)
        return asked.recv(1 << 16).partition(b"\r\n")[0]
    return b""


def _is_closed(opened: socket.socket) -> bool:
    """Whether the server closes the connection; raises TimeoutError where it is held."""
    try:
        return opened.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_requests_from_one_address_leave_room_for_the_others() -> None:
    with _serve(timeout_s=PATIENCE_S) as (port, _), ExitStack() as stack:
        held = [_connect(stack, port, HALF) for _ in range(40)]
        assert all(_is_closed(one) for one in held[8:])
        assert _status(port) == b"HTTP/1.1 200 OK"


@BOTH_PARSERS
@pytest.mark.parametrize("sent", [b"", HALF, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n"])
def test_a_connection_without_a_whole_request_is_closed(sent: bytes, fast: bool) -> None:  # noqa: FBT001
    with _serve(fast=fast) as (port, _), ExitStack() as stack:
        held = _connect(stack, port, sent)
        while len(held.recv(1 << 16)) > 0:  # the answer, where there is one, then the end
            pass


@BOTH_PARSERS
def test_a_request_that_comes_byte_by_byte_is_closed_in_the_same_time(fast: bool) -> None:  # noqa: FBT001
    with _serve(fast=fast) as (port, _), ExitStack() as stack:
        held = _connect(stack, port, HALF)
        held.settimeout(0.05)
        closed = False
        for _ in range(600):
            try:
                held.sendall(b"x")
                closed = _is_closed(held)
            except TimeoutError:
                continue
            except OSError:
                closed = True
            if closed:
                break
        assert closed


@BOTH_PARSERS
def test_an_answer_that_is_not_read_is_not_kept(fast: bool) -> None:  # noqa: FBT001
    with _serve(total=1, per_address=1, fast=fast) as (port, server), ExitStack() as stack:
        held = _connect(stack, port, b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        first = held.recv(1)
        while not _status(port):  # the only slot comes free when the server has given the connection up
            pass
        assert first == b"H"
        assert len(server.server_state.connections) <= 1


@BOTH_PARSERS
def test_a_head_without_an_end_is_not_kept(fast: bool) -> None:  # noqa: FBT001
    with _serve(timeout_s=PATIENCE_S, fast=fast) as (port, _), ExitStack() as stack:
        held = _connect(stack, port, HALF)
        with pytest.raises(ConnectionError):  # long before PATIENCE_S, because of its size
            held.sendall(b"x" * LARGE)


@BOTH_PARSERS
@pytest.mark.parametrize(
    "asks",
    [
        b"GET /large HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n",
        b"GET /large HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
    ],
    ids=["the next head", "fields behind the body"],
)
def test_what_comes_during_an_answer_is_not_kept(asks: bytes, fast: bool) -> None:  # noqa: FBT001
    """httptools kept all of it, as fast as it came: 229 MB of 200 MB in four seconds. h11 does not read on."""
    field = b"A: b\r\n"
    with _serve(timeout_s=PATIENCE_S, fast=fast) as (port, server), ExitStack() as stack:
        held = _connect(stack, port, asks)
        assert held.recv(1) == b"H"
        held.settimeout(1.0)
        with pytest.raises((ConnectionError, TimeoutError)):
            held.sendall(field * (LARGE // len(field)))
        kept = [len(getattr(protocol, "headers", ())) for protocol in server.server_state.connections]
        assert max(kept, default=0) * len(field) <= MAX_UNANSWERED_BYTES


@BOTH_PARSERS
def test_requests_before_the_answer_to_the_first_are_not_kept(fast: bool) -> None:  # noqa: FBT001
    """With httptools 380,000 waited after 18 seconds, in 240 MB; other clients were not answered meanwhile."""
    with _serve(timeout_s=PATIENCE_S, fast=fast) as (port, server), ExitStack() as stack:
        held = _connect(stack, port, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        assert held.recv(1) == b"H"
        held.settimeout(1.0)
        with pytest.raises((ConnectionError, TimeoutError)):
            held.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * (LARGE // 28))
        assert all(len(getattr(one, "pipeline", ())) <= MAX_QUEUED for one in server.server_state.connections)
        assert _status(port) == b"HTTP/1.1 200 OK"


@BOTH_PARSERS
def test_some_requests_may_come_before_the_answer_to_the_first(fast: bool) -> None:  # noqa: FBT001
    with _serve(timeout_s=PATIENCE_S, fast=fast) as (port, _), ExitStack() as stack:
        held = _connect(stack, port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * MAX_QUEUED)
        answers = b""
        while answers.count(b"HTTP/1.1 200 OK") < MAX_QUEUED:
            answers += held.recv(1 << 16)


@BOTH_PARSERS
def test_no_second_answer_begins_within_the_first(fast: bool, caplog: pytest.LogCaptureFixture) -> None:  # noqa: FBT001
    """h11 logged a traceback, and httptools wrote an answer 400 into the one that it was sending."""
    with _serve(timeout_s=PATIENCE_S, fast=fast) as (port, _), ExitStack() as stack:
        head = b"GET /large HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        held = _connect(stack, port, head)
        answer = held.recv(1)
        held.sendall(b"no chunk\r\n")
        with suppress(ConnectionResetError):
            while part := held.recv(1 << 20):
                answer += part
        assert b"400 Bad Request" not in answer
    assert not caplog.records


def test_little_of_an_answer_waits_in_the_kernel() -> None:
    """It took 4 MB there, and told for as long as a third of them lasted that a slow client reads nothing."""
    slots = ConnectionSlots(total=1, per_address=1)
    with (
        closing(open_listener("127.0.0.1", 0, what="a test", option="none", slots=slots)) as listener,
        socket.create_connection(listener.getsockname()),
        closing(listener.accept()[0]) as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == MAX_UNSENT_BYTES


def test_a_slot_comes_back_when_its_connection_ends() -> None:
    with _serve(total=2, per_address=1) as (port, _):
        for _ in range(5):
            while (status := _status(port)) == b"":  # the server has not seen the end of the one before yet
                pass
            assert status == b"HTTP/1.1 200 OK"


def test_the_dashboard_answers_while_one_address_holds_600_half_requests(tmp_path: Path) -> None:
    with serve_dashboard(tmp_path) as site, ExitStack() as stack:
        for _ in range(600):
            with suppress(ConnectionResetError, BrokenPipeError):
                _connect(stack, site.port, HALF)
        assert _status(site.port) == b"HTTP/1.1 200 OK"


LIMITED = """
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from export.serve.server import connection_slots
slots = connection_slots()
taken = [slots.take(f"192.0.2.{address}") for address in range(8) for _ in range(100)]
held = [file for _ in range(sum(taken)) for file in socket.socketpair()]  # a connection, and the file that it reads
print(sum(taken[:100]), sum(taken))
"""


def test_clients_that_hold_connections_leave_the_server_of_centers_descriptors() -> None:
    """Two addresses with 512 connections each took all of the usual 1,024, and the server could accept no other."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    of_one, of_all = map(int, done.stdout.split())
    assert 0 < of_one <= of_all / 4


def test_the_server_of_centers_takes_the_descriptors_that_it_may_have() -> None:
    told = "import resource; from export.serve.server import connection_slots; r = resource.RLIMIT_NOFILE"
    told += (
        "; resource.setrlimit(r, (1024, resource.getrlimit(r)[1])); connection_slots(); print(*resource.getrlimit(r))"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    soft, hard = map(int, done.stdout.split())
    assert soft == (min(hard, 8_256) if hard > 0 else 8_256)


def test_a_process_that_may_open_any_number_of_files_takes_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some containers say; infinity parted by two is no number, and the server took one connection."""
    without = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: without)
    assert affordable_connections(4_096) == 4_096


def test_an_address_behind_one_prefix_is_one_address() -> None:
    slots = ConnectionSlots(total=8, per_address=2)
    assert [slots.take(f"2001:db8::{i}") for i in range(3)] == [True, True, False]
    assert slots.take("2001:db8:0:1::1")
    assert [slots.take(a) for a in ("::ffff:192.0.2.1", "192.0.2.1", "192.0.2.1")] == [True, True, False]
    slots.release("2001:db8::2")
    assert slots.take("2001:db8::9")


def test_enrolment_answers_while_one_address_holds_half_handshakes(tmp_path: Path) -> None:
    keys = provision_federation(tmp_path / "keys").folder
    with open_enrolment_server(keys, "127.0.0.1", tell=lambda _: None, port=0) as server, ExitStack() as stack:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            port = server.server_address[1]
            held = [_connect(stack, port, b"\x16\x03\x01") for _ in range(40)]
            assert all(_is_closed(one) for one in held[-8:])
            tls = ssl.create_default_context(cafile=str(keys / "broker" / "ca.crt"))
            plain = _connect(stack, port, b"", "127.0.0.2")
            with tls.wrap_socket(plain, server_hostname="localhost") as asked:
                asked.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert b" 501 " in asked.recv(1 << 10)
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)
