"""Time as the server sees it: a monotonic clock that decides, and the wall clock that is only written down."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Whoever runs a server says what time is; tests run it in virtual time."""

    def now_s(self) -> float:
        """Seconds on a clock that never jumps back."""
        ...

    def unix_ms(self) -> int:
        """Wall time in milliseconds, for logs only."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_ms(self) -> int:
        return time.time_ns() // 1_000_000
