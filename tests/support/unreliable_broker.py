"""A broker in memory whose links are bad: messages take their time, overtake each other, come twice, or break a link.

MQTT at QoS 1 loses nothing while a connection lasts; what it loses is what was under way when one broke. So a lost
message here takes its device's connection with it. Within one topic the order stays, as MQTT promises.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

from tests.support.memory_broker import MemoryBroker, MemoryTransport
from tests.support.virtual_federation import FEDERATION, TOPICS
from tests.support.virtual_time import Participant, VirtualTransport, VirtualWorld

Strike = Callable[[str, random.Random], bool]  # (topic, rng) -> whether this message breaks its device's link


def never(_topic: str, _rng: random.Random) -> bool:
    return False


class Weather(MemoryBroker):
    """Seconds of `latency` drawn evenly from a range, a share of messages that come `twice`, and links that break."""

    def __init__(
        self, *, latency: tuple[float, float] = (0.0, 0.0), twice: float = 0.0, strikes: Strike = never, seed: int = 0
    ) -> None:
        super().__init__()
        self.latency, self.twice, self.strikes = latency, twice, strikes
        self.struck = self.delivered = 0
        self._rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self._under_way: list[tuple[float, int, MemoryTransport, str, bytes, bool]] = []
        self._count = 0
        self._latest: dict[str, float] = {}  # topic -> when its last message arrives
        self._me: Participant | None = None

    def begin(self, world: VirtualWorld) -> None:
        """Let it blow, from now on."""
        self._me = world.begin("weather", self._life)

    def publish(self, sender: MemoryTransport | None, topic: str, payload: bytes, *, retain: bool) -> None:
        if sender is None or self._me is None:  # a will is the broker's own
            super().publish(sender, topic, payload, retain=retain)
            return
        for _ in range(1 + (self._rng.random() < self.twice)):
            now_s = self._me.world.clock.time_s
            due_s = max(now_s + self._rng.uniform(*self.latency), self._latest.get(topic, 0.0))
            self._latest[topic] = due_s
            self._count += 1
            heapq.heappush(self._under_way, (due_s, self._count, sender, topic, payload, retain))
            self._me.wake_s = min(self._me.wake_s, due_s)

    def _life(self, me: Participant) -> None:
        nobody = VirtualTransport(me, self, "weather", None)
        while True:
            while self._under_way and self._under_way[0][0] <= me.world.clock.time_s:
                _, _, sender, topic, payload, retain = heapq.heappop(self._under_way)
                self._arrive(sender, topic, payload, retain=retain)
            due_s = self._under_way[0][0] if self._under_way else math.inf
            me.wait(nobody, due_s - me.world.clock.time_s)

    def _arrive(self, sender: MemoryTransport, topic: str, payload: bytes, *, retain: bool) -> None:
        cid = TOPICS.parse(topic).cid
        if cid is not None and self.strikes(topic, self._rng):
            name = f"{FEDERATION}.{cid}"
            if name in self._clients:
                self.struck += 1
                self.drop_connection(name)
            return
        self.delivered += 1
        super().publish(sender, topic, payload, retain=retain)
