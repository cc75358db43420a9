"""Who may read the dashboard and who may steer with it, asked before anything else is done for a request.

Pure but for two buckets: of requests, and of wrong tokens.
A token travels in the header Authorization, which no other site can make a browser send, so a page elsewhere can steer
nothing. Without a read token the server is for this machine only, and answers only to this machine's own names: a name
of somebody else's that points here (DNS rebinding) is refused. What is sent to `/api/` needs the right; the page itself
holds no secrets.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from export.serve.rate_limits import RateLimiter

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SAME_ORIGIN_VALUES = (b"same-origin", b"none")  # Sec-Fetch-Site of our own page, and of an address that was typed
REQUESTS_PER_S, REQUESTS_BURST = 50.0, 200.0
TOKEN_FAILURES_PER_S, TOKEN_FAILURES_BURST = 0.5, 10.0  # wrong tokens per address
Headers = Iterable[tuple[bytes, bytes]]
Refusal = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class AccessControl:
    """The tokens; `read` None: whoever can reach the port may read. `control` None: nobody may steer."""

    read: str | None
    control: str | None
    requests: RateLimiter = field(default_factory=lambda: RateLimiter(REQUESTS_PER_S, REQUESTS_BURST))
    guesses: RateLimiter = field(default_factory=lambda: RateLimiter(TOKEN_FAILURES_PER_S, TOKEN_FAILURES_BURST))

    def refuse(self, method: str, path: str, headers: Headers, client: str, now_s: float) -> Refusal | None:
        """None for a request that may be answered, else the status and the words."""
        found = dict(headers)
        if self.requests.wait_s(client, now_s) > 0:
            return 429, "too many requests"
        if self.read is None and _host(found) not in LOOPBACK:
            return 421, "this dashboard answers to 127.0.0.1 and localhost only"
        if method not in ("GET", "HEAD") and not _ours(found):
            return 403, "only the dashboard's own page may do that"
        steers = path.startswith("/api/control")
        needed = path.startswith("/api/") and (steers or self.read is not None)
        if not needed or self._may(found.get(b"authorization", b""), steers=steers):
            return None
        return self._no(steers=steers, slower=self.guesses.wait_s(client, now_s) > 0)

    def _no(self, *, steers: bool, slower: bool) -> Refusal:
        if slower:
            return 429, "too many wrong tokens; wait a little"
        if steers and self.control is None:
            return 403, "nobody may steer with this dashboard"
        return 401, f"a token to {'steer' if steers else 'read'} is needed"

    def _may(self, given: bytes, *, steers: bool) -> bool:
        """Whoever may steer may read. Every token is compared, in a time that says nothing about it."""
        right = [
            hmac.compare_digest(given, f"Bearer {token}".encode())
            for token in (self.control, None if steers else self.read)
            if token is not None
        ]
        return any(right)


def _host(headers: dict[bytes, bytes]) -> str:
    """The name in the header Host, without its port."""
    host = headers.get(b"host", b"").decode("latin-1")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _ours(headers: dict[bytes, bytes]) -> bool:
    """Whether a request that changes something comes from our own page, or from no browser at all."""
    if headers.get(b"sec-fetch-site", b"same-origin") not in SAME_ORIGIN_VALUES:
        return False
    origin = headers.get(b"origin")
    return origin is None or origin.partition(b"://")[2] == headers.get(b"host")
