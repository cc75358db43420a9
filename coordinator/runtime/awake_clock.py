"""The coordinator's clock: it leaves out the time in which the process did not run.

A stopped process or a paused machine hears nothing, so this time is not taken from the devices' deadlines. A restart
does not count its downtime either.
"""

from __future__ import annotations

from edge_client.transport.clock import Clock

MAX_LATE_S = 10.0  # a wait that ends later than that was interrupted; a busy machine is less late


class AwakeClock:
    """`inner` without the time that `waited` has found."""

    def __init__(self, inner: Clock) -> None:
        self._inner, self._slept_s = inner, 0.0

    def now_s(self) -> float:
        return self._inner.now_s() - self._slept_s

    def unix_ms(self) -> int:
        return self._inner.unix_ms()

    def waited(self, since_s: float, timeout_s: float) -> None:
        """A wait of at most `timeout_s` that began at `since_s` is over; leave out what was much longer."""
        late_s = self.now_s() - since_s - timeout_s
        if late_s > MAX_LATE_S:
            self._slept_s += late_s
