"""For which devices an exchange waits: a device that was silent again and again is asked, but not waited for. Pure.

A device that is on and silent would keep every exchange open until its deadline. After WAITED_MISSES exchanges in a row
without an answer the other devices' answers close an exchange. What the device sends before that counts as always. It
is waited for again after 4, 8, 16, ... misses, so that a device that came back, and is slower than the others, has a
whole deadline now and then: in n exchanges silence costs about log2(n) deadlines. An answer, a refusal too, ends the
row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coordinator.rounds.exchange_rules import OpenExchange
from edge_client.protocol.task import ClientId

WAITED_MISSES = 3


def is_waited_for(misses: int) -> bool:
    """Whether an exchange waits for a device that did not answer in its last `misses` exchanges."""
    return misses < WAITED_MISSES or misses & (misses - 1) == 0  # the powers of two


def silent_devices(misses: Mapping[ClientId, int], asked: Collection[ClientId]) -> frozenset[ClientId]:
    """The devices of an exchange that it does not wait for."""
    return frozenset(cid for cid in asked if not is_waited_for(misses.get(cid, 0)))


def count_misses(
    misses: Mapping[ClientId, int], closed: OpenExchange, told: Collection[ClientId]
) -> dict[ClientId, int]:
    """The misses after an exchange, without zeros; only devices that were `told` their task can miss it.

    An exchange that had enough answers for its goal tells nothing of the others.
    """
    heard = closed.accepted.keys() | closed.refused.keys()
    left = {cid: count for cid, count in misses.items() if cid not in heard}
    if len(closed.accepted) >= closed.goal:
        return left
    return left | {cid: left.get(cid, 0) + 1 for cid in closed.asked.intersection(told) - heard}
