"""The phone's page on a server of its own, and what stands on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from coordinator.config import read_config
from coordinator.phone import routes
from tests.support.node import third_party

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATIENCE_MS = 90_000


@contextlib.contextmanager
def served(config: Path) -> Iterator[str]:
    """The page's address, from a server in a thread of its own."""
    app = Starlette(routes=routes.phone_routes(read_config(config), third=third_party()))
    settings = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", ws="none", lifespan="off")
    opened = settings.bind_socket()
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{opened.getsockname()[1]}/phone/"
    server.should_exit = True
    thread.join(5)
    opened.close()


def text(page: Page, part: str, pattern: str) -> str:
    """Wait until a part of the page says this; what it says."""
    page.wait_for_function(
        "([id, pattern]) => new RegExp(pattern).test(document.getElementById(id).textContent)",
        arg=[part, pattern],
        timeout=PATIENCE_MS,
    )
    return page.locator(f"#{part}").inner_text()
