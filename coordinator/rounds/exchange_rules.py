"""One open exchange as a pure state machine: who was asked, who may upload, what is accepted, when it closes.

`advance(exchange, event, now_s) -> (exchange, commands)`. The caller stores what an `Ack` with status "ok" accepts and
what a `Close` closes, and only then carries the commands out in order. Times are seconds on one monotonic clock of the
caller, real or virtual. An update is named by its sha256.

The rules (PROTOCOL.md, rounds):

* the first complete, verified update of a client is accepted ("ok"); the same hash again is "dup", another hash
  "superseded"; after closing every new update is "late"; a client that was not asked is "rejected";
* a credit is one open upload. There are `credits` of them, and together they hold at most `budget` bytes (a single
  upload may be larger), because the broker has to keep these bytes. Without a free credit a `Ready` waits in a queue
  without an answer. A credit returns after 30 s without a new block; after 8 s of silence
  the client is told once more to go on. While others wait, an upload that is too slow to end within a quarter of the
  exchange's time goes to the end of the queue, so that no client can hold what the others need;
* the exchange closes when `goal` updates are accepted (more clients may have been asked), when all clients have
  answered (a refusal is an answer), or at the deadline. It does not wait for `silent` clients (silence.py) once the
  others have answered, the quorum is met and one update is accepted. Every exchange ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from edge_client.protocol.task import ClientId

GO_REPEAT_S = 8.0  # silence of an upload after which the client is told once more to go on
CREDIT_IDLE_S = 30.0  # silence after which a credit returns to the pool
LEAST_PACE = 4  # whole uploads in the time of the exchange; a slower one does not hold up those that wait


@dataclass(frozen=True)
class Ready:
    """A client holds a result of this hash and size and asks to upload it."""

    cid: ClientId
    sha256: str
    size: int


@dataclass(frozen=True)
class Block:
    """A new block of an open upload arrived, of `size` bytes; it only keeps the credit alive."""

    cid: ClientId
    size: int


@dataclass(frozen=True)
class Stored:
    """A client's update arrived whole (in blocks or inline) and passed every check."""

    cid: ClientId
    sha256: str


@dataclass(frozen=True)
class Refused:
    """A client will not answer (its nack), or its update failed a check."""

    cid: ClientId
    code: str


@dataclass(frozen=True)
class Tick:
    """Time passed; due at `wakes_at_s`, harmless at any other time."""


V = TypeVar("V")
Event = Ready | Block | Stored | Refused | Tick


@dataclass(frozen=True)
class Go:
    """Tell the client to upload the result of this hash, from the first missing block."""

    cid: ClientId
    sha256: str


@dataclass(frozen=True)
class Ack:
    """Answer the client about this hash: ok, dup, superseded, late or rejected. "ok" is stored before it is sent."""

    cid: ClientId
    sha256: str
    status: str


@dataclass(frozen=True)
class Close:
    """The exchange is over with exactly the updates of these clients; stored before the replies are used."""

    keys: frozenset[ClientId]


Command = Go | Ack | Close


@dataclass(frozen=True, kw_only=True)
class UploadCredit:
    """An open credit: its update, the bytes that came since it was given, and the times of the last block and `Go`."""

    sha256: str
    size: int
    given_s: float
    last_block_s: float
    last_grant_s: float
    arrived: int = 0

    def slow_after_s(self, turn_s: float) -> float:
        """When it is slower than a whole upload in `turn_s`, after a start of CREDIT_IDLE_S, if nothing comes."""
        return self.given_s + CREDIT_IDLE_S + turn_s * self.arrived / self.size

    def is_silent(self, now_s: float) -> bool:
        return now_s >= self.last_block_s + CREDIT_IDLE_S

    def heard(self, size: int, now_s: float) -> UploadCredit:
        """After a new block of `size` bytes."""
        return replace(self, last_block_s=now_s, arrived=self.arrived + size)

    @classmethod
    def given(cls, offer: Ready, now_s: float) -> UploadCredit:
        return cls(sha256=offer.sha256, size=offer.size, given_s=now_s, last_block_s=now_s, last_grant_s=now_s)


@dataclass(frozen=True, kw_only=True)
class OpenExchange:
    """The state of one exchange: (run, round, number) is its key, `accepted` maps a client to the hash that counts.

    Made by `open_exchange`; `advance` keeps `accepted` and `refused` disjoint and within `asked`, so that no event has
    to go through all clients.
    """

    run: str
    round: int
    number: int
    asked: frozenset[ClientId]
    goal: int
    quorum: int
    closes_at_s: float
    silent: frozenset[ClientId] = frozenset()  # asked, but not waited for
    turn_s: float  # in which a whole upload should arrive while others wait
    credits: int
    budget: float
    accepted: Mapping[ClientId, str] = field(default_factory=dict)
    refused: Mapping[ClientId, str] = field(default_factory=dict)  # client -> code
    uploads: Mapping[ClientId, UploadCredit] = field(default_factory=dict)
    queue: Mapping[ClientId, Ready] = field(default_factory=dict)  # first come first served
    closed: bool = False

    @property
    def complete(self) -> bool:
        """Whether the goal is reached, or every client that is waited for has answered."""
        missing = len(self.asked) - len(self.accepted) - len(self.refused)
        if len(self.accepted) >= self.goal or missing == 0:
            return True
        if missing > len(self.silent) or len(self.accepted) < max(1, self.quorum):
            return False
        return missing == len(self.silent - self.accepted.keys() - self.refused.keys())

    @property
    def wakes_at_s(self) -> float:
        """When the next Tick changes something, if no other event comes before; infinity when closed."""
        if self.closed:
            return float("inf")
        due = [
            min(u.last_block_s + CREDIT_IDLE_S, max(u.last_block_s, u.last_grant_s) + GO_REPEAT_S)
            for u in self.uploads.values()
        ]
        due += [u.slow_after_s(self.turn_s) for u in self.uploads.values()] if self.queue else []
        return min([self.closes_at_s, *due])

    def progress(self, now_s: float) -> dict[str, Any]:
        """What the dashboard and `status` show: `open` devices have no answer and no upload yet."""
        silent = self.asked - self.accepted.keys() - self.refused.keys() - self.uploads.keys() - self.queue.keys()
        return {
            "run": self.run,
            "round": self.round,
            "exchange": self.number,
            "asked": len(self.asked),
            "wanted": self.goal,
            "quorum": self.quorum,
            "closed": self.closed,
            "left_s": round(max(0.0, self.closes_at_s - now_s), 1),
            "answered": sorted(self.accepted),
            "uploading": sorted(self.uploads),
            "waiting": sorted(self.queue),
            "refused": sorted(self.refused),
            "open": sorted(silent),
        }


Step = tuple[OpenExchange, list[Command]]


def open_exchange(  # noqa: PLR0913 - the key, and one number per rule
    *,
    run: str,
    round: int,  # noqa: A002 - the protocol's word
    number: int,
    asked: Collection[ClientId],
    quorum: int,
    now_s: float,
    deadline_s: float,
    goal: int | None = None,
    silent: Collection[ClientId] = (),
    credits: int = 32,  # noqa: A002 - the protocol's word
    budget: float = float("inf"),
    accepted: Mapping[ClientId, str] | None = None,
    refused: Mapping[ClientId, str] | None = None,
) -> OpenExchange:
    """Open an exchange that closes `deadline_s` seconds from `now_s`; `accepted` and `refused` come from the store.

    Without a `goal` the exchange waits for all clients. The first Tick closes it if every client in `asked` has
    answered already, or `asked` is empty. Raises ValueError for arguments that contradict each other.
    """
    if credits < 1 or quorum < 0:
        raise ValueError(f"credits must be at least 1 and quorum not negative: {credits}, {quorum}")
    updates, codes = dict(accepted or {}), dict(refused or {})
    if strangers := (updates.keys() | codes.keys()) - set(asked):
        raise ValueError(f"{sorted(strangers)} answered but were not asked")
    if both := updates.keys() & codes.keys():
        raise ValueError(f"{sorted(both)} were accepted and refused")
    return OpenExchange(
        run=run,
        round=round,
        number=number,
        asked=frozenset(asked),
        goal=len(asked) if goal is None else min(goal, len(asked)),
        quorum=quorum,
        silent=frozenset(silent) & frozenset(asked),
        closes_at_s=now_s + deadline_s,
        turn_s=deadline_s / LEAST_PACE,
        credits=credits,
        budget=budget,
        accepted=updates,
        refused=codes,
    )


def advance(exchange: OpenExchange, event: Event, now_s: float) -> Step:
    """-> the exchange after this event, and the commands to carry out. The given exchange is not changed."""
    if isinstance(event, Tick):
        return _tick(exchange, now_s)
    if isinstance(event, Ready | Stored) and (status := _final_status(exchange, event)):
        return exchange, [Ack(event.cid, event.sha256, status)]
    if exchange.closed or event.cid not in exchange.asked:
        return exchange, []
    if isinstance(event, Ready):
        return _ready(exchange, event, now_s)
    if isinstance(event, Block):
        return _heard(exchange, event, now_s), []
    return _answered(exchange, event, now_s)


def _final_status(exchange: OpenExchange, event: Ready | Stored) -> str:
    """The status of an update that cannot be accepted, or an empty text."""
    if event.cid not in exchange.asked:
        return "rejected"
    stored = exchange.accepted.get(event.cid)
    if stored is not None:
        return "dup" if stored == event.sha256 else "superseded"
    return "late" if exchange.closed else ""


def _ready(exchange: OpenExchange, event: Ready, now_s: float) -> Step:
    """Give a credit, or queue; a client that refused before, or has computed another result, may upload it.

    A credit goes on with another update that is no larger, and is not prolonged by an announcement.
    """
    refused = _without(exchange.refused, event.cid)
    open_credit = exchange.uploads.get(event.cid)
    if open_credit is not None and event.size <= open_credit.size:
        upload = replace(open_credit, sha256=event.sha256, last_grant_s=now_s)
        uploads = {**exchange.uploads, event.cid: upload}
        return replace(exchange, uploads=uploads, refused=refused), [Go(event.cid, event.sha256)]
    exchange = replace(exchange, uploads=_without(exchange.uploads, event.cid))
    queue = {**exchange.queue, event.cid: event}
    return _grant(replace(exchange, queue=queue, refused=refused), now_s)


def _heard(exchange: OpenExchange, block: Block, now_s: float) -> OpenExchange:
    upload = exchange.uploads.get(block.cid)
    if upload is None:
        return exchange
    return replace(exchange, uploads={**exchange.uploads, block.cid: upload.heard(block.size, now_s)})


def _answered(exchange: OpenExchange, event: Stored | Refused, now_s: float) -> Step:
    """An update that counts, or a refusal; a refusal after an accepted update changes nothing."""
    commands: list[Command] = []
    if isinstance(event, Stored):
        accepted = {**exchange.accepted, event.cid: event.sha256}
        exchange = replace(exchange, accepted=accepted, refused=_without(exchange.refused, event.cid))
        commands.append(Ack(event.cid, event.sha256, "ok"))
    elif event.cid not in exchange.accepted:
        exchange = replace(exchange, refused={**exchange.refused, event.cid: event.code})
    exchange = replace(
        exchange, uploads=_without(exchange.uploads, event.cid), queue=_without(exchange.queue, event.cid)
    )
    if exchange.complete:
        closed, close = _close(exchange)
        return closed, [*commands, *close]
    granted, go = _grant(exchange, now_s)
    return granted, [*commands, *go]


def _tick(exchange: OpenExchange, now_s: float) -> Step:
    if exchange.closed:
        return exchange, []
    if now_s >= exchange.closes_at_s or exchange.complete:
        return _close(exchange)
    uploads, again, queue = {}, [], dict(exchange.queue)
    for cid, upload in exchange.uploads.items():
        if upload.is_silent(now_s):
            continue  # the credit returns; the received blocks stay, and the client asks again
        if exchange.queue and now_s >= upload.slow_after_s(exchange.turn_s):
            queue[cid] = Ready(cid, upload.sha256, upload.size)
            continue
        silent = now_s >= max(upload.last_block_s, upload.last_grant_s) + GO_REPEAT_S
        uploads[cid] = replace(upload, last_grant_s=now_s) if silent else upload
        again += [Go(cid, upload.sha256)] if silent else []
    granted, go = _grant(replace(exchange, uploads=uploads, queue=queue), now_s)
    return granted, [*again, *go]


def _grant(exchange: OpenExchange, now_s: float) -> Step:
    """Give free credits to waiting clients, first come first served, while their bytes fit into the budget."""
    if exchange.closed:
        return exchange, []
    held = sum(upload.size for upload in exchange.uploads.values())
    fresh: dict[ClientId, UploadCredit] = {}
    for waiting in exchange.queue.values():
        first = not exchange.uploads and not fresh
        full = len(exchange.uploads) + len(fresh) >= exchange.credits or held + waiting.size > exchange.budget
        if full and not first:
            break
        fresh[waiting.cid] = UploadCredit.given(waiting, now_s)
        held += waiting.size
    if not fresh:
        return exchange, []
    queue = dict(exchange.queue)  # a copy without some is faster made than a new dict of the others
    for cid in fresh:
        del queue[cid]
    granted = replace(exchange, uploads={**exchange.uploads, **fresh}, queue=queue)
    return granted, [Go(cid, upload.sha256) for cid, upload in fresh.items()]


def _close(exchange: OpenExchange) -> Step:
    done = replace(exchange, closed=True, uploads={}, queue={})
    return done, [Close(frozenset(exchange.accepted))]


def _without(mapping: Mapping[ClientId, V], cid: ClientId) -> Mapping[ClientId, V]:
    if cid not in mapping:
        return mapping
    rest = dict(mapping)
    del rest[cid]
    return rest
