"""What survives a crash: SQLite rows and content-addressed blobs. Everything is on disk before anyone is told.

Order of writes (PROTOCOL.md, rounds): tasks before they are sent, replies before they are acknowledged, the closing of
an exchange with the exact set of devices it closed with, the state after a round together with its line for
metrics.jsonl. Blobs are renamed into place and fsynced first, then the row that names them is committed. Knows no MQTT
and no method.
"""

from __future__ import annotations

import errno
import fcntl
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from coordinator.storage import state_codec
from coordinator.strategies.base import State
from edge_client.errors import ConfigError, FedcentersError
from edge_client.protocol.task import ClientId
from edge_client.transport.blobs import BlobFolder

_DISK_ERRORS = ("is full", "disk I/O error")  # SQLite's words
SCHEMA_VERSION = "3"
# What an older store needs beside the tables that it lacks. Version 1 hashed tasks in another form, version 2 asked for
# no loss in a test: an empty hash says that the question was asked before the upgrade, and that a replay cannot compare
# it.
_ASKED_BEFORE = "update tasks set sha256 = ''"
_UPGRADES = {"1": _ASKED_BEFORE, "2": _ASKED_BEFORE}

_TABLES = """
create table if not exists meta (key text primary key, value text not null) without rowid;
create table if not exists devices (cid text primary key, n integer not null, engine text not null) without rowid;
create table if not exists runs (name text primary key, run text not null unique) without rowid;
create table if not exists states (run text, round integer, blob text not null, primary key (run, round)) without rowid;
create table if not exists exchanges (
    run text, round integer, exchange integer, left_ms integer not null, closed integer not null default 0,
    primary key (run, round, exchange)) without rowid;
create table if not exists tasks (
    run text, round integer, exchange integer, cid text, sha256 text not null,
    primary key (run, round, exchange, cid)) without rowid;
create table if not exists replies (
    run text, round integer, exchange integer, cid text, sha256 text not null, size integer not null,
    n integer not null, what text not null, base text not null, seconds real not null,
    primary key (run, round, exchange, cid)) without rowid;
create table if not exists closings (
    run text, round integer, exchange integer, cid text, primary key (run, round, exchange, cid)) without rowid;
create table if not exists refusals (
    run text, round integer, exchange integer, cid text, reason text not null,
    primary key (run, round, exchange, cid)) without rowid;
create table if not exists late (
    run text, round integer, exchange integer, cid text, sha256 text not null, size integer not null,
    n integer not null, what text not null, base text not null, seconds real not null, shown integer not null default 0,
    primary key (run, round, exchange, cid)) without rowid;
create table if not exists events (id integer primary key, line text not null);
"""


class ExchangeKey(NamedTuple):
    """Names one exchange: the training run, its round (from 1), and which yield of the round it is (from 0)."""

    run: str
    round: int
    exchange: int


class StoredReply(NamedTuple):
    """A reply on disk. `base` is the sha256 of the blob that a delta was taken from, "zero", or "" for statistics."""

    cid: ClientId
    sha256: str
    size: int
    n: int
    what: str
    base: str
    seconds: float


class Store:
    """One folder, one writer. `folder`/coordinator.sqlite, `folder`/blobs, `folder`/updates/<cid>."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = _lock(folder / "lock")
        self.blobs = BlobFolder(folder / "blobs")
        # Whoever opens it hands it to one other thread at most.
        self._db = sqlite3.connect(folder / "coordinator.sqlite", isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")
        version = self._version()
        if version not in (None, SCHEMA_VERSION, *_UPGRADES):
            self.close()
            raise ConfigError(
                f"{folder} was written by another version of fedcenters",
                hint="finish it with that version, or use another folder",
            )
        with self._write():
            for statement in _TABLES.split(";"):
                self._db.execute(statement)
            self._db.execute(_UPGRADES.get(version or "", ""))
            self._db.execute("insert or replace into meta values ('schema', ?)", (SCHEMA_VERSION,))

    def _version(self) -> str | None:
        """Of the schema that is there; None in a new folder."""
        known = self._rows("select 1 from sqlite_master where name = 'meta'")
        return self.get_fact("schema") if known else None

    def close(self) -> None:
        """Free the file. Idempotent."""
        self._db.close()
        self._lock.close()

    @contextmanager
    def _write(self) -> Iterator[None]:
        """One durable transaction: all of it or none. OSError when the disk does not take it."""
        try:
            self._db.execute("begin immediate")
            yield
            self._db.execute("commit")
        except BaseException as wrong:
            if self._db.in_transaction:  # SQLite has undone it by itself where the disk is full
                self._db.execute("rollback")
            if isinstance(wrong, sqlite3.OperationalError) and any(word in str(wrong) for word in _DISK_ERRORS):
                raise OSError(errno.ENOSPC, f"{self.folder}: {wrong}") from wrong
            raise

    def _rows(self, query: str, values: Iterable[Any] = ()) -> list[Any]:
        return self._db.execute(query, tuple(values)).fetchall()

    # -- facts about the whole folder

    def get_fact(self, key: str) -> str | None:
        """One remembered fact, or None."""
        rows = self._rows("select value from meta where key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def put_fact(self, key: str, value: str, events: Iterable[Mapping[str, Any]] = ()) -> None:
        """Store a fact, replacing an older one, together with the events that tell of it."""
        with self._write():
            self._db.execute("insert or replace into meta values (?, ?)", (key, value))
            for event in events:
                self._insert_event(event)

    def get_or_make_fact(self, key: str, make: Callable[[], str]) -> str:
        """The fact `key`; made and stored the first time."""
        known = self.get_fact(key)
        if known is None:
            known = make()
            self.put_fact(key, known)
        return known

    def next_epoch(self, seen: int) -> int:
        """One more than any epoch that this folder or the broker has seen; durable before it is used."""
        epoch = max(int(self.get_fact("epoch") or 0), seen) + 1
        self.put_fact("epoch", str(epoch))
        return epoch

    # -- the enrolled fleet, fixed when training begins

    def enrol(self, devices: Mapping[ClientId, tuple[int, str]]) -> None:
        """Fix the fleet that all runs train on: (samples, engine) per device."""
        with self._write():
            rows = [(cid, n, engine) for cid, (n, engine) in devices.items()]
            self._db.executemany("insert into devices values (?, ?, ?)", rows)

    def enrolled(self) -> dict[ClientId, tuple[int, str]]:
        """The fleet, sorted; empty before it was fixed."""
        return {cid: (n, engine) for cid, n, engine in self._rows("select cid, n, engine from devices order by cid")}

    # -- runs and states

    def run_id(self, name: str, make: Callable[[], str]) -> str:
        """The wire's id of the run called `name`; drawn once, so that a restart continues the same run."""
        rows = self._rows("select run from runs where name = ?", (name,))
        if rows:
            return str(rows[0][0])
        run = make()
        with self._write():
            self._db.execute("insert into runs values (?, ?)", (name, run))
        return run

    def run_names(self) -> dict[str, str]:
        """The name of each run, by the wire's id."""
        return dict(self._rows("select run, name from runs"))

    def put_state(self, run: str, number: int, state: State, events: Iterable[Mapping[str, Any]] = ()) -> None:
        """The state after round `number` (0: before the first) and its events, in one transaction."""
        blob = self.blobs.put(state_codec.encode_state(state))
        with self._write():
            self._db.execute("insert into states values (?, ?, ?)", (run, number, blob))
            for event in events:
                self._insert_event(event)

    def last_state(self, run: str) -> tuple[int, State] | None:
        """The newest (round, state) of a run, or None when it has not begun."""
        rows = self._rows("select round, blob from states where run = ? order by round desc limit 1", (run,))
        return (rows[0][0], state_codec.decode_state(self.blobs.read(rows[0][1]))) if rows else None

    # -- exchanges

    def open_exchange(self, key: ExchangeKey, hashes: Mapping[ClientId, str], left_s: float) -> None:
        """The tasks of a new exchange, before any is sent: the hash of what each device is asked."""
        with self._write():
            self._db.execute("insert into exchanges values (?, ?, ?, ?, 0)", (*key, int(left_s * 1000)))
            rows = [(*key, cid, sha256) for cid, sha256 in sorted(hashes.items())]
            self._db.executemany("insert into tasks values (?, ?, ?, ?, ?)", rows)

    def has_exchange(self, key: ExchangeKey) -> bool:
        """Whether the exchange was ever opened."""
        return bool(self._rows("select 1 from exchanges where run = ? and round = ? and exchange = ?", key))

    def task_hashes(self, key: ExchangeKey) -> dict[ClientId, str]:
        """What each device was asked; empty when the exchange never was. An older version's questions have no hash."""
        return dict(self._rows("select cid, sha256 from tasks where run = ? and round = ? and exchange = ?", key))

    def heartbeat(self, key: ExchangeKey, left_s: float) -> None:
        """How long the open exchange still has; a restart continues with this, so downtime does not count."""
        with self._write():
            self._db.execute(
                "update exchanges set left_ms = ? where run = ? and round = ? and exchange = ?",
                (int(left_s * 1000), *key),
            )

    def left_s(self, key: ExchangeKey) -> float:
        """Seconds that the exchange had left at the last heartbeat."""
        return float(
            self._rows("select left_ms from exchanges where run = ? and round = ? and exchange = ?", key)[0][0] / 1000
        )

    def put_reply(self, key: ExchangeKey, reply: StoredReply) -> None:
        """A verified reply whose blob is already on disk. The first of a key stands."""
        with self._write():
            self._db.execute("insert into replies values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*key, *reply))

    def replies(self, key: ExchangeKey) -> dict[ClientId, StoredReply]:
        """The stored replies of one exchange, sorted by device."""
        query = (
            "select cid, sha256, size, n, what, base, seconds from replies"
            " where run = ? and round = ? and exchange = ? order by cid"
        )
        rows = self._rows(query, key)
        return {row[0]: StoredReply(*row) for row in rows}

    def put_refusal(self, key: ExchangeKey, cid: ClientId, reason: str) -> None:
        """Why a device that was asked has no reply that counts: its own words, those of admission, or "late".

        For people: a full disk costs the note, nothing else.
        """
        with suppress(OSError), self._write():
            self._db.execute("insert or replace into refusals values (?, ?, ?, ?, ?)", (*key, cid, reason))

    def refusals(self, run: str, number: int) -> dict[ClientId, str]:
        """The reasons of round `number`, sorted by device; of several exchanges the last one's."""
        query = (
            "select f.cid, f.reason from refusals f left join closings using (run, round, exchange, cid)"
            " where f.run = ? and f.round = ? and closings.cid is null order by f.cid, f.exchange"
        )
        return dict(self._rows(query, (run, number)))

    def put_late(self, key: ExchangeKey, reply: StoredReply) -> None:
        """A verified reply that came after closing, whose blob is on disk; the refusal that people see with it."""
        with self._write():
            values = (*key, *reply, 0)
            self._db.execute("insert or ignore into late values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            self._db.execute("insert or replace into refusals values (?, ?, ?, ?, 'late')", (*key, reply.cid))

    def assign_late(self, run: str, number: int) -> list[StoredReply]:
        """The late replies that round `number` of a run is shown: all that no round was, fixed by the first call."""
        fact = f"late/{run}/{number}"
        if self.get_fact(fact) is None:
            with self._write():
                self._db.execute("update late set shown = ? where run = ? and shown = 0", (number, run))
                self._db.execute("insert into meta values (?, 'shown')", (fact,))
        query = (
            "select cid, sha256, size, n, what, base, seconds from late"
            " where run = ? and shown = ? order by cid, round, exchange"
        )
        return [StoredReply(*row) for row in self._rows(query, (run, number))]

    def close_exchange(
        self,
        key: ExchangeKey,
        cids: Iterable[ClientId],
        *,
        refused: Mapping[ClientId, str] | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        """Fix for ever which replies the exchange closed with.

        In one transaction with whose replies it `refused`, and the run's scales of moves, which the next closing needs.
        """
        with self._write():
            if scales:
                fact = _scales(key.run), json.dumps(dict(scales))
                self._db.execute("insert or replace into meta values (?, ?)", fact)
            rows = [(*key, cid, reason) for cid, reason in sorted((refused or {}).items())]
            self._db.executemany("insert or replace into refusals values (?, ?, ?, ?, ?)", rows)
            self._db.executemany("insert into closings values (?, ?, ?, ?)", [(*key, cid) for cid in sorted(cids)])
            self._db.execute("update exchanges set closed = 1 where run = ? and round = ? and exchange = ?", key)

    def scales(self, run: str) -> dict[str, float]:
        """How far updates of a run move, by kind (update_validation.py), as the last closed exchange left it."""
        return dict(json.loads(self.get_fact(_scales(run)) or "{}"))

    def closed_with(self, key: ExchangeKey) -> list[ClientId] | None:
        """The devices that the exchange closed with, sorted; None while it is open or unknown."""
        rows = self._rows("select closed from exchanges where run = ? and round = ? and exchange = ?", key)
        if not rows or not rows[0][0]:
            return None
        return [
            cid
            for (cid,) in self._rows(
                "select cid from closings where run = ? and round = ? and exchange = ? order by cid", key
            )
        ]

    def updates(self, cid: ClientId) -> BlobFolder:
        """The blobs that one device sent. Apart from all others: what one sent never answers for another."""
        return BlobFolder(self.folder / "updates" / cid)

    # -- the record that metrics.jsonl mirrors

    def put_event(self, event: Mapping[str, Any]) -> None:
        """Store one event."""
        with self._write():
            self._insert_event(event)

    def _insert_event(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(event, allow_nan=False, separators=(",", ":"))
        self._db.execute("insert into events (line) values (?)", (line,))

    def events(self, after: int = 0) -> list[str]:
        """The stored lines, oldest first, without the first `after`."""
        return [line for (line,) in self._rows("select line from events order by id limit -1 offset ?", (after,))]


def _scales(run: str) -> str:
    return f"scales/{run}"


def _lock(path: Path) -> IO[str]:
    """Held while the file is open, and let go by the kernel when the process dies, however it dies."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as taken:
        file.close()
        raise ConfigError(
            f"{path.parent} is in use by another coordinator", hint="stop that one, or use another folder"
        ) from taken
    return file


class ReplayDiverged(FedcentersError):
    """A replay asked something else than what was asked before: the code, the seed or the data changed."""

    def __init__(self, key: ExchangeKey) -> None:
        super().__init__(
            f"round {key.round} of run {key.run} asks other things than before the restart",
            hint="continue with the version and the settings that began it, or use another folder",
        )
