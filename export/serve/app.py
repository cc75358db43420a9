"""The HTTP interface of `fedcenters-export serve`, as openapi.py describes it: routes and handlers for Starlette.

Files below /generations/ never change, but for the signature, which another key may replace: their ETag is their
SHA-256, a client may cache them for ever, and a range request resumes a download.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_client.errors import Malformed
from edge_client.protocol import validators
from export.bundle.reader import SIGNATURE_FILE
from export.serve import nearest
from export.serve.access import ServeAccess
from export.serve.generations import GenerationManager
from export.serve.http_gate import RangedFile, create_gated_app, read_json, require_json_type
from export.serve.openapi import openapi_document
from export.serve.site import SiteFile, index_content

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 10  # 1,024 centers' losses as JSON, with room
WATCH_INTERVAL_S = 1.0  # between two looks at the watched folder
MAX_CACHED_FILE_BYTES = 1 << 20  # a larger file is read from disk each time
IMMUTABLE_CACHE_CONTROL = "max-age=31536000, immutable"
MEDIA_TYPES = {".json": "application/json", ".md": "text/markdown; charset=utf-8", ".sig": "application/json"}
MAX_CACHED_FILES = 256
HEADERS = {"X-Content-Type-Options": "nosniff"}  # a bundle's file is no page, whatever is in it
RETRY_AFTER_S = 60  # of a report that a full disk has no room for
DEVICE_PATTERN = "[A-Za-z0-9_-]{1,64}"
REPORT_SCHEMA = validators.record(
    validators.required(
        device=validators.matching(DEVICE_PATTERN),
        generation=validators.matching("[0-9a-f]{64}"),
        accuracy=validators.number(0, 1),
    )
)


def create_serve_app(manager: GenerationManager, access: ServeAccess) -> ASGIApp:
    """The application, for requests that `access` does not refuse."""
    # a shared cache would hand out what is "public" to clients without the token (RFC 9111, 3.5)
    web = _ServeHandlers(manager, "public" if access.token is None else "private")
    routes = [
        Route("/health", web.health),
        Route("/openapi.json", web.openapi),
        Route("/index.json", web.index),
        Route("/centers", web.centers),
        Route("/centers/{center}/{file}", web.center_file),
        Route("/generations/{generation}/{path:path}", web.file),
        Route("/rollout", web.rollout),
        Route("/nearest", web.nearest, methods=["POST"]),
        Route("/reports", web.reports, methods=["POST"]),
    ]
    return create_gated_app(routes, rule=access.refuse, headers=HEADERS, lifespan=web.watching)


class _ServeHandlers:
    def __init__(self, manager: GenerationManager, caches: str) -> None:
        self._manager, self._cache_control = manager, f"{caches}, {IMMUTABLE_CACHE_CONTROL}"
        self._memory: dict[str, bytes] = {}  # SHA-256 -> content

    @asynccontextmanager
    async def watching(self, _: Starlette) -> AsyncIterator[None]:
        """Watch the bundle folder while the server runs."""
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
            if not self._manager.has_changed():
                continue
            try:
                found = await asyncio.to_thread(self._manager.fetch_generation)
                if found is not None:
                    self._manager.accept(found)
            except (OSError, MemoryError) as failed:  # else no later bundle would be served, and no line would tell it
                self._manager.look_again(failed)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"ok": True})

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(openapi_document())

    async def index(self, request: Request) -> Response:
        generation = self._manager.generation(_device(request))
        return _json_with_etag(request, index_content(generation.name))

    async def centers(self, request: Request) -> Response:
        generation = self._manager.generation(_device(request))
        listing = {
            "generation": generation.name,
            "model": generation.bundle.program.model,
            "centers": generation.centers,
        }
        return _json_with_etag(request, listing)

    async def center_file(self, request: Request) -> Response:
        generation, k = self._manager.generation(_device(request)), request.path_params["center"]
        center = next((one for one in generation.centers if str(one["center"]) == k), None)
        if center is None:
            raise HTTPException(404, "there is no such center; read /centers")
        files = center["files"]
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
        caches = "no-cache" if request.path_params["path"] == SIGNATURE_FILE else self._cache_control
        headers = {"ETag": etag, "Cache-Control": caches, "Accept-Ranges": "bytes"}
        if _etag_matches(request.headers.get("if-none-match"), etag):
            return Response(status_code=304, headers=headers)
        media = MEDIA_TYPES.get(file.path.suffix, "application/octet-stream")
        if "range" in request.headers or file.size > MAX_CACHED_FILE_BYTES:
            return RangedFile(file.path, headers=headers, media_type=media)
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
        names = {"stable": now.stable, "candidate": now.candidate, "withdrawn": list(now.withdrawn)}
        evidence = {"pairs": now.evidence.pairs, "needed": plan.pairs, "e_value": now.evidence.e_value}
        return JSONResponse({**names, "share": plan.share, "evidence": evidence})

    async def nearest(self, request: Request) -> Response:
        question = await _body(request)
        generation = self._manager.generation(nearest.parse_device(question.get("device")))
        return JSONResponse({"generation": generation.name, **nearest.answer_nearest(generation.bundle, question)})

    async def reports(self, request: Request) -> Response:
        report = REPORT_SCHEMA(await _body(request), "the report")
        before = self._manager.rollout
        after = before.add_report(report["device"], report["generation"], report["accuracy"], self._manager.plan)
        try:
            self._manager.store_rollout(after)
        except OSError as failed:
            log.warning("a report does not count: %s", failed)
            words = "the report cannot be stored now, and does not count; send it again later"
            raise HTTPException(503, words, headers={"Retry-After": str(RETRY_AFTER_S)}) from failed
        return JSONResponse({"counted": after is not before, "candidate": after.candidate})


async def _body(request: Request) -> dict[str, Any]:
    require_json_type(request, "a body")
    body = await read_json(request, MAX_BODY_BYTES, "a body")
    if not isinstance(body, dict):
        raise Malformed("bad_json", "the body is no JSON object")
    return body


def _device(request: Request) -> str | None:
    return nearest.parse_device(request.query_params.get("device"))


def _json_with_etag(request: Request, content: dict[str, Any]) -> Response:
    """JSON that the client revalidates each time, and that is sent again only when it has changed."""
    data = json.dumps(content, sort_keys=True).encode()
    headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Cache-Control": "no-cache"}
    if _etag_matches(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type="application/json")


def _etag_matches(given: str | None, etag: str) -> bool:
    """If-None-Match (RFC 9110, 13.1.2): a list of tags, weak ones too, or a star."""
    if given is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in given.split(",")]
    return "*" in tags or etag in tags
