"""The phone's page on a server of its own, and what stands on it."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from coordinator.config import read_config
from coordinator.phone import page_files, routes
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import Array
from tests.support.node import third_party
from tests.support.patience import patience

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATIENCE_MS = patience(200_000)  # a coordinator compiles before, on a machine that may be busy
SCALE = 16  # of scikit-learn's digits: ink from 0 to 16


@contextlib.contextmanager
def served(config: Path, *, port: int = 0, around: Callable[[ASGIApp], ASGIApp] | None = None) -> Iterator[str]:
    """The page's address, from a server in a thread of its own; `port` 0 is a free one. `around` wraps what answers."""
    app: ASGIApp = Starlette(routes=routes.phone_routes(read_config(config), third=third_party()))
    settings = uvicorn.Config(
        around(app) if around else app, host="127.0.0.1", port=port, log_level="error", ws="none", lifespan="off"
    )
    opened = settings.bind_socket()
    opened.listen()  # a browser that is quicker than the thread waits
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{opened.getsockname()[1]}/phone/"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_MS / 1000)
        opened.close()


def another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation is upgraded: one file of the page is another."""
    own: Mapping[str, bytes] = page_files._own_files()
    changed = {**own, "style.css": own["style.css"] + b"/* newer */"}
    monkeypatch.setattr(page_files, "_own_files", lambda: changed)


def text(page: Page, part: str, pattern: str) -> str:
    """Wait until a part of the page says this; what it says."""
    page.wait_for_function(
        """([id, pattern]) => {
          const part = document.getElementById(id);  // null in a page that is only half loaded
          return part !== null && new RegExp(pattern).test(part.textContent);
        }""",
        arg=[part, pattern],
        timeout=PATIENCE_MS,
    )
    return page.locator(f"#{part}").inner_text()


def ring(page: Page, canvas: str) -> None:
    """Draw a zero with the mouse: an upright oval."""
    box = page.locator(canvas).bounding_box()
    assert box is not None
    for i in range(25):
        a = 2 * math.pi * i / 24
        across, down = 0.5 + 0.2 * math.cos(a), 0.5 + 0.3 * math.sin(a)
        page.mouse.move(box["x"] + box["width"] * across, box["y"] + box["height"] * down)
        if i == 0:
            page.mouse.down()
    page.mouse.up()


def digits() -> tuple[Array, Array]:
    """scikit-learn's digits: [n, 64] ink from 0 to SCALE, and labels."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    return raw.data.astype(np.float32), raw.target.astype(np.int64)


def local(x: Array, y: Array, train: int) -> DeviceData:
    """The samples of a Python device; the first `train` are trained on."""
    x = x.reshape(-1, 1, 8, 8) / SCALE
    return DeviceData(train=Dataset(x[:train], y[:train]), test=Dataset(x[train:], y[train:]))


def csv(x: Array, y: Array) -> bytes:
    """A table as the page reads it."""
    head = ",".join([*(f"p{i}" for i in range(x.shape[1])), "label"])
    rows = (",".join([*(f"{value:g}" for value in row), str(label)]) for row, label in zip(x, y, strict=True))
    return "\n".join([head, *rows]).encode()


def listens(port: int) -> bool:
    """Whether something accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def load_table(page: Page, tmp_path: Path, samples: int) -> None:
    """Give the page the first digits as a table."""
    page.get_by_role("tab", name="Table").click()
    page.fill("#scale", str(SCALE))
    x, y = digits()
    table = tmp_path / "digits.csv"
    table.write_bytes(csv(x[:samples], y[:samples]))
    page.set_input_files("#table", table)
