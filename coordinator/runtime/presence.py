"""Who exists, what it can do, whether it is here, and how fast it may ask.

Presence is a hint: deadlines decide. No MQTT, no disk, no clock; time comes in as seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edge_client.protocol.task import ClientId


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device as it last announced itself. `birth` grows by one per connection; `n` counts its training samples."""

    birth: int
    state: str  # on, off, sleep, lost
    engine: str = ""
    n: int = 0
    codecs: tuple[str, ...] = ()

    @property
    def here(self) -> bool:
        """Whether it can be asked now, as far as one can know."""
        return self.state == "on"


@dataclass
class Fleet:
    """Every device that announced itself, at most `limit`; what comes after costs one counter."""

    limit: int
    devices: dict[ClientId, Device] = field(default_factory=dict)
    turned_away: int = 0

    def hear(self, cid: ClientId, message: Mapping[str, Any]) -> bool:
        """Take in one `st`; -> whether it changed what we know. A will of an earlier connection changes nothing."""
        known = self.devices.get(cid)
        if known is None and len(self.devices) >= self.limit:
            self.turned_away += 1
            return False
        if message["s"] == "on":
            heard = _born(message)
        elif known is None or message["bd"] != known.birth:
            return False
        else:
            heard = replace(known, state=message["s"])
        self.devices[cid] = heard
        return heard != known

    def here(self) -> list[ClientId]:
        """The devices that are on, sorted."""
        return sorted(cid for cid, device in self.devices.items() if device.here)

    def count(self, members: Collection[ClientId]) -> int:
        """How many of these are on."""
        return sum(cid in self.devices and self.devices[cid].here for cid in members)

    def ready(self, engines: Mapping[str, Any]) -> dict[ClientId, Device]:
        """The devices that can train now: on, with samples, with an engine that the program was compiled for."""
        able = {c: d for c, d in self.devices.items() if d.here and d.n > 0 and d.engine in engines}
        return dict(sorted(able.items()))


def _born(message: Mapping[str, Any]) -> Device:
    caps = message.get("caps", {})
    return Device(
        birth=message["bd"],
        state="on",
        engine=caps.get("engine", ""),
        n=caps.get("n", 0),
        codecs=tuple(caps.get("codecs", ())),
    )


class Pace:
    """A token bucket for requests. The first refusal is spoken, those right after it are silent."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._at_s, self._told = burst, float("-inf"), False

    def allow(self, now_s: float) -> bool:
        """Spend one token if there is one."""
        if now_s > self._at_s:
            self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        self._told = False
        return True

    def first_refusal(self) -> bool:
        """Whether this refusal should be answered; the next ones are not, until a request was allowed again."""
        told, self._told = self._told, True
        return not told
