"""The gate of every HTTP service, as its server calls it."""

from __future__ import annotations

import asyncio
import http.client
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Message

from export.serve.http_gate import PART_BYTES, RangedFile, create_gated_app, read_json
from tests.support.served_app import PATIENCE_S, serve_app


async def echo(request: Request) -> Response:
    return JSONResponse(await read_json(request, 1_000, "a body"))


def test_a_client_that_goes_in_the_middle_of_its_body_raises_nothing() -> None:
    """What an application raises, its server writes into the log, with sixty lines of where: a client's choice."""
    coming: list[Message] = [
        {"type": "http.request", "body": b'{"a":', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return coming.pop(0)

    async def send(_: Message) -> None: ...

    app = create_gated_app([Route("/", echo, methods=["POST"])])
    head = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}

    async def served() -> None:
        await app(head, receive, send)

    asyncio.run(served())
    assert not coming


def test_a_failure_of_the_server_is_answered_as_every_error_and_raised_for_its_log() -> None:
    async def fail(_: Request) -> Response:
        raise OSError("the disk")

    app = create_gated_app([Route("/", fail)], headers={"Cache-Control": "no-store"})
    answer = TestClient(app, raise_server_exceptions=False).get("/")
    assert (answer.status_code, list(answer.json())) == (500, ["error"])
    assert "disk" not in answer.text
    assert answer.headers["cache-control"] == "no-store"
    with pytest.raises(OSError, match="the disk"):
        TestClient(app).get("/")


@pytest.mark.parametrize("fast", [False, True], ids=["h11", "httptools"])
def test_a_client_that_offers_http_2_is_told_to_leave_it(fast: bool) -> None:  # noqa: FBT001
    """Java's HttpClient and `curl --http2` do; httptools drops such a body, which was answered as no JSON."""
    if fast:
        pytest.importorskip("httptools", reason="without it every server reads by h11")
    with serve_app(create_gated_app([Route("/", echo, methods=["POST"])]), fast=fast) as (port, _):
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        asked.request("POST", "/", b"[1]", {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"})
        answer = asked.getresponse()
        told = answer.read()
        asked.close()
    assert (answer.status, told) == (200, b"[1]") if not fast else (400, told)
    assert fast == (b"the header Upgrade" in told)


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_a_large_answer_is_sent_in_parts(size: int) -> None:
    """As one it had to be read within 20 s, whatever the client read of it meanwhile."""
    whole, sent = bytes(range(256)) * (size // 256) + b"x" * (size % 256), list[Message]()

    async def answer(_: Request) -> Response:
        return Response(whole)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    app = create_gated_app([Route("/", answer)])
    head = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}

    async def served() -> None:
        await app(head, receive, send)

    asyncio.run(served())
    bodies = [message["body"] for message in sent[1:]]
    assert b"".join(bodies) == whole
    assert len(bodies) == max(1, -(-size // PART_BYTES))
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]


def test_a_long_range_header_is_refused_by_each_service_that_has_ranges(tmp_path: Path) -> None:
    """Starlette before 0.49.1 took a second for 16,000 digits, in which the service answered no other client."""
    (tmp_path / "file").write_bytes(bytes(1_000))

    async def file(_: Request) -> Response:
        return RangedFile(tmp_path / "file", of_errors={"X-Own": "1"})

    app = TestClient(create_gated_app([Route("/", file)]))
    for ranges in (",".join(["0-1"] * 65), ",".join(["0-"] * 5_000), "1" * 16_000):
        answer = app.get("/", headers={"Range": f"bytes={ranges}"})
        assert (answer.status_code, answer.json()) == (416, {"error": "the Range header is too long"})
        assert (answer.headers["content-range"], answer.headers["x-own"]) == ("bytes */1000", "1")
    assert app.get("/", headers={"Range": "bytes=0-1"}).content == bytes(2)
