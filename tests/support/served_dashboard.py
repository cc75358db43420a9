"""A dashboard served on this machine over a run folder, and plain HTTP requests to it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.dashboard.endpoint import dashboard_endpoint
from coordinator.dashboard.event_hub import Hub
from coordinator.dashboard.server import DashboardServer
from coordinator.storage.exchange_store import ExchangeKey
from tests.support.browser import close_pages_of
from tests.support.patience import patience
from tests.support.virtual_federation import config

PATIENCE_S = patience(60.0)
Anything = Any  # what a test passes on


@dataclass
class RecordedControl:
    """Remembers what was asked of it."""

    asked: list[Any] = field(default_factory=list)

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")

    def stop(self) -> None:
        self.asked.append("stop")

    def close_round(self, key: ExchangeKey) -> None:
        self.asked.append(key)


@dataclass
class DashboardSite:
    """`control` is its token."""

    hub: Hub
    buttons: RecordedControl
    port: int
    link: str
    folder: Path

    @property
    def control(self) -> str:
        return self.link.partition("#control=")[2]

    def ask(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """One request, sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def order(self, order: Anything, **headers: str) -> int:
        """A POST as the page sends it; `headers` with _ for -, an empty one is left out."""
        own = {
            "Authorization": f"Bearer {self.control}",
            "Content-Type": "application/json",
            "Origin": f"http://127.0.0.1:{self.port}",
            "Sec-Fetch-Site": "same-origin",
        }
        given = own | {name.replace("_", "-").title(): text for name, text in headers.items()}
        kept = {name: text for name, text in given.items() if text}
        return self.ask("POST", "/api/control", headers=kept, body=json.dumps(order).encode())[0]


@contextmanager
def serve_dashboard(folder: Path, **changes: Anything) -> Iterator[DashboardSite]:
    """A dashboard of its own on a free port of this machine. The test's pages of it are closed before it ends."""
    fixed = {"dashboard": "0", "broker": "mqtt://127.0.0.1:1883"}
    settings = config(folder / "run", **{**fixed, **changes})
    settings.folder.mkdir(parents=True, exist_ok=True)
    hub, buttons = Hub(), RecordedControl()
    running = DashboardServer(dashboard_endpoint(settings), settings, hub, buttons)
    try:
        yield DashboardSite(hub, buttons, running.port, running.link, settings.folder)
    finally:
        close_pages_of(running.link.partition("#")[0])
        running.close()
