"""The dashboard's routes: one page, its numbers as server-sent events, and the buttons.

    GET  /                      the page; its files are under /static/
    GET  /api/stream            a snapshot, then each change (event_hub.py), as text/event-stream
    GET  /api/grid?run=NAME     which device had which center, round by round
    GET  /api/map?run=NAME      the devices' models in two dimensions (embedding_map.py), once they are computed;
                                or the round that has no such map, and why
    GET  /api/device/ID         one device
    GET  /api/files[/PATH]      the bundle
    GET  /api/join              what a new device needs
    POST /api/control           {"do": "pause" | "resume" | "close" | "stop"}; close names the exchange

A request chooses among files that are listed beforehand; no path is put together from its text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.dashboard.access import AccessControl
from coordinator.dashboard.event_hub import Hub, PageStream
from coordinator.dashboard.side_panels import EMPTY_PANELS, SidePanels
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.protocol import validators
from export.serve.http_gate import RangedFile, create_gated_app, read_json, require_json_type, security_headers

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 10
HEARTBEAT_S = 10.0  # between two comments on a stream without events
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
    """What the buttons call, from a thread other than the coordinator's. A `Server` implements it."""

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
    panels: SidePanels = EMPTY_PANELS,
) -> ASGIApp:
    """The application. Without `read_token` it answers to this machine only; `extra_routes` set their own headers."""
    web = _DashboardHandlers(view, control, panels)
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
        Route("/api/control", web.command, methods=["POST"]),
        *extra_routes,
    ]
    access = AccessControl(read=read_token, control=control_token)
    return create_gated_app(routes, rule=access.refuse, headers=HEADERS)


class _DashboardHandlers:
    def __init__(self, hub: Hub, control: RunControl, panels: SidePanels) -> None:
        self._hub, self._control, self._panels = hub, control, panels
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
        return JSONResponse(dict(await asyncio.to_thread(self._panels.map, _run(request))))

    async def device(self, request: Request) -> Response:
        cid = request.path_params["cid"]
        found = self._hub.device(cid)
        if found is None:
            raise HTTPException(404, "there is no such device")
        return JSONResponse({**found, "maps": await asyncio.to_thread(self._panels.device, cid)})

    async def files(self, _: Request) -> Response:
        bundle = await asyncio.to_thread(self._panels.files)
        return JSONResponse({"files": [] if bundle is None else bundle.entries()})

    async def file(self, request: Request) -> Response:
        bundle = await asyncio.to_thread(self._panels.files)
        path = None if bundle is None else bundle.path(request.path_params["path"])
        if path is None:
            raise HTTPException(404, "the bundle has no such file")
        return RangedFile(path, filename=path.name, media_type="application/octet-stream")

    async def join(self, request: Request) -> Response:
        """By the address of the page, perhaps of a proxy with TLS; a false header changes its sender's links only."""
        scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
        base = f"{scheme}://{request.headers.get('host', '')[:MAX_NAME_CHARS]}"
        return JSONResponse(dict(self._panels.join(base)))

    async def command(self, request: Request) -> Response:
        require_json_type(request, "an order")
        command = COMMAND_SCHEMA(await read_json(request, MAX_BODY_BYTES, "an order"), "the order")
        actions: dict[str, Callable[[], None]] = {
            "pause": self._control.pause,
            "resume": self._control.resume,
            "stop": self._control.stop,
            "close": lambda: self._close(command.get("exchange")),
        }
        actions[command["do"]]()
        log.warning("ordered on the dashboard: %s", command["do"])  # else a log ends there without a reason
        return JSONResponse({"done": command["do"]})

    def _close(self, wanted: Mapping[str, Any] | None) -> None:
        """Close the exchange that the page showed when its button was pressed, and no later one."""
        now = self._hub.exchange
        if wanted is None:
            raise HTTPException(400, "say which exchange to close")
        if now is None or any(now[key] != wanted[key] for key in ("id", "round", "exchange")):
            raise HTTPException(409, "that exchange is not open any more")
        self._control.close_round(ExchangeKey(wanted["id"], wanted["round"], wanted["exchange"]))


class _Events(StreamingResponse):
    """A page's events until the page or the server closes the stream."""

    def __init__(self, hub: Hub, page: PageStream) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._lines(page), media_type="text/event-stream", headers=headers)
        self._hub, self._page = hub, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hub.unsubscribe(self._page)

    async def _lines(self, page: PageStream) -> AsyncIterator[bytes]:
        while (text := await page.next(HEARTBEAT_S)) is not None:
            yield text or b": still here\n\n"


def _static() -> dict[str, Response]:
    """Name -> response of each of the page's files; no other file is served below /static/."""
    found = {}
    for file in resources.files("coordinator.dashboard").joinpath("static").iterdir():
        kind = MEDIA_TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            headers = {"Cache-Control": "no-cache"}
            found[file.name] = Response(file.read_bytes(), media_type=kind, headers=headers)
    return found


def _run(request: Request) -> str:
    return request.query_params.get("run", "")[:MAX_NAME_CHARS]
