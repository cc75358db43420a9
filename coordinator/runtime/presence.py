"""Which devices exist, what they can do, whether they are online, and how fast they may send requests.

Presence is a hint only: deadlines decide whether an exchange waits for a device. Times are arguments, in seconds.

A broker keeps the announcement of a device that died without its will, or whose will it refused: the word of the broker
alone counts no device as online. Each device announces itself to a new connection of the coordinator (PROTOCOL.md 11);
one that was online before and does not is not online any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edge_client.protocol.task import ClientId

PLACE_KEPT_MS = 24 * 3_600_000  # of a device that is away: strangers who come and go take no place of others
LOOK_EVERY_MS = 60_000  # for a device that makes room, which goes over the whole fleet
UNHEARD = "unheard"  # the state of a device that the broker calls online, and that has not said so itself
MAX_REPORTED_REFUSALS = 256  # devices; the file that `status` reads stays small
MAX_REPORTED_CLIENTS = 8  # versions, for the same reason


@dataclass(frozen=True, kw_only=True)
class DevicePresence:
    """One device as it last announced itself. `birth` grows by one per connection; `n` counts its training samples."""

    birth: int
    state: str  # on, off, sleep, lost, unheard
    engine: str = ""
    n: int = 0
    runtime: str = ""  # name and version
    client: str = ""  # name and version
    refused: tuple[tuple[str, str, float], ...] = ()  # engines that fail the golden run: name, runtime, difference
    met: bool = field(default=True, compare=False)  # whether it has announced itself to this process

    @property
    def able(self) -> bool:
        """Whether its engine has not failed the golden run."""
        return all(engine != self.engine for engine, _, _ in self.refused)

    @property
    def is_online(self) -> bool:
        """Whether it has said itself that it is connected, the last time that it said anything."""
        return self.state == "on"


@dataclass
class FleetPresence:
    """Every device that announced itself, at most `limit`.

    A newcomer beyond it takes the place of the device that has been away for the longest time, and for a day at least.
    Where there is none, it is counted in `rejected`; the dispatcher logs the first.
    """

    limit: int
    devices: dict[ClientId, DevicePresence] = field(default_factory=dict)
    rejected: int = 0
    kinds: Counter[tuple[str, bool]] = field(default_factory=Counter)  # who is online with samples: engine, able
    heard: dict[ClientId, int] = field(default_factory=dict)  # unix time in ms of the last message of each device
    told: dict[ClientId, int] = field(default_factory=dict)  # the same since when each is not online here
    gone: list[ClientId] = field(default_factory=list)  # made room; the broker need not keep their presence
    looked_ms: int = -LOOK_EVERY_MS  # when no device could make room
    revoked: frozenset[ClientId] = frozenset()  # turned away for ever
    doubted: set[ClientId] = field(default_factory=set)  # were online before this connection, and silent since

    def update(self, cid: ClientId, message: Mapping[str, Any], *, unix_ms: int = 0, retained: bool = False) -> bool:
        """Apply one `st` that arrived at `unix_ms`; -> whether it changed anything.

        The will of an earlier connection changes nothing. A `retained` one is what the broker has kept.
        """
        known = self.devices.get(cid)
        if message["s"] == "on":
            if not retained:
                self.doubted.discard(cid)
            if known is None and not self._has_room(unix_ms):
                self.rejected += 1
                return False
            if retained and known is not None and known.is_online:
                return False
            heard = _born(message)
            if retained:
                heard = replace(heard, state=UNHEARD, met=known is not None and known.met)
                self.told.setdefault(cid, unix_ms)
        elif known is None or message["bd"] != known.birth:
            return False
        else:
            heard = replace(known, state=message["s"])
            if known.is_online:
                self.told[cid] = unix_ms
        self._put(cid, known, heard)
        return heard != known

    def confirm(self, cid: ClientId) -> bool:
        """A device has sent a message; -> whether only the broker had called it online before."""
        self.doubted.discard(cid)
        known = self.devices.get(cid)
        if known is None or known.state != UNHEARD:
            return False
        self._put(cid, known, replace(known, state="on", met=True))
        return True

    def revoke(self, names: Collection[ClientId]) -> None:
        """Forget these devices; they are not welcome any more."""
        self.revoked |= set(names)
        for cid in self.devices.keys() & set(names):
            self._put(cid, self.devices[cid], replace(self.devices[cid], state="off"))
            self._forget(cid)

    def doubt_all(self) -> None:
        """The coordinator's connection is new: devices that were online say so again, or they are not."""
        self.doubted = set(self.online())

    def unheard(self) -> list[ClientId]:
        """The devices of which this connection has heard nothing, sorted. It goes over the fleet."""
        return sorted(self.doubted | {cid for cid, device in self.devices.items() if device.state == UNHEARD})

    def drop_doubted(self, unix_ms: int) -> None:
        """The devices that had time, until `unix_ms`, to say that they are online, and did not, are not."""
        for cid in self.doubted & self.devices.keys():
            if self.devices[cid].is_online:
                self._put(cid, self.devices[cid], replace(self.devices[cid], state=UNHEARD))
                self.told[cid] = unix_ms
        self.doubted.clear()

    def _put(self, cid: ClientId, known: DevicePresence | None, heard: DevicePresence) -> None:
        self.devices[cid] = heard
        for device, change in ((known, -1), (heard, 1)):
            if device is not None and device.is_online and device.n > 0:
                kind = (device.engine, device.able)
                self.kinds[kind] += change
                if not self.kinds[kind]:
                    del self.kinds[kind]  # names are the device's own

    def _has_room(self, unix_ms: int) -> bool:
        if len(self.devices) < self.limit:
            return True
        if 0 <= unix_ms - self.looked_ms < LOOK_EVERY_MS:
            return False
        for times in (self.heard, self.told):  # the clock may have been set back
            times.update({cid: unix_ms for cid, at_ms in times.items() if at_ms > unix_ms})
        away = (cid for cid, device in self.devices.items() if not device.is_online)
        longest = min(away, key=self._known_at_ms, default=None)
        if longest is None or unix_ms - self._known_at_ms(longest) < PLACE_KEPT_MS:
            self.looked_ms = unix_ms
            return False
        self._forget(longest)
        self.gone.append(longest)
        return True

    def _known_at_ms(self, cid: ClientId) -> int:
        """When it was last heard, or was last online without a word."""
        return max(self.heard.get(cid, 0), self.told.get(cid, 0))

    def _forget(self, cid: ClientId) -> None:
        del self.devices[cid]
        self.heard.pop(cid, None)
        self.told.pop(cid, None)
        self.doubted.discard(cid)

    def mark_heard(self, cid: ClientId, unix_ms: int) -> None:
        """Remember when a known device last sent a message; the will of a lost device comes from the broker."""
        if cid in self.devices and self.devices[cid].state != "lost":
            self.heard[cid] = unix_ms

    def online(self) -> list[ClientId]:
        return sorted(cid for cid, device in self.devices.items() if device.is_online)

    def count(self, members: Collection[ClientId]) -> int:
        return sum(cid in self.devices and self.devices[cid].is_online for cid in members)

    def refusals(self) -> dict[ClientId, str]:
        """Why devices do not use some of their runtimes, for at most MAX_REPORTED_REFUSALS devices."""
        told = sorted(cid for cid, device in self.devices.items() if device.refused)
        return {cid: _refusal(self.devices[cid]) for cid in told[:MAX_REPORTED_REFUSALS]}

    def clients(self) -> dict[str, int]:
        """How many devices that are online have each client, by its name and version; the MAX_REPORTED_CLIENTS most."""
        told = Counter(device.client for device in self.devices.values() if device.is_online and device.client)
        return dict(sorted(told.most_common(MAX_REPORTED_CLIENTS)))

    def count_ready(self, engines: Collection[str]) -> tuple[int, int]:
        """How many devices are ready, and how many have another engine. It does not go over the fleet."""
        ready = sum(count for (engine, able), count in self.kinds.items() if able and engine in engines)
        return ready, sum(count for (engine, _), count in self.kinds.items() if engine not in engines)

    def ready(self, engines: Collection[str]) -> dict[ClientId, DevicePresence]:
        """The devices that can train now: online, with samples and a correct engine that the program is for."""
        able = {c: d for c, d in self.devices.items() if d.is_online and d.n > 0 and d.engine in engines and d.able}
        return dict(sorted(able.items()))


def _refusal(device: DevicePresence) -> str:
    wrong = ", ".join(f"{runtime} computes wrongly (off by {off:.1e})" for _, runtime, off in device.refused)
    return f"{wrong}; {f'it uses {device.runtime or device.engine}' if device.able else 'no other engine is left'}"


def _born(message: Mapping[str, Any]) -> DevicePresence:
    caps = message.get("caps", {})
    return DevicePresence(
        birth=message["bd"],
        state="on",
        engine=caps.get("engine", ""),
        n=caps.get("n", 0),
        runtime=caps.get("runtime", ""),
        client=message.get("sw", ""),
        refused=tuple((each["engine"], each["runtime"], each["difference"]) for each in caps.get("refused", ())),
    )


class TokenBucket:
    """A token bucket for requests: `per_s` on average, `burst` at once. Only the first refusal in a row is answered."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._at_s, self._told = burst, float("-inf"), False

    def allow(self, now_s: float) -> bool:
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
