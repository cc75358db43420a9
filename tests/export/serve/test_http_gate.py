"""The gate of every HTTP service, as its server calls it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from export.serve.http_gate import create_gated_app, read_json


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
