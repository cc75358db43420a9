"""The rules of one open exchange: who was asked, who may upload, which update counts, when it ends.

The caller tells an `OpenExchange` what happened, and is told which devices may upload now. It stores what counts before
it calls `accept`, and closes the exchange when it `is_over`. Times are seconds on one monotonic clock of the caller,
real or virtual. An update is named by its sha256.

The rules (PROTOCOL.md, rounds):

* the first complete, verified update of a client is accepted ("ok"); the same hash again is "dup", another hash
  "superseded"; after closing every new update is "late"; a client that was not asked is "rejected";
* a credit is one open upload. There are `credits` of them, and together they hold at most `budget` bytes (a single
  upload may be larger), because the broker has to keep these bytes. Without a free credit an offer waits in a queue
  without an answer. A credit returns after 30 s without a new block; after 8 s of silence
  the client is told once more to go on. While others wait, an upload that is too slow to end within a quarter of the
  exchange's time goes to the end of the queue, so that no client can hold what the others need;
* the exchange is over when `goal` updates are accepted (more clients may have been asked), when all clients have
  answered (a refusal is an answer), or at the deadline. What some clients tell `beside` the others' updates counts too,
  but not for the goal. The exchange does not wait for `silent` clients (silence.py) once the others have answered,
  the quorum is met and `least` updates are accepted. Every exchange ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from edge_client.protocol.task import ClientId

GO_REPEAT_S = 8.0  # silence of an upload after which the client is told once more to go on
CREDIT_IDLE_S = 30.0  # silence after which a credit returns to the pool
LEAST_PACE = 4  # whole uploads in the time of the exchange; a slower one does not hold up those that wait


class UploadCredit:
    """An open credit: the update's bytes, those that came since it was given, and when what happened."""

    def __init__(self, size: int, now_s: float) -> None:
        self.size, self.arrived = size, 0
        self.given_s = self.last_block_s = self.last_grant_s = now_s

    def heard(self, size: int, now_s: float) -> None:
        """A new block of `size` bytes arrived."""
        self.last_block_s, self.arrived = now_s, self.arrived + size

    @property
    def silent_at_s(self) -> float:
        """When the credit returns, if nothing comes."""
        return self.last_block_s + CREDIT_IDLE_S

    @property
    def repeat_at_s(self) -> float:
        """When the client is told once more to go on, if nothing comes."""
        return max(self.last_block_s, self.last_grant_s) + GO_REPEAT_S

    def slow_at_s(self, turn_s: float) -> float:
        """When it is slower than a whole upload in `turn_s`, after a start of CREDIT_IDLE_S, if nothing comes."""
        return self.given_s + CREDIT_IDLE_S + turn_s * self.arrived / self.size


class OpenExchange:
    """One exchange, which ends `deadline_s` seconds from `now_s`. `accepted` maps a client to the hash that counts.

    `accepted` and `refused` (client -> why) are disjoint and within `asked`; at first they come from the store.
    Without a `goal` the exchange waits for all clients, but for the `silent` ones. Raises ValueError for arguments that
    contradict each other.
    """

    def __init__(  # noqa: PLR0913 - one number per rule
        self,
        *,
        asked: Collection[ClientId],
        quorum: int,
        now_s: float,
        deadline_s: float,
        goal: int | None = None,
        least: int = 1,
        beside: Collection[ClientId] = (),
        silent: Collection[ClientId] = (),
        credits: int = 32,  # noqa: A002 - the protocol's word
        budget: float = float("inf"),
        accepted: Mapping[ClientId, str] | None = None,
        refused: Mapping[ClientId, str] | None = None,
    ) -> None:
        if credits < 1 or quorum < 0:
            raise ValueError(f"credits must be at least 1 and quorum not negative: {credits}, {quorum}")
        self.accepted, self.refused = dict(accepted or {}), dict(refused or {})
        if strangers := (self.accepted.keys() | self.refused.keys()) - set(asked):
            raise ValueError(f"{sorted(strangers)} answered but were not asked")
        if both := self.accepted.keys() & self.refused.keys():
            raise ValueError(f"{sorted(both)} were accepted and refused")
        self.asked, self.silent = frozenset(asked), frozenset(silent).intersection(asked)
        self.beside, self.quorum = frozenset(beside).intersection(asked) if goal is not None else frozenset(), quorum
        self._least = least
        self.goal = len(asked) if goal is None else min(goal, len(asked) - len(self.beside))
        self._beside_accepted = len(self.beside & self.accepted.keys())
        self.closes_at_s, self.closed = now_s + deadline_s, False
        self.turn_s = deadline_s / LEAST_PACE  # in which a whole upload should arrive while others wait
        self.credits, self.budget = credits, budget
        self.uploads: dict[ClientId, UploadCredit] = {}
        self.queue: dict[ClientId, int] = {}  # client -> bytes that it offers; first come first served

    @property
    def short(self) -> int:
        """How many answers the goal lacks."""
        return max(0, self.goal - len(self.accepted) + self._beside_accepted)

    @property
    def complete(self) -> bool:
        """Whether the goal is reached, or every client that is waited for has answered."""
        missing = len(self.asked) - len(self.accepted) - len(self.refused)
        if not self.short or missing == 0:
            return True
        if missing > len(self.silent) or len(self.accepted) < max(self._least, self.quorum):
            return False
        return missing == len(self.silent - self.accepted.keys() - self.refused.keys())

    def is_over(self, now_s: float) -> bool:
        """Whether the caller should store what is accepted, and call `close`."""
        return not self.closed and (self.complete or now_s >= self.closes_at_s)

    @property
    def wakes_at_s(self) -> float:
        """When time alone changes something: `is_over` or `tick`; infinity when closed."""
        if self.closed:
            return float("inf")
        due = [min(upload.silent_at_s, upload.repeat_at_s) for upload in self.uploads.values()]
        due += [upload.slow_at_s(self.turn_s) for upload in self.uploads.values()] if self.queue else []
        return min([self.closes_at_s, *due])

    def progress(self, now_s: float) -> dict[str, Any]:
        """What the dashboard and `status` show: `open` devices have no answer and no upload yet."""
        silent = self.asked - self.accepted.keys() - self.refused.keys() - self.uploads.keys() - self.queue.keys()
        return {
            "asked": len(self.asked),
            "wanted": self.goal + len(self.beside),
            "quorum": self.quorum,
            "closed": self.closed,
            "left_s": round(max(0.0, self.closes_at_s - now_s), 1),
            "answered": sorted(self.accepted),
            "uploading": sorted(self.uploads),
            "waiting": sorted(self.queue),
            "refused": sorted(self.refused),
            "open": sorted(silent),
        }

    def status(self, cid: ClientId, sha256: str) -> str:
        """Of an update that cannot count: dup, superseded, late or rejected; else an empty text."""
        if cid not in self.asked:
            return "rejected"
        stored = self.accepted.get(cid)
        if stored is not None:
            return "dup" if stored == sha256 else "superseded"
        return "late" if self.closed else ""

    def offer(self, cid: ClientId, size: int, now_s: float) -> list[ClientId]:
        """A client holds an update of `size` bytes without a `status` -> the clients that may upload now.

        A client that refused before, or has computed another result, may upload it. A credit goes on with another
        update that is no larger, and is not prolonged by an offer.
        """
        self.refused.pop(cid, None)
        credit = self.uploads.get(cid)
        if credit is not None and size <= credit.size:
            credit.last_grant_s = now_s
            return [cid]
        self.uploads.pop(cid, None)
        self.queue[cid] = size
        return self._grant(now_s)

    def heard(self, cid: ClientId, size: int, now_s: float) -> None:
        """A new block of `size` bytes arrived; it only keeps a credit alive."""
        if cid in self.uploads:
            self.uploads[cid].heard(size, now_s)

    def countable(self, updates: Mapping[ClientId, str]) -> list[ClientId]:
        """Which of these updates count (client -> sha256), which are whole and passed every check, in this order."""
        new = [cid for cid, sha256 in updates.items() if not self.status(cid, sha256)]
        last = set([cid for cid in new if cid not in self.beside][self.short :])
        return [cid for cid in new if cid not in last]

    def accept(self, updates: Mapping[ClientId, str], now_s: float) -> list[ClientId]:
        """These updates are `countable` and stored -> the clients that may upload now."""
        self._beside_accepted += len(self.beside & (updates.keys() - self.accepted.keys()))
        self.accepted |= updates
        for cid in updates:
            self.refused.pop(cid, None)
        return self._ended(updates, now_s)

    def refuse(self, cid: ClientId, code: str, now_s: float) -> list[ClientId]:
        """A client will not answer, or its update failed a check -> the clients that may upload now.

        A refusal after an accepted update changes nothing.
        """
        if self.closed or cid not in self.asked or cid in self.accepted:
            return []
        self.refused[cid] = code
        return self._ended([cid], now_s)

    def tick(self, now_s: float) -> list[ClientId]:
        """Time passed -> the clients that are told to go on; due at `wakes_at_s`, harmless at any other time."""
        again = []
        for cid, upload in list(self.uploads.items()):
            if now_s >= upload.silent_at_s:
                del self.uploads[cid]  # the received blocks stay, and the client asks again
            elif self.queue and now_s >= upload.slow_at_s(self.turn_s):
                self.queue[cid] = self.uploads.pop(cid).size
            elif now_s >= upload.repeat_at_s:
                upload.last_grant_s = now_s
                again.append(cid)
        return again + self._grant(now_s)

    def close(self) -> None:
        """The exchange is over with exactly the accepted updates."""
        self.closed = True
        self.uploads.clear()
        self.queue.clear()

    def _ended(self, cids: Collection[ClientId], now_s: float) -> list[ClientId]:
        """These clients upload no more."""
        for cid in cids:
            self.uploads.pop(cid, None)
            self.queue.pop(cid, None)
        return [] if self.complete else self._grant(now_s)

    def _grant(self, now_s: float) -> list[ClientId]:
        """Give free credits to waiting clients, first come first served, while their bytes fit into the budget."""
        held, fresh = sum(upload.size for upload in self.uploads.values()), []
        for cid, size in self.queue.items():
            full = len(self.uploads) >= self.credits or held + size > self.budget
            if full and self.uploads:
                break
            self.uploads[cid] = UploadCredit(size, now_s)
            held += size
            fresh.append(cid)
        for cid in fresh:
            del self.queue[cid]
        return fresh
