"""Exchanges: the task of each device, the replies, the refused replies, and the set of replies an exchange closed with.

A coordinator stores tasks before it sends them and replies before it acknowledges them. A restarted coordinator
therefore continues an open exchange with the replies that it has, and replays a closed one with the same replies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from coordinator.storage.database import Database
from edge_client.errors import FedcentersError
from edge_client.protocol.task import ClientId


class ExchangeKey(NamedTuple):
    """Names one exchange: the training run, its round (from 1), and which yield of the round it is (from 0)."""

    run: str
    round: int
    exchange: int


class StoredReply(NamedTuple):
    """A reply on disk. `n` is what the device claims; decoding bounds it.

    `base` is the sha256 of the blob that a delta was taken from, "zero", or "" for statistics.
    """

    cid: ClientId
    sha256: str
    size: int
    n: int
    what: str
    base: str
    seconds: float


class ReplayDiverged(FedcentersError):
    """A replayed exchange has other tasks than the stored one: the code, the seed or the data changed.

    `names` has the runs' names by their ids.
    """

    def __init__(self, key: ExchangeKey, names: Mapping[str, str]) -> None:
        super().__init__(
            f"round {key.round} of run {names.get(key.run, key.run)} asks other things than before the restart",
            hint="go on with the version and the settings that began the round, as max-samples-ratio, until it is "
            "over; if a newer version or damage has changed the folder, restore the backup of before "
            "(docs/run-as-a-service.md), or use another",
        )


def same_question(stored: Mapping[ClientId, str], asked: Mapping[ClientId, str]) -> bool:
    """Whether a replay sends the stored tasks; stores of an earlier version hold no hash, only the devices."""
    return stored.keys() == asked.keys() and all(known in ("", asked[cid]) for cid, known in stored.items())


_REPLY = ", ".join(StoredReply._fields)  # the columns, which have these names


class ExchangeStore:
    """The exchanges of all runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self, key: ExchangeKey, hashes: Mapping[ClientId, str], left_s: float, blobs: Iterable[str] = ()) -> None:
        """Store a new exchange: the hash of each device's task, the seconds until its deadline, the tasks' blobs."""
        with self._database.transaction():
            self.write_open(key, hashes, left_s, blobs)

    def write_open(self, key: ExchangeKey, hashes: Mapping[ClientId, str], left_s: float, blobs: Iterable[str]) -> None:
        """`open` as a part of a transaction."""
        self._database.execute("insert into exchanges values (?, ?, ?, ?, 0)", (*key, int(left_s * 1000)))
        rows = [(*key, cid, sha256) for cid, sha256 in sorted(hashes.items())]
        self._database.insert("insert into tasks values (?, ?, ?, ?, ?)", rows)
        named = [(*key, sha256) for sha256 in sorted(set(blobs))]
        self._database.insert("insert into task_blobs values (?, ?, ?, ?)", named)

    def exists(self, key: ExchangeKey) -> bool:
        return bool(self._database.rows("select 1 from exchanges where run = ? and round = ? and exchange = ?", key))

    def has_round(self, run: str, number: int) -> bool:
        """Whether any exchange of the round is stored."""
        return bool(self._database.rows("select 1 from exchanges where run = ? and round = ? limit 1", (run, number)))

    def task_hashes(self, key: ExchangeKey) -> dict[ClientId, str]:
        """The hash of each device's task, "" for a task of an older schema; empty for an unknown exchange."""
        query = "select cid, sha256 from tasks where run = ? and round = ? and exchange = ?"
        return dict(self._database.rows(query, key))

    def asks(self, key: ExchangeKey, cid: ClientId) -> bool:
        """Whether the exchange has a task for this device; no other device's row is read, as in the next ones."""
        query = "select 1 from tasks where run = ? and round = ? and exchange = ? and cid = ?"
        return bool(self._database.rows(query, (*key, cid)))

    def reply_of(self, key: ExchangeKey, cid: ClientId) -> StoredReply | None:
        """The stored reply of one device."""
        query = f"select {_REPLY} from replies where run = ? and round = ? and exchange = ? and cid = ?"  # noqa: S608
        return next((StoredReply(*row) for row in self._database.rows(query, (*key, cid))), None)

    def is_refused(self, run: str, number: int, cid: ClientId) -> bool:
        """Whether `refusals` has this device."""
        query = (
            "select 1 from exchanges e cross join refusals f using (run, round, exchange)"
            " left join closings c on (c.run, c.round, c.exchange, c.cid) = (f.run, f.round, f.exchange, f.cid)"
            " where e.run = ? and e.round = ? and f.cid = ? and c.cid is null limit 1"
        )
        return bool(self._database.rows(query, (run, number, cid)))

    def is_closed(self, key: ExchangeKey) -> bool:
        """False while it is open, and for an unknown one."""
        query = "select closed from exchanges where run = ? and round = ? and exchange = ?"
        return any(closed for (closed,) in self._database.rows(query, key))

    def open_devices(self) -> set[ClientId]:
        """The devices that exchanges ask which are not closed."""
        query = "select cid from tasks join exchanges using (run, round, exchange) where not closed"
        return {cid for (cid,) in self._database.rows(query)}

    def heartbeat(self, key: ExchangeKey, left_s: float) -> None:
        """Store the seconds that the open exchange has left. A restart continues with them: downtime does not count."""
        query = "update exchanges set left_ms = ? where run = ? and round = ? and exchange = ?"
        with self._database.transaction():
            self._database.execute(query, (int(left_s * 1000), *key))

    def expire(self, key: ExchangeKey) -> None:
        """The exchange has failed: its next try has a whole deadline."""
        self.heartbeat(key, 0.0)

    def begin_try(self, key: ExchangeKey, deadline_s: float) -> float:
        """Forget the refusals of an earlier try; -> the seconds that this one has.

        These are what the last heartbeat left, or `deadline_s` after `expire`.
        """
        this = "where run = ? and round = ? and exchange = ?"
        if self._database.rows(f"select 1 from refusals {this} limit 1", key):  # noqa: S608 - our own text
            with suppress(OSError), self._database.transaction():
                self._database.execute(f"delete from refusals {this}", key)  # noqa: S608
        return float(self._database.rows(f"select left_ms from exchanges {this}", key)[0][0] / 1000) or deadline_s  # noqa: S608

    def put_replies(self, key: ExchangeKey, replies: Iterable[StoredReply]) -> None:
        """Store verified replies, whose blobs are on disk, all or none. A second reply of a device is an error."""
        with self._database.transaction():
            self.write_replies(key, replies)

    def write_replies(self, key: ExchangeKey, replies: Iterable[StoredReply]) -> None:
        """`put_replies` as a part of a transaction."""
        rows = [(*key, *reply) for reply in replies]
        self._database.insert("insert into replies values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def replies(self, key: ExchangeKey) -> dict[ClientId, StoredReply]:
        """The stored replies of one exchange, sorted by device."""
        query = f"select {_REPLY} from replies where run = ? and round = ? and exchange = ? order by cid"  # noqa: S608
        return {row[0]: StoredReply(*row) for row in self._database.rows(query, key)}

    def put_refusal(self, key: ExchangeKey, cid: ClientId, reason: str) -> None:
        """Store why a device's reply does not count: the device's error, that of the validation, or "late".

        Refusals are shown to people and decide nothing, so a full disk loses the refusal and raises nothing.
        """
        with suppress(OSError), self._database.transaction():
            self._database.execute("insert or replace into refusals values (?, ?, ?, ?, ?)", (*key, cid, reason))

    def refusals(self, run: str, number: int) -> dict[ClientId, str]:
        """The reasons of round `number`, sorted by device; of several exchanges the last one's."""
        query = (
            "select f.cid, f.reason from refusals f left join closings using (run, round, exchange, cid)"
            " where f.run = ? and f.round = ? and closings.cid is null order by f.cid, f.exchange"
        )
        return dict(self._database.rows(query, (run, number)))

    def refused(self, key: ExchangeKey) -> dict[ClientId, str]:
        """The reasons of this exchange alone, by device."""
        query = "select cid, reason from refusals where run = ? and round = ? and exchange = ?"
        return dict(self._database.rows(query, key))

    def silent(self, run: str, number: int) -> set[ClientId]:
        """The devices that an exchange of round `number` closed without, refused ones too."""
        query = (
            "select distinct t.cid from tasks t join exchanges e using (run, round, exchange)"
            " left join closings c using (run, round, exchange, cid)"
            " where t.run = ? and t.round = ? and e.closed and c.cid is null"
        )
        return {cid for (cid,) in self._database.rows(query, (run, number))}

    def close(
        self,
        key: ExchangeKey,
        cids: Iterable[ClientId],
        *,
        refused: Mapping[ClientId, str] | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        """Fix which replies the exchange closed with.

        The same transaction stores the reasons of `refused` replies and the run's `scales`, which the next closing
        compares updates with.
        """
        with self._database.transaction():
            if scales:
                self._database.put_meta(_scales(key.run), json.dumps(dict(scales)))
            self.write_closing(key, cids, refused or {})

    def write_closing(self, key: ExchangeKey, cids: Iterable[ClientId], refused: Mapping[ClientId, str]) -> None:
        """`close` as a part of a transaction."""
        rows = [(*key, cid, reason) for cid, reason in sorted(refused.items())]
        self._database.insert("insert or replace into refusals values (?, ?, ?, ?, ?)", rows)
        self._database.insert("insert into closings values (?, ?, ?, ?)", [(*key, cid) for cid in sorted(cids)])
        query = "update exchanges set closed = 1 where run = ? and round = ? and exchange = ?"
        self._database.execute(query, key)

    def scales(self, run: str) -> dict[str, float]:
        """The usual size of a run's updates, by kind (update_validation.py), as of the last closed exchange."""
        return dict(json.loads(self._database.meta(_scales(run)) or "{}"))

    def closed_with(self, key: ExchangeKey) -> list[ClientId] | None:
        """The devices that the exchange closed with, sorted; None while it is open or unknown."""
        if not self.is_closed(key):
            return None
        query = "select cid from closings where run = ? and round = ? and exchange = ? order by cid"
        return [cid for (cid,) in self._database.rows(query, key)]


def _scales(run: str) -> str:
    return f"scales/{run}"
