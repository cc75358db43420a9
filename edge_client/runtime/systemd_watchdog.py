"""Messages to systemd's watchdog: datagrams to $NOTIFY_SOCKET. Without that variable nothing is sent.

`notify_alive` is called from the loop that makes progress, never from a timer thread: that would hide a hang.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

SIGNALS_PER_INTERVAL = 4  # signs of life per watchdog interval


class Watchdog:
    """One service's line to its manager. Times are seconds on the caller's clock."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name  # "@": the abstract namespace
        wanted = environment.get("WATCHDOG_USEC", "")
        self._every_s = int(wanted) / 1e6 / SIGNALS_PER_INTERVAL if wanted.isdecimal() else float("inf")
        self._due_s = float("-inf")
        self._more = f"\nEXTEND_TIMEOUT_USEC={wanted}"  # of the start: reading the samples may take long

    def notify_ready(self) -> None:
        self._more = ""
        self._say("READY=1")

    def notify_stopping(self) -> None:
        self._say("STOPPING=1")

    def notify_alive(self, now_s: float) -> None:
        """Report progress of the loop; sent a few times per watchdog interval, however often it is called."""
        if now_s >= self._due_s and self._every_s != float("inf"):
            self._due_s = now_s + self._every_s
            self._say(f"WATCHDOG=1{self._more}")

    def _say(self, text: str) -> None:
        if not self._address:
            return
        # a manager that does not listen is no reason to stop training
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line,
        ):
            line.sendto(text.encode(), self._address)
