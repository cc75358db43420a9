"""The dashboard over HTTP: one page, what it shows as server-sent events, and the buttons. Decides nothing.

    GET  /                      the page; its files lie under /static/
    GET  /api/stream            a snapshot, then what changes (event_hub.py), as text/event-stream
    GET  /api/grid?run=NAME     which device had which center, round by round
    GET  /api/map?run=NAME      where the devices' models lie, once that is computed (embedding_map.py)
    GET  /api/device/ID         one device
    GET  /api/files[/PATH]      the bundle
    GET  /api/join              what a new device needs
    POST /api/control           {"do": "pause" | "resume" | "close" | "stop"}; close names the exchange

Reads files that a fixed list names, nothing that a request could choose.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.dashboard.access import AccessControl
from coordinator.dashboard.event_hub import Hub, PageStream
from coordinator.dashboard.side_panels import EMPTY_PAGE_DATA, PageData
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.protocol import validators
from export.serve.http_gate import create_gated_app, read_json, require_json_type, security_headers

MAX_BODY_BYTES = 4 << 10
HEARTBEAT_S = 10.0  # from one sign of life of a quiet stream to the next
SEND_TIMEOUT_S = 20.0  # a page that takes nothing for so long is gone
MAX_NAME_CHARS = 128
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    **security_headers("script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"),
    "Cache-Control": "no-store",
}
COUNT_FIELD = validators.integer(0, 2**31)
COMMAND_SCHEMA = validators.record(
    validators.required(do=validators.one_of("pause", "resume", "close", "stop"))
    | validators.optional(
        exchange=validators.record(
            validators.required(id=validators.text(MAX_NAME_CHARS), round=COUNT_FIELD, exchange=COUNT_FIELD)
        ),
    )
)


class RunControl(Protocol):
    """What the buttons do; from another thread than the one that runs it. A `Server` is one."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close_round(self, key: ExchangeKey) -> None: ...
    def stop(self) -> None: ...


def create_app(
    view: Hub,
    control: RunControl,
    *,
    read_token: str | None,
    control_token: str | None,
    extra_routes: Sequence[BaseRoute] = (),
    page_data: PageData = EMPTY_PAGE_DATA,
) -> ASGIApp:
    """The whole interface. Without `read_token` it answers to this machine only; `extra_routes` guard themselves."""
    web = _DashboardHandlers(view, control, page_data)
    routes: list[BaseRoute] = [
        Route("/", web.page),
        Route("/static/{name}", web.static),
        Route("/api/stream", web.stream),
        Route("/api/grid", web.grid),
        Route("/api/map", web.map),
        Route("/api/device/{cid}", web.device),
        Route("/api/files", web.files),
        Route("/api/files/{path:path}", web.file),
        Route("/api/join", web.join),
        Route("/api/control", web.order, methods=["POST"]),
        *extra_routes,
    ]
    access = AccessControl(read=read_token, control=control_token)
    return create_gated_app(routes, rule=access.refuse, headers=HEADERS)


class _DashboardHandlers:
    """The handlers."""

    def __init__(self, hub: Hub, control: RunControl, page_data: PageData) -> None:
        self._hub, self._control, self._beside = hub, control, page_data
        self._static = _static()

    async def page(self, _: Request) -> Response:
        return self._static["index.html"]

    async def static(self, request: Request) -> Response:
        found = self._static.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "there is no such file")
        return found

    async def stream(self, _: Request) -> Response:
        page = self._hub.subscribe()
        if page is None:
            raise HTTPException(503, "too many pages look at this already", headers={"Retry-After": "10"})
        return _Events(self._hub, page)

    async def grid(self, request: Request) -> Response:
        found = self._hub.grid(_run(request))
        if found is None:
            raise HTTPException(404, "there is no such run")
        return JSONResponse(found)

    async def map(self, request: Request) -> Response:
        return JSONResponse({"map": await asyncio.to_thread(self._beside.map, _run(request))})

    async def device(self, request: Request) -> Response:
        cid = request.path_params["cid"]
        found = self._hub.device(cid)
        if found is None:
            raise HTTPException(404, "there is no such device")
        return JSONResponse({**found, "maps": await asyncio.to_thread(self._beside.device, cid)})

    async def files(self, _: Request) -> Response:
        bundle = await asyncio.to_thread(self._beside.files)
        return JSONResponse({"files": [] if bundle is None else bundle.entries()})

    async def file(self, request: Request) -> Response:
        bundle = await asyncio.to_thread(self._beside.files)
        path = None if bundle is None else bundle.path(request.path_params["path"])
        if path is None:
            raise HTTPException(404, "the bundle has no such file")
        return FileResponse(path, filename=path.name, media_type="application/octet-stream")

    async def join(self, request: Request) -> Response:
        base = f"{request.url.scheme}://{request.headers.get('host', '')[:MAX_NAME_CHARS]}"
        return JSONResponse(dict(self._beside.join(base)))

    async def order(self, request: Request) -> Response:
        require_json_type(request, "an order")
        order = COMMAND_SCHEMA(await read_json(request, MAX_BODY_BYTES, "an order"), "the order")
        does: dict[str, Callable[[], None]] = {
            "pause": self._control.pause,
            "resume": self._control.resume,
            "stop": self._control.stop,
            "close": lambda: self._close(order.get("exchange")),
        }
        does[order["do"]]()
        return JSONResponse({"done": order["do"]})

    def _close(self, wanted: Mapping[str, Any] | None) -> None:
        """The exchange that the person saw, and no later one."""
        now = self._hub.exchange
        if wanted is None:
            raise HTTPException(400, "say which exchange to close")
        if now is None or any(now[key] != wanted[key] for key in ("id", "round", "exchange")):
            raise HTTPException(409, "that exchange is not open any more")
        self._control.close_round(ExchangeKey(wanted["id"], wanted["round"], wanted["exchange"]))


class _Events(StreamingResponse):
    """A page's messages until one side leaves."""

    def __init__(self, hub: Hub, page: PageStream) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._lines(page), media_type="text/event-stream", headers=headers)
        self._hub, self._page = hub, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hub.unsubscribe(self._page)

    async def stream_response(self, send: Send) -> None:
        """Give up on whoever takes nothing: the connection ends unfinished, and a page that lives comes again."""

        async def patient(message: Message) -> None:
            await asyncio.wait_for(send(message), SEND_TIMEOUT_S)

        with suppress(asyncio.TimeoutError):
            await super().stream_response(patient)

    async def _lines(self, page: PageStream) -> AsyncIterator[bytes]:
        while (text := await page.next(HEARTBEAT_S)) is not None:
            yield text or b": still here\n\n"


def _static() -> dict[str, Response]:
    """Every file of the page by its name: what is not among them cannot be asked for."""
    found = {}
    for file in resources.files("coordinator.dashboard").joinpath("static").iterdir():
        kind = MEDIA_TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            headers = {"Cache-Control": "no-cache"}
            found[file.name] = Response(file.read_bytes(), media_type=kind, headers=headers)
    return found


def _run(request: Request) -> str:
    return request.query_params.get("run", "")[:MAX_NAME_CHARS]
