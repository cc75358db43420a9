"""Who may read the dashboard and who may steer with it: the rule of its HTTP gate. Pure but for two rate limiters.

A token travels in the header Authorization, which no other site can make a browser send, so a page elsewhere cannot
steer. Without a read token the server is for this machine only and answers only to the machine's own names; a foreign
name that resolves to this machine (DNS rebinding) is refused. Requests below `/api/` need the right; the page itself
holds no secrets. The phone's page has some 60 files, and many phones may have one address: its files are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.identity.join_links import PHONE_FACTS, PHONE_PATH
from export.serve.http_gate import Refusal, RequestHead
from export.serve.listener import is_loopback
from export.serve.rate_limits import RateLimiter

REQUESTS_PER_S, REQUESTS_BURST = 50.0, 200.0
TOKEN_FAILURES_PER_S, TOKEN_FAILURES_BURST = 0.5, 10.0  # wrong tokens per address


@dataclass(frozen=True, kw_only=True)
class AccessControl:
    """The tokens. Without `read` every client that reaches the port may read; without `control` no client may steer."""

    read: str | None
    control: str | None
    requests: RateLimiter = field(default_factory=lambda: RateLimiter(REQUESTS_PER_S, REQUESTS_BURST))
    guesses: RateLimiter = field(default_factory=lambda: RateLimiter(TOKEN_FAILURES_PER_S, TOKEN_FAILURES_BURST))

    def refuse(self, head: RequestHead) -> Refusal | None:
        """None for a request that may be answered. The control token also gives the right to read."""
        if not _is_phone_file(head.path) and self.requests.wait_s(head.client, head.now_s) > 0:
            return Refusal(status=429, error="too many requests")
        if self.read is None and not is_loopback(head.host):
            told = "this dashboard answers to localhost and loopback addresses only"
            hint = "for another name set dashboard-read-token and dashboard-control-token"
            return Refusal(status=421, error=f"{told}; {hint}")
        if head.method not in ("GET", "HEAD") and not head.is_same_origin:
            told = "only the dashboard's own page may do that; a proxy must hand on Host as it came"
            return Refusal(status=403, error=told)
        steers = head.path.startswith("/api/control")
        needed = head.path.startswith("/api/") and (steers or self.read is not None)
        if not needed or head.has_token(self.control, None if steers else self.read):
            return None
        return self._refuse_token(head, steers=steers)

    def _refuse_token(self, head: RequestHead, *, steers: bool) -> Refusal:
        if self.guesses.wait_s(head.client, head.now_s) > 0:
            return Refusal(status=429, error="too many wrong tokens; wait a little")
        if steers and self.control is None:
            return Refusal(status=403, error="this dashboard has no control token")
        return Refusal(status=401, error=f"a token to {'steer' if steers else 'read'} is needed")


def _is_phone_file(path: str) -> bool:
    return path.startswith(f"{PHONE_PATH}/") and path != PHONE_FACTS
