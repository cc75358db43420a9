"""The routes of the page that makes a phone's browser an edge client.

    GET /phone/             the page, with its modules and style (edge_client/web)
    GET /phone/join.json    broker, federation, public signing keys, and the model's input, once it is compiled
    GET /phone/third/NAME   ONNX Runtime Web and MQTT.js (vendored_files.py)

All of it is public: a phone's secret is after the '#' of its own link, which a browser sends to no server. Only listed
files are served. The page may run WebAssembly and dial the broker, nothing else; it is isolated from other pages (COOP,
COEP), which threads need.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from coordinator import local_broker as brokers
from coordinator.config import CoordinatorConfig
from coordinator.identity.join_links import PHONE_PATH
from coordinator.identity.signing_key import trusted_keys
from coordinator.phone import vendored_files
from coordinator.storage.run_reader import read_program
from edge_client.errors import ConfigError, FedcentersError
from export.serve.http_gate import security_headers

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".wasm": "application/wasm",
}
INDEX_PAGE = "index.html"


def phone_routes(config: CoordinatorConfig, *, third: Path | None = None) -> list[BaseRoute]:
    """Routes for the coordinator's web app; third-party files come from `third` or from the default folder.

    Raises ConfigError where there is no broker for browsers, RuntimeMissing without the third-party files.
    """
    site = _PhoneHandlers(config, vendored_files.require_files(third or vendored_files.default_folder()))
    return [
        Route(PHONE_PATH, lambda _: RedirectResponse(f"{PHONE_PATH}/")),
        Route(f"{PHONE_PATH}/join.json", site.join),
        Route(f"{PHONE_PATH}/third/{{name}}", site.third),
        Route(f"{PHONE_PATH}/{{name:path}}", site.own),
    ]


def web_broker_url(config: CoordinatorConfig) -> str:
    """The ws:// or wss:// address that a browser dials; "" without one."""
    if config.web.broker:
        return config.web.broker
    own = brokers.local_broker(config.broker)
    return f"ws://127.0.0.1:{config.web.port}" if own is not None and config.web.port else ""


class _PhoneHandlers:
    def __init__(self, config: CoordinatorConfig, third: Path) -> None:
        self._config, self._third = config, third
        self._broker = web_broker_url(config)
        if not self._broker:
            raise ConfigError(
                f"{config.federation} has no broker that a browser can dial",
                hint="set web-port for a broker that serve starts, or web-broker = 'wss://host:port'",
            )
        self._headers, self._keys = _headers(self._broker), trusted_keys(config.signing_key_folder)
        self._files = _own_files()
        self._model: Mapping[str, Any] | None = None

    async def own(self, request: Request) -> Response:
        name = request.path_params["name"] or INDEX_PAGE
        found = self._files.get(name)
        if found is None:
            raise HTTPException(404, "there is no such file", headers=self._headers)
        data, tag = found
        headers = {**self._headers, "ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)

    async def third(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in vendored_files.VENDORED_FILES:
            raise HTTPException(404, "there is no such file", headers=self._headers)
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        path = self._third / (f"{name}{vendored_files.GZIP_SUFFIX}" if zipped else name)
        facts = await asyncio.to_thread(path.stat)
        tag = f'"{facts.st_size:x}-{facts.st_mtime_ns:x}"'
        headers = {**self._headers, "ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return FileResponse(path, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers, stat_result=facts)

    async def join(self, _: Request) -> Response:
        """The public facts that a browser needs before it connects."""
        if self._model is None:
            self._model = await asyncio.to_thread(model_summary, self._config.folder)
        facts = {
            "federation": self._config.federation,
            "broker": self._broker,
            "signing_keys": self._keys,
            "open": brokers.local_broker(self._config.broker) is not None,
            "model": self._model,
        }
        return JSONResponse(facts, headers={**self._headers, "Cache-Control": "no-store"})


def model_summary(folder: Path) -> dict[str, Any] | None:
    """The federation's model as {name, input, target, loss}; None until it is compiled."""
    try:
        program = read_program(folder)
    except (FedcentersError, sqlite3.Error, OSError, ValueError, KeyError):  # not yet compiled; the page asks again
        return None
    return {
        "name": program.model,
        "input": list(program.input),
        "target": list(program.target),
        "loss": program.loss,
    }


def _headers(broker: str) -> dict[str, str]:
    parts = urlsplit(broker)
    if parts.scheme not in ("ws", "wss") or not parts.hostname or set(broker) & set("; ,'\""):
        raise ConfigError(f"web-broker is {broker!r}", hint="write it as wss://host:port, or ws://127.0.0.1:port")
    origin = f"{parts.scheme}://{parts.netloc}"
    policy = (
        "script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data: blob:; "
        f"connect-src 'self' {origin}; worker-src 'self' blob:"
    )
    return {**security_headers(policy), "Cross-Origin-Embedder-Policy": "require-corp"}


@cache
def _own_files() -> dict[str, tuple[bytes, str]]:
    """Name -> (bytes, ETag) of the page's own files."""
    import edge_client

    folder = Path(edge_client.__file__).parent / "web"
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in MEDIA_TYPES and path.is_file():
            data = path.read_bytes()
            found[path.relative_to(folder).as_posix()] = (data, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    if INDEX_PAGE not in found:
        raise FedcentersError(f"the installation lacks {folder / INDEX_PAGE}", hint="install fedcenters again")
    return found
