"""The gate that every HTTP service shares: the dashboard, the phone's page and `fedcenters-export serve`.

A service gives its routes, a rule and headers. The rule sees each request's head before a handler does and may refuse
it; the headers are added to every answer that does not set them itself. Every error is one JSON object {"error": text}.
What differs between the services (who may read, how many requests a second) is in their rules; what a rule asks for
(host name, bearer token, origin) and how a body is read are written here.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from edge_client.errors import Malformed
from edge_client.protocol.messages import parse_json

BODY_TIMEOUT_S = 10.0  # for the whole body
PART_BYTES = 64 << 10  # of an answer
MAX_RANGE_CHARS = 256  # of a Range header: the time of starlette before 0.49.1 grows with the square of its digits
RANGE_ERRORS = {
    400: "the Range header is none of bytes; write bytes=0-1023, or leave it out",
    416: "the Range header begins behind the end of the file; Content-Range has its size",
}
SAME_ORIGIN_VALUES = (b"same-origin", b"none")  # Sec-Fetch-Site of the service's own page, and of a typed address


@dataclass(frozen=True, kw_only=True)
class RequestHead:
    """A request before its body is read. `client` is the address of the peer; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    client: str
    now_s: float

    @property
    def host(self) -> str:
        host = self.headers.get(b"host", b"").decode("latin-1")
        if host.startswith("["):
            return host[1:].partition("]")[0]
        return host.partition(":")[0]

    @property
    def is_same_origin(self) -> bool:
        """Whether the request comes from the service's own page, or from no browser at all."""
        if self.headers.get(b"sec-fetch-site", b"same-origin") not in SAME_ORIGIN_VALUES:
            return False
        origin = self.headers.get(b"origin")
        return origin is None or origin.partition(b"://")[2] == self.headers.get(b"host")

    def has_token(self, *tokens: str | None) -> bool:
        """Whether the header Authorization bears one of the tokens. Each is compared, in constant time."""
        given = self.headers.get(b"authorization", b"")
        found = [hmac.compare_digest(given, f"Bearer {token}".encode()) for token in tokens if token is not None]
        return any(found)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The answer to a request that no handler sees."""

    status: int
    error: str
    headers: Mapping[str, str] = field(default_factory=dict)


Rule = Callable[[RequestHead], Refusal | None]


def create_gated_app(
    routes: Sequence[BaseRoute],
    *,
    rule: Rule = lambda _: None,
    headers: Mapping[str, str] | None = None,
    lifespan: Lifespan[Starlette] | None = None,
) -> ASGIApp:
    """An ASGI application whose every request passes the rule, and whose every answer has the headers."""
    handlers: dict[Any, Any] = {HTTPException: _on_http_exception, Malformed: _on_malformed, Exception: _on_failure}
    inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    inner.router.redirect_slashes = False  # a path names one thing, or nothing
    return _Gate(inner, rule, headers or {})


class RangedFile(FileResponse):
    """A file, or the parts of it that a Range header names. A header that names none is an error of the gate's form.

    So is a long header, which no download needs.

    Its headers are `of_errors`. Raises HTTPException 400 or 416 before anything is sent.
    """

    def __init__(self, path: Path, *, of_errors: Mapping[str, str] | None = None, **given: Any) -> None:  # noqa: ANN401 - as of any response
        super().__init__(path, **given)
        self._of_errors = of_errors or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(Headers(scope=scope).get("range", "")) > MAX_RANGE_CHARS:
            size = {"Content-Range": f"bytes */{(await run_in_threadpool(os.stat, self.path)).st_size}"}
            raise HTTPException(416, "the Range header is too long", headers={**self._of_errors, **size})

        async def send_or_raise(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in RANGE_ERRORS:
                given = {name.decode(): value.decode() for name, value in message["headers"]}
                size = {name: value for name, value in given.items() if name == "content-range"}
                words = RANGE_ERRORS[message["status"]]
                raise HTTPException(message["status"], words, headers={**self._of_errors, **size})
            await send(message)

        await super().__call__(scope, receive, send_or_raise)


class _Gate:
    def __init__(self, inner: ASGIApp, rule: Rule, headers: Mapping[str, str]) -> None:
        self._inner, self._rule = inner, rule
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                added = ((name, value) for name, value in self._headers if name not in given)
                message["headers"] = [*message["headers"], *added]
            for part in _parts(message):
                await send(part)

        if scope["method"] != "GET":  # which alone has ranges (RFC 9110, 14.2)
            scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != b"range"]}
        head = RequestHead(
            method=scope["method"],
            path=scope["path"],
            headers=dict(scope["headers"]),
            client=scope["client"][0] if scope.get("client") else "",
            now_s=time.monotonic(),
        )
        refusal = self._rule(head)
        if refusal is None and "\n" in head.path:  # a route takes "/reports\n" for "/reports", and a rule does not
            refusal = Refusal(status=404, error="Not Found")
        answer = self._inner if refusal is None else _error(refusal.status, refusal.error, refusal.headers)
        await answer(scope, receive, send_with_headers)


def _parts(message: Message) -> Iterator[Message]:
    """A message; one with a large body is several, and a server sends the next when those before were read in part.

    It would hold one large part in a buffer, and an answer that it has handed over counts as read.
    """
    body = message.get("body", b"") if message["type"] == "http.response.body" else b""
    ends = range(PART_BYTES, len(body), PART_BYTES)
    for end in ends:
        yield {**message, "body": body[end - PART_BYTES : end], "more_body": True}
    yield {**message, "body": body[len(ends) * PART_BYTES :]} if ends else message


async def read_json(request: Request, max_bytes: int, name: str) -> Any:  # noqa: ANN401 - JSON
    """The JSON value of a body of at most `max_bytes`, which must come within BODY_TIMEOUT_S; more is not read.

    `name` stands for the body in errors. Raises HTTPException 400, 408 or 413, and Malformed.
    """
    parts, size = [], 0

    async def read() -> None:
        nonlocal size
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise HTTPException(413, f"{name} has at most {max_bytes} bytes")
            parts.append(part)

    try:
        await asyncio.wait_for(read(), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"{name} is sent within {BODY_TIMEOUT_S:.0f} s") from None
    except ClientDisconnect:  # it reads no answer, and the server's log would have its traceback
        raise HTTPException(400, f"{name} broke off") from None
    if size == 0 and "upgrade" in request.headers:  # httptools drops the body of such a request
        raise HTTPException(400, f"{name} is not read beside the header Upgrade; leave that out, and speak HTTP/1.1")
    return parse_json(b"".join(parts), max_bytes)


def require_json_type(request: Request, name: str) -> None:
    """Raise HTTPException 415 for a content type that an HTML form could send."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()  # RFC 9110, 8.3.1: any case
    if kind != "application/json":
        raise HTTPException(415, f"{name} is application/json")


def security_headers(allowed: str) -> dict[str, str]:
    """Headers for a page that may load and dial only what the directives in `allowed` name (CSP level 3)."""
    return {
        "Content-Security-Policy": f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
    }


def _error(status: int, error: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": error}, status_code=status, headers=headers)


async def _on_http_exception(_: Request, wrong: HTTPException) -> Response:
    return _error(wrong.status_code, wrong.detail, wrong.headers)


async def _on_failure(_: Request, __: Exception) -> Response:
    return _error(500, "the server failed; its log says how")


async def _on_malformed(_: Request, wrong: Malformed) -> Response:
    return _error(413 if wrong.code == "too_big" else 400, wrong.message)
