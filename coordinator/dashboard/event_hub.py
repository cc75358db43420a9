"""The hub between one coordinator and its open pages: each event goes into the view, and the changes to every page.

The coordinator's thread calls `event` and `status`; the pages live in an event loop of another thread. The stream of a
page that reads too slowly ends; the page connects again and begins with a new snapshot.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from coordinator.dashboard.displayed_metrics import DashboardView, Messages

MAX_PAGES = 48  # open at the same time; behind a proxy they share the connections of one address (server.py)
MAX_QUEUED_MESSAGES = 256  # per page


class Hub:
    """One view and its pages. Any thread may call every method but `subscribe`, which an event loop's thread calls."""

    def __init__(self, view: DashboardView | None = None) -> None:
        self._view = view or DashboardView()
        self._lock = threading.Lock()
        self._pages: set[PageStream] = set()
        self._closed = False

    def event(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            self._send(self._view.event(event))

    def status(self, seen: Mapping[str, Any]) -> None:
        with self._lock:
            self._send(self._view.status(seen))

    def broadcast(self, kind: str, data: Any) -> None:  # noqa: ANN401 - JSON
        """Send pages a message that is not part of the view."""
        with self._lock:
            self._send([(kind, data)])

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return self._view.snapshot()

    def grid(self, run: str) -> dict[str, Any] | None:
        with self._lock:
            return self._view.grid(run)

    def device(self, cid: str) -> dict[str, Any] | None:
        with self._lock:
            return self._view.device(cid)

    def newest(self, run: str) -> int | None:
        with self._lock:
            return self._view.newest(run)

    @property
    def exchange(self) -> dict[str, Any] | None:
        with self._lock:
            found: dict[str, Any] | None = self._view.now["exchange"]
            return found

    def subscribe(self) -> PageStream | None:
        """A new page whose first message is the snapshot; None when there are MAX_PAGES already."""
        with self._lock:
            if self._closed or len(self._pages) >= MAX_PAGES:
                return None
            page = PageStream(asyncio.get_running_loop())
            page.put(format_sse("snapshot", self._view.snapshot()))
            self._pages.add(page)
            return page

    def unsubscribe(self, page: PageStream) -> None:
        with self._lock:
            self._pages.discard(page)

    def close(self) -> None:
        """End every page's stream and accept no other page."""
        with self._lock:
            self._closed = True
            for page in self._pages:
                page.end()

    def _send(self, changes: Messages) -> None:
        if not self._pages:
            return
        for kind, data in changes:
            text = format_sse(kind, data)
            for page in self._pages:
                page.put(text)


class PageStream:
    """The queue of messages for one page."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._came = loop, asyncio.Event()
        self._messages: deque[bytes] = deque()
        self._ended = False

    def put(self, text: bytes) -> None:
        """Queue a message, from any thread; a page with a full queue is ended instead."""
        if len(self._messages) >= MAX_QUEUED_MESSAGES:
            self._messages.clear()
            self.end()
        elif not self._ended:
            self._messages.append(text)
            self._wake()

    def end(self) -> None:
        """End the stream, from any thread, after the messages in the queue."""
        self._ended = True
        self._wake()

    async def next(self, timeout_s: float) -> bytes | None:
        """The queued messages in one piece, which is empty when none came for `timeout_s`; None at the end."""
        if not self._messages and not self._ended:
            self._came.clear()
            if not self._messages and not self._ended:
                try:
                    await asyncio.wait_for(self._came.wait(), timeout_s)
                except asyncio.TimeoutError:
                    return b""
        parts = []
        while self._messages:
            parts.append(self._messages.popleft())
        return b"".join(parts) if parts or not self._ended else None

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._came.set)


def format_sse(kind: str, data: Any) -> bytes:  # noqa: ANN401 - JSON
    """One server-sent event (HTML living standard, 9.2). Its data is one line: this JSON has no line breaks."""
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
