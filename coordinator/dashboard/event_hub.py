"""Between one coordinator and the pages that look at it: what happened goes into the view, from there to every page.

The coordinator's thread calls `event` and `status`; pages live in an event loop of another thread. A page that does not
read as fast as things happen is left behind: its stream ends, and it begins anew with a snapshot. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from coordinator.dashboard.metrics_view import DashboardView, Messages

MAX_PAGES = 64  # that may look at the same time
MAX_QUEUED_MESSAGES = 256  # messages for one page


class Hub:
    """One view and its pages. Every method may be called from any thread; `subscribe` from an event loop's."""

    def __init__(self, view: DashboardView | None = None) -> None:
        self._view = view or DashboardView()
        self._lock = threading.Lock()
        self._pages: set[PageStream] = set()
        self._closed = False

    def event(self, event: Mapping[str, Any]) -> None:
        """One event of metrics.jsonl happened."""
        with self._lock:
            self._spread(self._view.event(event))

    def status(self, seen: Mapping[str, Any]) -> None:
        """The server tells how things are."""
        with self._lock:
            self._spread(self._view.status(seen))

    def broadcast(self, kind: str, data: Any) -> None:  # noqa: ANN401 - JSON
        """Something that is no part of the view."""
        with self._lock:
            self._spread([(kind, data)])

    def snapshot(self) -> dict[str, Any]:
        """What a page begins with."""
        with self._lock:
            return self._view.snapshot()

    def grid(self, run: str) -> dict[str, Any] | None:
        """As View.grid."""
        with self._lock:
            return self._view.grid(run)

    def device(self, cid: str) -> dict[str, Any] | None:
        """As View.device."""
        with self._lock:
            return self._view.device(cid)

    def newest(self, run: str) -> int | None:
        """The last round of a run that is over, or None."""
        with self._lock:
            return self._view.newest(run)

    @property
    def exchange(self) -> dict[str, Any] | None:
        """The open exchange, or None."""
        with self._lock:
            found: dict[str, Any] | None = self._view.now["exchange"]
            return found

    def subscribe(self) -> PageStream | None:
        """A page whose first message is the snapshot; None when there are too many."""
        with self._lock:
            if self._closed or len(self._pages) >= MAX_PAGES:
                return None
            page = PageStream(asyncio.get_running_loop())
            page.put(format_sse("snapshot", self._view.snapshot()))
            self._pages.add(page)
            return page

    def unsubscribe(self, page: PageStream) -> None:
        """A page is gone."""
        with self._lock:
            self._pages.discard(page)

    def close(self) -> None:
        """End every page's stream, and take no other."""
        with self._lock:
            self._closed = True
            for page in self._pages:
                page.end()

    def _spread(self, told: Messages) -> None:
        if not self._pages:
            return
        for kind, data in told:
            text = format_sse(kind, data)
            for page in self._pages:
                page.put(text)


class PageStream:
    """The messages that wait for one page."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._came = loop, asyncio.Event()
        self._messages: deque[bytes] = deque()
        self._ended = False

    def put(self, text: bytes) -> None:
        """From any thread: one more message, or the end of a page that does not keep up."""
        if len(self._messages) >= MAX_QUEUED_MESSAGES:
            self._messages.clear()
            self.end()
        elif not self._ended:
            self._messages.append(text)
            self._wake()

    def end(self) -> None:
        """From any thread: nothing more will come."""
        self._ended = True
        self._wake()

    async def next(self, timeout_s: float) -> bytes | None:
        """All that waits, as one text, which is empty when nothing came for `timeout_s`; None at the end."""
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
    """One server-sent event (HTML living standard, 9.2): JSON has no line breaks."""
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
