"""Settings of the coordinator's HTTP servers: limits on headers, connections and idle time; TLS if given."""

from __future__ import annotations

from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

MAX_CONNECTIONS = 512
MAX_HEADER_BYTES = 16 << 10
IDLE_TIMEOUT_S = 20


def uvicorn_config(
    app: ASGIApp, host: str, port: int, *, certificate: Path | None = None, key: Path | None = None
) -> uvicorn.Config:
    """The settings of a server for `app`; `certificate` and `key` are PEM files."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="asyncio",
        http="h11",  # refuses a header longer than this
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        timeout_graceful_shutdown=1,
        ssl_certfile=certificate,
        ssl_keyfile=None if key is None else str(key),
    )
