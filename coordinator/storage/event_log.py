"""The events of a training: rows of the database, copied to metrics.jsonl, one JSON object per line.

Other programs may read metrics.jsonl while it grows. The database is the record: the next start appends the lines that
a crash kept out of the file and completes a partial line. A file with other lines than the database is kept as
metrics.jsonl.old, the next such one as metrics.jsonl.old.2, and written anew: one was damaged, or only one was restored
from a backup.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from coordinator.storage.database import Database
from edge_client.errors import ConfigError

log = logging.getLogger(__name__)
LINES_AT_ONCE = 32  # a round of ten thousand devices has a line of a megabyte
TAIL_BYTES = 1 << 16


# A fact of each run without rounds: the number of an event, and the updates that counted up to it. Events are few
# beyond it, so that `status` reads no long history; ?1 is the run's name.
COUNTED_UPDATES = """
select coalesce(json_extract(value, '$[1]'), 0) + coalesce((
    select sum(json_extract(line, '$.asynchronous.counted')) from events where json_extract(line, '$.event') = 'round'
    and json_extract(line, '$.run') = ?1 and id > coalesce(json_extract(value, '$[0]'), 0)), 0)
from (select (select value from meta where key = 'updates ' || ?1) as value)"""


def insert_events(database: Database, events: Iterable[Mapping[str, Any]]) -> None:
    """Insert events, within a transaction of the caller."""
    new = list(events)
    lines = [(json.dumps(event, allow_nan=False, separators=(",", ":")),) for event in new]
    database.insert("insert into events (line) values (?)", lines)
    for run in sorted({event["run"] for event in new if event["event"] == "round" and "asynchronous" in event}):
        (total,), (last,) = database.rows(COUNTED_UPDATES, (run,))[0], database.rows("select max(id) from events")[0]
        database.put_meta(f"updates {run}", json.dumps([last, total]))


class EventStore:
    """The events as rows of the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, event: Mapping[str, Any]) -> None:
        with self._database.transaction():
            insert_events(self._database, [event])

    def newest(self, kind: str) -> dict[str, Any]:
        """The last event of this kind, of which there is one."""
        query = "select line from events where json_extract(line, '$.event') = ? order by id desc limit 1"
        return dict(json.loads(self._database.rows(query, (kind,))[0][0]))

    def lines(self) -> Iterator[str]:
        """The stored events as JSON, oldest first; a part of them is in memory."""
        return (line for _, line in self.numbered())

    def numbered(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """The stored events as (number, JSON), oldest first, with numbers above `after`.

        A part of them is in memory, and those before are not looked at: a long training has millions.
        """
        query = "select id, line from events where id > ? order by id limit ?"
        while rows := self._database.rows(query, (after, LINES_AT_ONCE)):
            yield from rows
            after = rows[-1][0]


class EventLog:
    """Copies the events of `store` to the file `path`, and passes each new event to `watch`.

    `unix_ms` gives the wall time of the events that `write` makes.
    """

    def __init__(
        self,
        path: Path,
        store: EventStore,
        watch: Callable[[Mapping[str, Any]], None],
        unix_ms: Callable[[], int],
    ) -> None:
        self._path, self._store, self._watch, self.unix_ms = path, store, watch, unix_ms
        self._last = 0  # number of the last event in the file
        _cut_partial_line(path)
        if not self._has_only_stored_lines():
            old = _free_name(path.with_name(f"{path.name}.old"))
            log.warning("%s has other lines than the database, and is kept as %s", path, old)
            path.replace(old)
            self._last = 0
        self.catch_up()

    def _has_only_stored_lines(self) -> bool:
        """Whether the lines of the file are the first ones of the database; notes the last one's number."""
        if not self._path.exists():
            return True
        stored = self._store.numbered()
        with self._path.open("rb") as file:
            for line in file:
                known = next(stored, None)
                if known is None or line != known[1].encode() + b"\n":
                    return False
                self._last = known[0]
        return True

    def write(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - JSON values
        """Store one event, copy it to the file and pass it on."""
        record = {"event": event, "unix_ms": self.unix_ms(), **fields}
        self._store.put(record)
        self.append_stored(record)

    def note(self, event: str, **fields: Any) -> bool:  # noqa: ANN401 - JSON values
        """As `write`, of what a device did; -> False where the disk has no room. The training waits for room then."""
        record = {"event": event, "unix_ms": self.unix_ms(), **fields}
        try:
            self._store.put(record)
        except OSError as full:
            log.warning("no room for the event %s of %s: %s", event, fields.get("device"), full.strerror)
            return False
        with suppress(OSError):  # a later event brings its line
            self.catch_up()
        self._watch(record)
        return True

    def append_stored(self, record: Mapping[str, Any]) -> None:
        """Copy an event that another transaction stored, and pass it on."""
        self.catch_up()
        self._watch(record)

    def catch_up(self) -> None:
        """Append the stored events that the file lacks. On a full disk the file is left as it was: OSError."""
        first = next(stored := self._store.numbered(after=self._last), None)
        if first is None:
            return
        last, size = self._last, self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("a", encoding="utf-8") as file:
                for last, line in chain([first], stored):  # noqa: B007 - counts once the file is closed
                    file.write(line + "\n")
        except OSError:
            os.truncate(self._path, size)
            raise
        self._last = last


def _free_name(path: Path) -> Path:
    """The path, or with the first number from 2 on behind it that no file has."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return next(name for name in chain([path], names) if not name.exists())


def _cut_partial_line(path: Path) -> None:
    """Remove a partial line at the end of the file. Raises ConfigError for a link."""
    if path.is_symlink():
        raise ConfigError(f"{path} is a link", hint="remove it; the lines are kept in the database and written again")
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(file, size)
    if whole < size:
        os.truncate(path, whole)


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    """Where the last whole line ends; 0 without any. The file is read from its end, a part at a time."""
    end = size
    while end:
        begin = max(0, end - TAIL_BYTES)
        file.seek(begin)
        if at := file.read(end - begin).rfind(b"\n") + 1:
            return begin + at
        end = begin
    return 0
