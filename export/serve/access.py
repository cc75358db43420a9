"""Who may ask `fedcenters-export serve`, and for what: the rule of its HTTP gate. Pure but for its rate limiter.

A page of another site must not use a browser of this network: the server answers to addresses, to `localhost` and to
the names that it was given (a rebound DNS name is none of them), and takes no POST from another origin. A report
counts in a roll-out, so it needs a token wherever other machines reach the server.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from export.serve.http_gate import Refusal, RequestHead
from export.serve.rate_limits import RateLimiter


@dataclass(frozen=True, kw_only=True)
class ServeAccess:
    """`rate` counts per address. With `token` every request but /health bears it, with `report_token` each report.

    `names` are host names of this server, in lower case; `is_local`: only this machine reaches it.
    """

    rate: RateLimiter
    token: str | None = field(default=None, repr=False)
    report_token: str | None = field(default=None, repr=False)
    names: frozenset[str] = frozenset()
    is_local: bool = False

    def refuse(self, head: RequestHead) -> Refusal | None:
        """None for a request that may be answered. The token for reports also gives the right to read."""
        wait_s = self.rate.wait_s(head.client, head.now_s)
        if wait_s > 0:
            return Refusal(status=429, error="too many requests", headers={"Retry-After": str(int(wait_s) + 1)})
        may_read = head.has_token(self.token, self.report_token)
        if not may_read and not self._is_own_name(head.host):
            return Refusal(status=421, error="this server has another name; start it with --name")
        if self.token is not None and head.path != "/health" and not may_read:
            return _token_needed("a token is needed")
        if head.method == "POST" and not head.is_same_origin:
            return Refusal(status=403, error="a page of another site asks nothing here")
        return self._refuse_report(head) if head.path == "/reports" else None

    def _refuse_report(self, head: RequestHead) -> Refusal | None:
        needed = self.report_token or self.token
        if needed is None:
            return None if self.is_local else Refusal(status=403, error="no reports without --report-token")
        return None if head.has_token(needed) else _token_needed("a token for reports is needed")

    def _is_own_name(self, host: str) -> bool:
        if host.lower() in self.names or host.lower() == "localhost":
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True


def _token_needed(error: str) -> Refusal:
    return Refusal(status=401, error=error, headers={"WWW-Authenticate": "Bearer"})
