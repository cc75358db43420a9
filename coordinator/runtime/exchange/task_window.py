"""Which devices of an exchange are given their task now: at most `size` are at its beginning, the others wait in line.

A device that gets its task asks for its program and models at once, and gives up when no block comes for 56 s
(PROTOCOL.md, transfers). So no more devices are asked together than can be served in that time. A device has a place
from its task on until it answers, or for PLACE_S: it trains then, or is away, and neither is work for the coordinator.
Places are taken back only while no message, download or upload waits for the coordinator, so that a slow one hands out
as many tasks as it takes in answers; or after LONGEST_S, since a few devices can upload without end. Pure; times are
arguments, in seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from itertools import islice

from coordinator.storage.exchange_store import ExchangeKey
from edge_client.protocol.task import ClientId

PLACE_S = 10.0  # longer than the 8 s after which a device repeats a request
LONGEST_S = 60.0  # longer than the 56 s after which a device without a block gives up


def line_of(key: ExchangeKey, cids: Collection[ClientId], last: Collection[ClientId]) -> list[ClientId]:
    """The order in which the devices of an exchange are asked: another one in each exchange, and `last` at its end."""
    return sorted(cids, key=lambda cid: (cid in last, hashlib.sha256(f"{key} {cid}".encode()).digest()))


class TaskWindow:
    """The places of one exchange, and the line before them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._line: dict[ClientId, None] = {}
        self._places: dict[ClientId, float] = {}  # device -> since when, oldest first

    @property
    def line(self) -> list[ClientId]:
        """Who waits, first come first served."""
        return list(self._line)

    def put(self, cids: Iterable[ClientId]) -> None:
        """Devices that are to be given their task, again or for the first time: the end of the line."""
        for cid in cids:
            self._places.pop(cid, None)
            self._line.setdefault(cid)

    def leave(self, cid: ClientId) -> None:
        """A device has answered."""
        self._places.pop(cid, None)
        self._line.pop(cid, None)

    def free(self, now_s: float, *, quiet: bool) -> None:
        """Take back the places that were given LONGEST_S ago; PLACE_S ago where nothing waits for the coordinator."""
        longest_s = PLACE_S if quiet else LONGEST_S
        while self._places and now_s >= self._places[oldest := next(iter(self._places))] + longest_s:
            del self._places[oldest]

    def take(self, now_s: float) -> list[ClientId]:
        """Give the free places to those who wait; -> the devices to be given their task now."""
        first = list(islice(self._line, max(0, self._size - len(self._places))))
        for cid in first:
            del self._line[cid]
            self._places[cid] = now_s
        return first
