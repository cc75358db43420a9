"""For which devices an exchange waits: a device that was silent again and again is asked, but not waited for. Pure.

One that refused again and again is not asked: it has too little memory or disk for the model, or no runtime.

A device that is on and silent would keep every exchange open until its deadline. After WAITED_MISSES exchanges in a row
without an answer the other devices' answers close an exchange. What the device sends before that counts as always. It
is waited for again after 4, 8, 16, ... misses, so that a device that came back, and is slower than the others, has a
whole deadline now and then: in n exchanges silence costs about log2(n) deadlines. An answer, a refusal too, ends the
row.

A device that answers now and then would hold up all other exchanges. So each that waited for it in vain costs it
ANSWERS_FOR_ONE answers, and while it owes those of WAITED_MISSES exchanges or more, an exchange does not wait for it
either. That is so for one device in ten, and at least one: those that owe most. Without that limit a fleet whose
devices are often away would have all of them left out, and exchanges would end at the quorum.

A device holds up fewer than one exchange in four: a wait in vain costs it as many answers, or, where it owes so much
already, came after as many misses in a row. The stages of a sum are one exchange here: else a device could answer all
but one of them, and hold up each sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.rounds.exchange_rules import OpenExchange
from edge_client.protocol.task import ClientId

WAITED_MISSES = 3
ANSWERS_FOR_ONE = 4
LASTING_CODES = frozenset({"no_space", "no_engine", "bad_program"})  # of a refusal that time alone seldom ends
HELD_PART = 10  # one of so many devices may be left out for the answers that it owes
_FROM_DEBT = WAITED_MISSES * ANSWERS_FOR_ONE  # a device that owes so much is not waited for
_MOST_DEBT = _FROM_DEBT + ANSWERS_FOR_ONE - 1  # a device that was away for long, and is slow, may make up for it


class Misses(NamedTuple):
    """What a device missed: exchanges in a `row`, and the answers that it owes for those that waited in vain."""

    row: int = 0
    owed: int = 0


NO_MISSES = Misses()


@dataclass
class LastingRefusals:
    """Which devices cannot do a kind of task, as they said.

    After so many refusals in a row a device is asked as after so many misses it is waited for. A new connection, or a
    task that it does, ends the row.
    """

    rows: dict[ClientId, dict[str, tuple[int, str]]] = field(default_factory=dict)  # by kind: how many, and the last

    def note(self, cid: ClientId, kind: str, why: str) -> None:
        """A device has refused, or was not asked."""
        known = self.rows.setdefault(cid, {})
        known[kind] = (known.get(kind, (0, ""))[0] + 1, why)

    def forget(self, cid: ClientId, kind: str) -> None:
        """A device has done a task of this kind."""
        self.rows.get(cid, {}).pop(kind, None)

    def unable(self, cid: ClientId, kind: str) -> str:
        """Why this device is not asked now; "" where it is."""
        row, why = self.rows.get(cid, {}).get(kind, (0, ""))
        return "" if is_waited_for(row) else why

    def skips(self, cid: ClientId) -> bool:
        """Whether a device, at the end of its wait in a run without rounds, is not asked now either; that is noted."""
        whys = {kind: why for kind in self.rows.get(cid, {}) if (why := self.unable(cid, kind))}
        for kind, why in whys.items():
            self.note(cid, kind, why)
        return bool(whys)


def is_waited_for(row: int) -> bool:
    """Whether an exchange waits for a device that did not answer in its last `row` exchanges."""
    return row < WAITED_MISSES or row & (row - 1) == 0  # the powers of two


def silent_devices(
    misses: Mapping[ClientId, Misses], asked: Collection[ClientId], spare: int | None = None
) -> frozenset[ClientId]:
    """The devices of an exchange that it does not wait for; at most `spare` of them for the answers that they owe."""
    known = {cid: misses[cid] for cid in asked if cid in misses}
    silent = {cid for cid, missed in known.items() if not is_waited_for(missed.row)}
    owing = [cid for cid, missed in known.items() if missed.owed >= _FROM_DEBT and missed.row < WAITED_MISSES]
    worst = sorted(owing, key=lambda cid: (-known[cid].owed, cid))
    most = max(1, len(asked) // HELD_PART)
    return frozenset(silent.union(worst[: most if spare is None else min(most, spare)]))


def count_misses(
    misses: Mapping[ClientId, Misses], closed: OpenExchange, told: Collection[ClientId], *, pays: bool = True
) -> dict[ClientId, Misses]:
    """The misses after an exchange, without zeros; only devices that were `told` their task can miss it.

    `pays`: whether its answers count for those that are owed; of the stages of a sum those of the last one do.
    An exchange that had enough answers for its goal tells nothing of the others.
    """
    heard = closed.accepted.keys() | closed.refused.keys()
    found = dict(misses)
    for cid in heard & misses.keys():
        found[cid] = Misses(0, max(0, misses[cid].owed - pays))
    if closed.short:
        for cid in closed.asked.intersection(told) - heard:
            row, owed = misses.get(cid, NO_MISSES)
            more = 0 if cid in closed.silent else ANSWERS_FOR_ONE
            found[cid] = Misses(row + 1, min(owed + more, _MOST_DEBT))
    return {cid: missed for cid, missed in found.items() if missed != NO_MISSES}
