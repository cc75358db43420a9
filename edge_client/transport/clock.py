"""Time for those who wait on a transport: a monotonic clock decides, the wall clock is only written down."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Whoever runs a client or a server says what time is; tests run both in virtual time."""

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
