"""A limit on the requests of each client: a token bucket per address. Time is an argument.

At most MAX_CLIENTS addresses are remembered; the one that was silent longest is dropped first and begins again with a
full bucket.
"""

from __future__ import annotations

from collections import OrderedDict

from export.serve.listener import client_network

MAX_CLIENTS = 10_000


class RateLimiter:
    """At most `per_s` requests a second for each client, `burst` at once; 0 a second: no limit."""

    def __init__(self, per_s: float, burst: float | None = None) -> None:
        self.per_s, self.burst = per_s, max(1.0, 2 * per_s if burst is None else burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> (requests left, at which time)

    def wait_s(self, client: str, now_s: float) -> float:
        """Take one request and return 0, or return the seconds until there is one to take."""
        if self.per_s <= 0:
            return 0.0
        client = client_network(client)
        left, then_s = self._buckets.pop(client, (self.burst, now_s))
        left = min(self.burst, left + (now_s - then_s) * self.per_s)
        wait_s = 0.0 if left >= 1 else (1 - left) / self.per_s
        self._buckets[client] = (left - 1 if wait_s == 0 else left, now_s)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return wait_s
