"""Read-only access to a run folder, while its coordinator writes to it or after the run has ended."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from coordinator.rounds.update_validation import ZERO_BASE
from coordinator.storage import state_codec
from coordinator.storage.database import DATABASE_FILE, refuse_damage, tell_disk
from coordinator.strategies.base import State
from edge_client.errors import ConfigError
from edge_client.protocol import codecs
from edge_client.protocol.messages import parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program
from edge_client.protocol.task import ClientId, Flat
from edge_client.protocol.topics import check_cid, check_sha256

STORE_FOLDER = "store"  # the store's folder within a run folder
MAX_CACHED_BASES = 16  # base models in memory at the same time


class NoRunYet(ConfigError):
    """A folder in which no coordinator has begun."""

    def __init__(self, folder: Path) -> None:
        hint = "`serve` makes it when it starts; a run's folder is the `folder` of its coordinator's configuration"
        super().__init__(f"there is no run in {folder} yet", hint=hint)


def read_program(folder: Path) -> Program:
    """The training program that the coordinator compiled."""
    with open_database(folder) as db:
        row = db.execute("select value from meta where key = 'program'").fetchone()
    if row is None:
        raise ConfigError(f"{folder} holds no training program yet", hint="wait until the coordinator has compiled it")
    data = _blob(folder / STORE_FOLDER / "blobs", json.loads(row[0])["program"])
    return Program.from_json(parse_json(data, MAX_PROGRAM_BYTES))


def last_state(folder: Path, name: str) -> tuple[State, Flat]:
    """The state after the last round of the run `name`, and the common first model [schema.size]."""
    query = "select blob from states join runs on states.run = runs.run where name = ? order by round desc"
    with open_database(folder) as db:
        state = db.execute(query, (name,)).fetchone()
        program = db.execute("select value from meta where key = 'program'").fetchone()
    if state is None or program is None:
        raise ConfigError(f"{folder} has no round of {name} yet", hint="wait until its first round has ended")
    blobs = folder / STORE_FOLDER / "blobs"
    first = state_codec.decode_array(_blob(blobs, json.loads(program[0])["initial"]))
    return state_codec.decode_state(_blob(blobs, state[0])), first


def device_models(
    folder: Path,
    name: str,
    round: int,  # noqa: A002 - the protocol's word
    *,
    limit: int | None = None,
) -> tuple[list[ClientId], Iterator[tuple[ClientId, Flat]]]:
    """The devices of a round's first exchange with models, and an iterator that decodes [schema.size] model by model.

    At most `limit` devices, at even steps.
    """
    query = """
        select cid, sha256, base from replies join runs on replies.run = runs.run
        where name = ? and round = ? and what = 'delta' and exchange = (
            select min(exchange) from replies join runs on replies.run = runs.run
            where name = ? and round = ? and what = 'delta')
        order by cid"""
    with open_database(folder) as db:
        rows = db.execute(query, (name, round, name, round)).fetchall()
    if limit is not None:
        rows = rows[:: -(-len(rows) // limit) or 1]
    return [cid for cid, *_ in rows], _models(folder, rows)


def _models(folder: Path, rows: Sequence[tuple[ClientId, str, str]]) -> Iterator[tuple[ClientId, Flat]]:
    schema = read_program(folder).schema
    bases: dict[str, Flat] = {}
    for cid, sha256, base in rows:
        delta = codecs.decode_vector(
            _blob(folder / STORE_FOLDER / "updates" / check_cid(cid), sha256), schema, kind="delta"
        )
        if base != ZERO_BASE and base not in bases:
            if len(bases) >= MAX_CACHED_BASES:
                bases.pop(next(iter(bases)))
            bases[base] = codecs.decode_vector(_blob(folder / STORE_FOLDER / "blobs", base), schema, kind="model")
        yield cid, delta if base == ZERO_BASE else bases[base] + delta


@contextmanager
def open_database(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database of a run folder, read-only. Raises NoRunYet when there is none.

    SQLite keeps a file beside the database while it is read, also for a reader. Where the folder cannot be written, as
    that of a mounted backup or on a full disk, it reads the database alone. Raises ConfigError for one whose log is not
    in it yet, and OSError for one that this user may not read.
    """
    path = folder / STORE_FOLDER / DATABASE_FILE
    if not path.is_file():
        raise NoRunYet(folder)
    wal = path.with_name(f"{path.name}-wal")  # there while a coordinator runs, and after one that was killed
    is_frozen, has_log = not os.access(path.parent, os.W_OK), _size(wal) > 0
    if is_frozen and has_log and not path.with_name(f"{path.name}-shm").exists():
        hint = "copy the whole folder to a disk that can be written, and read it there"
        raise ConfigError(f"{path.parent} cannot be written, and {wal.name} must be merged to be read", hint=hint)
    with refuse_damage(path):
        try:
            db = _connect(path, immutable=is_frozen and not has_log)
        except OSError:
            if has_log:
                raise
            db = _connect(path, immutable=True)  # its folder has no room
        with closing(db):
            if not _has_events(db):
                raise NoRunYet(folder)  # its coordinator is just starting
            with _refuse_older_version(path):
                yield db


@contextmanager
def _refuse_older_version(path: Path) -> Iterator[None]:
    """Raise ConfigError for a store without a table, which a coordinator makes when it starts."""
    try:
        yield
    except sqlite3.OperationalError as wrong:
        if "no such table" not in str(wrong):
            raise
        raise ConfigError(
            f"{path} was written by an older version of fedcenters ({wrong})",
            hint="start `serve` with its configuration once, which converts the folder",
        ) from wrong


def _connect(path: Path, *, immutable: bool) -> sqlite3.Connection:
    """The database, of which one page was read. Raises OSError where SQLite cannot keep its file beside it."""
    address = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"
    with tell_disk(path.parent), ExitStack() as opened:
        db = opened.enter_context(closing(sqlite3.connect(address, uri=True)))
        _has_events(db)
        opened.pop_all()
    return db


def _size(path: Path) -> int:
    """In bytes; 0 where there is no such file, as once its coordinator has ended."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _has_events(db: sqlite3.Connection) -> bool:
    return bool(db.execute("select 1 from sqlite_master where name = 'events'").fetchone())


def _blob(folder: Path, sha256: str) -> bytes:
    return (folder / check_sha256(sha256)).read_bytes()
