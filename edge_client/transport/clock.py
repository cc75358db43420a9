"""The clocks of a device or a server: a monotonic one for decisions, the wall clock for timestamps."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The clock that a client or a server is given; tests run both in virtual time."""

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
