"""The routes of the page that makes a phone's browser an edge client.

    GET /phone/                     the page; app.webmanifest and worker.js make it an app (page_files.py)
    GET /phone/join.json            broker, federation, signing keys, page's version, and the model, once it is compiled
    GET /phone/VERSION/NAME         the page's modules, style and icons (edge_client/web)
    GET /phone/third/THIRD/NAME     ONNX Runtime Web and MQTT.js (vendored_files.py)

All of it is public: a phone's secret is after the '#' of its own link, which a browser sends to no server. Only listed
files are served. The page may run WebAssembly and dial the broker, nothing else; it is isolated from other pages (COOP,
COEP), which threads need.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from coordinator import local_broker as brokers
from coordinator.config import CoordinatorConfig
from coordinator.identity.join_links import PHONE_FACTS, PHONE_PATH
from coordinator.identity.signing_key import read_signing_key, trusted_keys
from coordinator.phone import vendored_files
from coordinator.phone.page_files import INDEX, MEDIA_TYPES, PageFile, read_page_files
from coordinator.storage.run_reader import read_program
from edge_client.errors import ConfigError, FedcentersError
from edge_client.protocol.nearest.catalog import fitting_class_names
from export.serve.http_gate import RangedFile, security_headers

RELATIVE_PATH = f"{PHONE_PATH.lstrip('/')}/"  # a redirect to it keeps a proxy's path
FOR_EVER = "public, max-age=31536000, immutable"  # what is below a version's folder never changes


def phone_routes(config: CoordinatorConfig, *, third: Path | None = None) -> list[BaseRoute]:
    """Routes for the coordinator's web app; third-party files come from `third` or from the default folder.

    Raises ConfigError where there is no broker for browsers, RuntimeMissing without the third-party files.
    """
    site = _PhoneHandlers(config, vendored_files.require_files(third or vendored_files.default_folder()))
    return [
        Route(PHONE_PATH, lambda _: RedirectResponse(RELATIVE_PATH)),
        Route(PHONE_FACTS, site.join),
        Route(f"{PHONE_PATH}/third/{{version}}/{{name}}", site.third),
        Route(f"{PHONE_PATH}/{{version}}/{{name:path}}", site.asset),
        Route(f"{PHONE_PATH}/{{name}}", site.entry),
        Route(f"{PHONE_PATH}/", site.entry),
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
        self._headers, self._page = _headers(self._broker), read_page_files(third)
        trusted_keys(config.signing_key_folder)  # makes the key where the coordinator did not start yet

    async def entry(self, request: Request) -> Response:
        """The page, its manifest, its service worker: a browser asks each time whether they changed."""
        name = request.path_params.get("name", INDEX)
        found = self._page.entries.get(name)
        if found is None:
            raise HTTPException(404, "there is no such file", headers=self._headers)
        headers = {"ETag": found.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers={**self._headers, **headers})
        return self._answer(request, name, found, headers)

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = self._page.assets.get(name)
        if found is None or request.path_params["version"] != self._page.version:
            raise HTTPException(404, "there is no such file", headers=self._headers)
        return self._answer(request, name, found, {"Cache-Control": FOR_EVER})

    def _answer(self, request: Request, name: str, found: PageFile, headers: Mapping[str, str]) -> Response:
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        coding = {"Content-Encoding": "gzip"} if zipped else {}
        return Response(
            found.zipped if zipped else found.data,
            media_type=MEDIA_TYPES[Path(name).suffix],
            headers={**self._headers, "Vary": "Accept-Encoding", **headers, **coding},
        )

    async def third(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in vendored_files.VENDORED_FILES or request.path_params["version"] != self._page.third_version:
            raise HTTPException(404, "there is no such file", headers=self._headers)
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        path = self._third / (f"{name}{vendored_files.GZIP_SUFFIX}" if zipped else name)
        headers = {**self._headers, "Cache-Control": FOR_EVER, "Vary": "Accept-Encoding"}
        if zipped:
            headers["Content-Encoding"] = "gzip"
        media = MEDIA_TYPES[Path(name).suffix]
        return RangedFile(path, media_type=media, headers=headers, of_errors=self._headers)

    async def join(self, _: Request) -> Response:
        """The public facts that a browser needs before it connects.

        Key and model are read each time: beside this server the coordinator may change its key, or begin anew.
        """
        try:
            keys, model = await asyncio.to_thread(self._read_facts)
        except (ConfigError, OSError):
            raise HTTPException(503, "the coordinator's key is not there", headers=self._headers) from None
        facts = {
            "federation": self._config.federation,
            "broker": self._broker,
            "signing_keys": keys,
            "open": brokers.local_broker(self._config.broker) is not None,
            "page": self._page.version,
            "model": model,
        }
        return JSONResponse(facts, headers={**self._headers, "Cache-Control": "no-store"})

    def _read_facts(self) -> tuple[list[str], Mapping[str, Any] | None]:
        read_signing_key(self._config.signing_key_folder)  # a folder that was removed gets no key from here
        return trusted_keys(self._config.signing_key_folder), model_summary(self._config)


def model_summary(config: CoordinatorConfig) -> dict[str, Any] | None:
    """The federation's model as {name, input, target, loss}; None until compiled.

    Also the program's `parts`, if any, and `classes`, the names of the classes 0, 1, ..., if any.
    """
    names = fitting_class_names(config.bundle.class_names)
    try:
        program = read_program(config.folder)
    except (FedcentersError, sqlite3.Error, OSError, ValueError, KeyError):  # not yet compiled; the page asks again
        return None
    return {
        "name": program.model,
        "input": list(program.input),
        "target": list(program.target),
        "loss": program.loss,
        **({"parts": [part.to_json() for part in program.parts]} if program.parts else {}),
        **({"classes": list(names)} if names else {}),
    }


def _headers(broker: str) -> dict[str, str]:
    parts = urlsplit(broker)
    if parts.scheme not in ("ws", "wss") or not parts.hostname or set(broker) & set("; ,'\""):
        raise ConfigError(f"web-broker is {broker!r}", hint="write it as wss://host:port, or ws://127.0.0.1:port")
    origin = f"{parts.scheme}://{parts.netloc}"
    policy = (
        "script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data: blob:; "
        f"connect-src 'self' {origin}; worker-src 'self' blob:; manifest-src 'self'"
    )
    return {**security_headers(policy), "Cross-Origin-Embedder-Policy": "require-corp"}
