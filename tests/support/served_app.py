"""An ASGI application behind uvicorn as the project's servers run it, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from export.serve.listener import ConnectionSlots, open_listener
from export.serve.uvicorn_settings import TIMEOUT_S, uvicorn_config
from tests.support.patience import patience

PATIENCE_S = patience(60.0)


@contextmanager
def serve_app(
    app: ASGIApp, *, total: int = 64, per_address: int = 8, timeout_s: float = TIMEOUT_S, fast: bool = False
) -> Iterator[tuple[int, uvicorn.Server]]:
    """-> its port on this machine, and the server."""
    slots = ConnectionSlots(total=total, per_address=per_address)
    listener = open_listener("127.0.0.1", 0, what="a test", option="none", slots=slots)
    port = int(listener.getsockname()[1])
    server = uvicorn.Server(uvicorn_config(app, timeout_s=timeout_s, fast=fast))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield port, server
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
