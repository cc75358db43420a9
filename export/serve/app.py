"""The HTTP interface of a site, for Starlette: what openapi.py describes. Knows requests and responses.

Files below /generations/ never change, so their ETag is their hash, they may be cached for ever, and ranges resume.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.messages import parse_json
from export.serve import http_errors, nearest
from export.serve.generations import GenerationManager
from export.serve.openapi import openapi_document
from export.serve.rate_limits import BODY_TIMEOUT_S, MAX_BODY_BYTES, MAX_RANGE_CHARS, RateLimiter
from export.serve.site import SiteFile, index_content

WATCH_INTERVAL_S = 1.0  # from one look at the watched folder to the next
MAX_CACHED_FILE_BYTES = 1 << 20  # bytes of a file that is kept in memory
IMMUTABLE_CACHE_CONTROL = "public, max-age=31536000, immutable"
MEDIA_TYPES = {".json": "application/json", ".md": "text/markdown; charset=utf-8", ".sig": "application/json"}
MAX_CACHED_FILES = 256  # files in memory
DEVICE_PATTERN = "[A-Za-z0-9_-]{1,64}"
REPORT_SCHEMA = validators.record(
    validators.required(
        device=validators.matching(DEVICE_PATTERN),
        generation=validators.matching("[0-9a-f]{64}"),
        accuracy=validators.number(0, 1),
    )
)
Handler = Callable[[Request], Awaitable[Response]]


def create_serve_app(manager: GenerationManager, *, rate: RateLimiter, token: str | None = None) -> ASGIApp:
    """The whole interface. `rate` counts per client address; with a `token` every request must bear it."""
    web = _ServeHandlers(manager)
    routes = [
        Route("/health", web.health),
        Route("/openapi.json", web.openapi),
        Route("/index.json", web.index),
        Route("/centers", web.centers),
        Route("/centers/{center:int}/{file}", web.center_file),
        Route("/generations/{generation}/{path:path}", web.file),
        Route("/rollout", web.rollout),
        Route("/nearest", web.nearest, methods=["POST"]),
        Route("/reports", web.reports, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: http_errors.on_http_exception, Malformed: http_errors.on_malformed}
    inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=web.watching)
    inner.router.redirect_slashes = False  # a path is a file's or it is none
    return _ServeGate(inner, rate, token)


class _ServeGate:
    """Who may come in, and how often; before anything else is done for a request."""

    def __init__(self, inner: ASGIApp, rate: RateLimiter, token: str | None) -> None:
        self._inner, self._rate = inner, rate
        self._bearer = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        client = scope["client"][0] if scope.get("client") else ""
        wait_s = self._rate.wait_s(client, time.monotonic())
        if wait_s > 0:
            headers = {"Retry-After": str(int(wait_s) + 1)}
            await http_errors.error_response(429, "too many requests", headers)(scope, receive, send)
        elif self._bearer is not None and scope["path"] != "/health" and not self._may(scope):
            await http_errors.error_response(401, "a token is needed", {"WWW-Authenticate": "Bearer"})(
                scope, receive, send
            )
        else:
            await self._inner(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return self._bearer is not None and hmac.compare_digest(given, self._bearer)


class _ServeHandlers:
    """The handlers."""

    def __init__(self, manager: GenerationManager) -> None:
        self._manager = manager
        self._memory: dict[str, bytes] = {}  # by hash

    @asynccontextmanager
    async def watching(self, _: Starlette) -> AsyncIterator[None]:
        """Look for new bundles as long as the server lives."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if (
                self._manager.has_changed()
                and (found := await asyncio.to_thread(self._manager.fetch_generation)) is not None
            ):
                self._manager.accept(found)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"ok": True})

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(openapi_document())

    async def index(self, request: Request) -> Response:
        generation = self._manager.generation(_device(request))
        return _fresh(request, index_content(generation.name))

    async def centers(self, request: Request) -> Response:
        generation = self._manager.generation(_device(request))
        told = {"generation": generation.name, "model": generation.bundle.program.model, "centers": generation.centers}
        return _fresh(request, told)

    async def center_file(self, request: Request) -> Response:
        generation, k = self._manager.generation(_device(request)), request.path_params["center"]
        if not 0 <= k < len(generation.centers):
            raise HTTPException(404, f"there is no center {k}")
        files = generation.centers[k]["files"]
        if request.path_params["file"] not in files:
            raise HTTPException(404, f"center {k} has the files {', '.join(sorted(files))}")
        return RedirectResponse(files[request.path_params["file"]]["url"], headers={"Cache-Control": "no-cache"})

    async def file(self, request: Request) -> Response:
        generation = self._manager.generations.get(request.path_params["generation"])
        if generation is None:
            raise HTTPException(404, "there is no such generation; read /index.json again")
        file = generation.files.get(request.path_params["path"])
        if file is None:
            raise HTTPException(404, "the generation has no such file; its manifest.json names all")
        etag = f'"{file.sha256}"'
        headers = {"ETag": etag, "Cache-Control": IMMUTABLE_CACHE_CONTROL, "Accept-Ranges": "bytes"}
        if _matches(request.headers.get("if-none-match"), etag):
            return Response(status_code=304, headers=headers)
        ranges = request.headers.get("range", "")
        if len(ranges) > MAX_RANGE_CHARS:
            raise HTTPException(416, "the Range header is too long", headers={"Content-Range": f"bytes */{file.size}"})
        media = MEDIA_TYPES.get(file.path.suffix, "application/octet-stream")
        if ranges or file.size > MAX_CACHED_FILE_BYTES:
            return FileResponse(file.path, headers=headers, media_type=media)
        return Response(self._content(file), headers=headers, media_type=media)

    def _content(self, file: SiteFile) -> bytes:
        data = self._memory.get(file.sha256)
        if data is None:
            if len(self._memory) >= MAX_CACHED_FILES:
                self._memory.pop(next(iter(self._memory)))
            data = self._memory[file.sha256] = file.path.read_bytes()
        return data

    async def rollout(self, _: Request) -> Response:
        now, plan = self._manager.rollout, self._manager.plan
        told = {"stable": now.stable, "candidate": now.candidate, "withdrawn": list(now.withdrawn)}
        evidence = {"pairs": now.evidence.pairs, "needed": plan.pairs, "e_value": now.evidence.e_value}
        return JSONResponse({**told, "share": plan.share, "evidence": evidence})

    async def nearest(self, request: Request) -> Response:
        question = await _body(request)
        generation = self._manager.generation(nearest.parse_device(question.get("device")))
        return JSONResponse({"generation": generation.name, **nearest.answer_nearest(generation.bundle, question)})

    async def reports(self, request: Request) -> Response:
        report = REPORT_SCHEMA(await _body(request), "the report")
        before = self._manager.rollout
        after = before.add_report(report["device"], report["generation"], report["accuracy"], self._manager.plan)
        self._manager.store_rollout(after)
        return JSONResponse({"counted": after is not before, "candidate": after.candidate})


async def _body(request: Request) -> dict[str, Any]:
    """A JSON object of at most BODY_BYTES, sent within BODY_S; more is not read."""
    try:
        data = await asyncio.wait_for(_read(request), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"a body is sent within {BODY_TIMEOUT_S:.0f} s") from None
    question = parse_json(data, MAX_BODY_BYTES)
    if not isinstance(question, dict):
        raise Malformed("bad_json", "the body is no JSON object")
    return question


async def _read(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"a body has at most {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _device(request: Request) -> str | None:
    return nearest.parse_device(request.query_params.get("device"))


def _fresh(request: Request, content: dict[str, Any]) -> Response:
    """JSON that is asked for again each time, and sent again only when it has changed."""
    data = json.dumps(content, sort_keys=True).encode()
    headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Cache-Control": "no-cache"}
    if _matches(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type="application/json")


def _matches(given: str | None, etag: str) -> bool:
    """If-None-Match (RFC 9110, 13.1.2): a list of tags, weak ones too, or a star."""
    if given is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in given.split(",")]
    return "*" in tags or etag in tags
