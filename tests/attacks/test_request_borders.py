"""Tries to have the body of one request read as another request, which a proxy would take for another client's."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from export.serve.http_gate import create_gated_app
from tests.support.served_app import PATIENCE_S, serve_app

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODIES = {
    "length": (b"Content-Length: %d" % len(HIDDEN), HIDDEN),
    "chunked": (b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)),
}


@pytest.mark.parametrize(("field", "body"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("upgrade", [b"Connection: Upgrade\r\nUpgrade: h2c", b"Connection: upgrade\r\nUpgrade: x"])
def test_a_body_behind_an_answered_wish_for_another_protocol_is_no_request(
    upgrade: bytes, field: bytes, body: bytes
) -> None:
    pytest.importorskip("httptools", reason="without it every server reads by h11, which reads the body")
    heard = list[str]()

    async def answer(request: Request) -> Response:
        heard.append(request.url.path)
        return PlainTextResponse("here")

    app = create_gated_app([Route("/{path}", answer, methods=["GET", "POST"])])
    with (
        serve_app(app, fast=True, timeout_s=1.0) as (port, _),
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as peer,
    ):
        peer.sendall(b"\r\n".join([b"POST /open HTTP/1.1", b"Host: localhost", field, upgrade, b"", b""]))
        said = peer.recv(4096)
        with suppress(OSError):  # it is closed
            peer.sendall(body)
            while peer.recv(4096):
                pass
    assert said.startswith(b"HTTP/1.1 200 ")
    assert heard == ["/open"]
