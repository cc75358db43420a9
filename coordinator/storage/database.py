"""The coordinator's SQLite database: one writer per folder, schema, upgrades of older schemas, durable transactions.

The classes of the other files in this folder each read and write some of its tables. A transaction is on disk when it
ends: the write-ahead log is synchronised at every commit.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge_client.errors import ConfigError
from edge_client.transport.folder_lock import lock_folder

DATABASE_FILE = "coordinator.sqlite"
SCHEMA_VERSION = "5"
# The statement that an older store needs beside the tables that it lacks. Version 1 hashed tasks in another form,
# version 2 asked for no loss in a test, version 3 had longer label totals, perhaps too long for a message, and version
# 4 hashed the program and the blocks of a task too. An empty hash means that a replay cannot compare the task.
_CLEAR_TASK_HASHES = "update tasks set sha256 = ''"
UPGRADES = dict.fromkeys(("1", "2", "3", "4"), _CLEAR_TASK_HASHES)
_RESTORE = "restore the folder from a backup, or use another folder to begin anew"
_DISK_ERRORS = {  # parts of SQLite's messages, and what they mean
    "is full": errno.ENOSPC,
    "disk I/O error": errno.EIO,
    "unable to open database file": errno.EACCES,  # or a folder that is gone
    "readonly database": errno.EACCES,
}

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
create table if not exists task_blobs (
    run text, round integer, exchange integer, sha256 text, primary key (run, round, exchange, sha256)) without rowid;
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
create table if not exists prekeys (
    cid text, number integer, keys blob not null, run text, round integer, exchange integer,
    primary key (cid, number)) without rowid;
create table if not exists journal (
    run text, round integer, place integer, what text not null, said text not null, task_round integer,
    primary key (run, round, place)) without rowid;
create table if not exists events (id integer primary key, line text not null);
create index if not exists events_by_kind on events (json_extract(line, '$.event'), json_extract(line, '$.run'));
create index if not exists scored_rounds on events (
    json_extract(line, '$.event'), json_extract(line, '$.run'), coalesce(json_extract(line, '$.accuracy.micro'),
    json_extract(line, '$.loss.micro'), json_extract(line, '$.metrics')) is not null);
"""


class Database:
    """`folder`/coordinator.sqlite, locked against a second coordinator while it is open.

    Only its owner may read the folder: it holds the devices' updates. Raises ConfigError when the folder is in use, its
    database is damaged or lost, or holds an unknown schema; then the folder is left unchanged. OSError: a full disk, or
    no right to write.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._folder = folder
        self._lock = lock_folder(folder, by="coordinator")
        self._one_at_a_time = threading.RLock()  # slow work in a thread of its own uses the store too
        try:
            _check_not_lost(folder)
            with tell_disk(folder):
                self._connection = sqlite3.connect(
                    folder / DATABASE_FILE, isolation_level=None, check_same_thread=False
                )
            self._open()
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> None:
        """Check the file, and make or upgrade its tables."""
        try:
            with refuse_damage(self._folder / DATABASE_FILE), tell_disk(self._folder):
                self.execute("pragma journal_mode = wal")
                self.execute("pragma synchronous = full")
                check_pages(self._connection)
                version = self._version()
            with self.transaction():
                for statement in _TABLES.split(";"):
                    self.execute(statement)
                self.execute(UPGRADES.get(version or "", ""))
                self.put_meta("schema", SCHEMA_VERSION)
        except BaseException:
            self._connection.close()
            raise

    def _version(self) -> str | None:
        """The version of the schema in the file; None in a new file. Raises ConfigError for an unknown or lost one."""
        has_meta = self.rows("select 1 from sqlite_master where name = 'meta'")
        version = self.meta("schema") if has_meta else None
        if version is None and _has_blobs(self._folder):
            raise _lost(self._folder, f"holds nothing (was it copied without {DATABASE_FILE}-wal?)")
        if version not in (None, SCHEMA_VERSION, *UPGRADES):
            raise ConfigError(
                f"{self._folder} was written by another version of fedcenters",
                hint="go on with that version, or restore the backup of before it (docs/run-as-a-service.md)",
            )
        return version

    def close(self) -> None:
        """Close the file and release the lock. Idempotent."""
        self._connection.close()
        self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all statements of the block, durably, or none. Raises OSError when the disk refuses the commit."""
        with self._one_at_a_time, tell_disk(self._folder):
            yield from self._commit()

    def _commit(self) -> Iterator[None]:
        try:
            self.execute("begin immediate")
            yield
            self.execute("commit")
        except BaseException:
            if self._connection.in_transaction:  # SQLite rolls back by itself when the disk is full
                self.execute("rollback")
            raise

    def execute(self, query: str, values: Iterable[Any] = ()) -> None:
        """Run one statement; a statement that writes belongs into a `transaction`."""
        with self._one_at_a_time:
            self._connection.execute(query, tuple(values))

    def insert(self, query: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Run one statement for each row, within a `transaction`."""
        self._connection.executemany(query, rows)

    def rows(self, query: str, values: Iterable[Any] = ()) -> list[Any]:
        """All rows of a query, as tuples."""
        with self._one_at_a_time:
            return self._connection.execute(query, tuple(values)).fetchall()

    def meta(self, key: str) -> str | None:
        """One value of the table of facts, or None."""
        found = self.rows("select value from meta where key = ?", (key,))
        return str(found[0][0]) if found else None

    def put_meta(self, key: str, value: str) -> None:
        """Insert or replace one value of the table of facts, within a `transaction`."""
        self.execute("insert or replace into meta values (?, ?)", (key, value))


@contextmanager
def tell_disk(folder: Path) -> Iterator[None]:
    """Raise OSError for what SQLite says of a disk without room, or of files that may not be written."""
    try:
        yield
    except sqlite3.OperationalError as wrong:
        for words, number in _DISK_ERRORS.items():
            if words in str(wrong):
                raise OSError(number, f"{folder}: {wrong}") from wrong
        raise


@contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """Raise ConfigError for what SQLite says of a file that is damaged or no database."""
    try:
        yield
    except sqlite3.DatabaseError as wrong:
        if isinstance(wrong, sqlite3.OperationalError):  # a lock, a full disk, no rights
            raise
        raise ConfigError(f"{path} is damaged ({wrong})", hint=_RESTORE) from wrong


def check_pages(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError when a page of the database is damaged."""
    found = connection.execute("pragma quick_check(1)").fetchone()[0]
    if found != "ok":
        raise sqlite3.DatabaseError(found.splitlines()[-1])


def _check_not_lost(folder: Path) -> None:
    """Refuse blobs without a database: a training that was begun anew would forget them in silence."""
    path = folder / DATABASE_FILE
    if (not path.exists() or not path.stat().st_size) and _has_blobs(folder):
        raise _lost(folder, "is empty" if path.exists() else "is missing")


def _lost(folder: Path, state: str) -> ConfigError:
    return ConfigError(f"{folder / DATABASE_FILE} {state}, but there are blobs of a training beside it", hint=_RESTORE)


def _has_blobs(folder: Path) -> bool:
    blobs = folder / "blobs"
    return blobs.is_dir() and any(file.is_file() for file in blobs.iterdir())
