"""What `status` costs: the files that it opens and the rows that it reads do not grow with the rounds of a run."""

from __future__ import annotations

import shutil
import sqlite3
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from coordinator.status_in_words import status_lines
from coordinator.storage.event_log import insert_events
from coordinator.storage.status import STATUS_FILE, read_status
from coordinator.storage.store import Store
from tests.support.counted_connection import CountedConnection
from tests.support.virtual_federation import Federation

NO_SCORE = {"micro": None, "macro": None}


class _TouchedFiles:
    """What this process opens or lists while `wanted` is set. An audit hook stays for the life of the process."""

    def __init__(self, folder: Path) -> None:
        self.wanted, self.paths, self._folder = False, list[str](), str(folder)
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.wanted and event in ("open", "os.listdir", "os.scandir", "sqlite3.connect"):
            path = str(arguments[0]).removeprefix("file://")
            if path.startswith(self._folder):
                self.paths.append(path)


def test_what_status_opens_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path).play()
    folder, touched = fed.config.folder, _TouchedFiles(fed.config.folder)
    seen = []
    for rounds in (range(5), range(5, 500)):
        for number in rounds:  # a run with `keep-rounds = 0`: a state, and an update of each device
            for kept in ("blobs", "updates/d00", "updates/d01"):
                (folder / "store" / kept / f"{number:064x}").write_bytes(b"model")
        touched.wanted = True
        found = read_status(folder)
        touched.wanted = False
        seen.append(sorted(touched.paths))
        touched.paths.clear()
    assert seen[1] == seen[0]
    assert [Path(path.partition("?")[0]).name for path in seen[0]] == [STATUS_FILE, "coordinator.sqlite"]
    assert found["free_bytes"] == pytest.approx(shutil.disk_usage(folder).free, rel=0.2)
    assert any(line.startswith("the disk of the run folder has ") for line in status_lines(found))


@pytest.mark.parametrize("changes", [{}, {"accuracy": NO_SCORE, "loss": NO_SCORE}], ids=["scores", "no scores"])
def test_what_status_reads_of_the_database_does_not_grow_with_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Also where no device holds samples back to test on."""
    fed = Federation.of(tmp_path).play()
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=CountedConnection))
    before = read_status(fed.config.folder)
    once = CountedConnection.steps
    round_event = next(event for event in reversed(fed.events) if event["event"] == "round")
    with closing(Store(fed.config.folder / "store")) as store, store.database.transaction():
        insert_events(store.database, [round_event | changes] * 1000)
    CountedConnection.steps = 0
    assert read_status(fed.config.folder) == before | {"silent_s": ANY, "free_bytes": ANY}
    assert CountedConnection.steps < 1.5 * once


def test_the_updates_of_a_run_without_rounds_are_counted_once_and_not_by_each_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records of a long history were read each time: 1.9 s for 100,000."""
    fed = Federation.of(tmp_path, rounds=3, concurrency=2).play()
    folder = fed.config.folder
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=CountedConnection))
    (first,) = read_status(folder)["runs"]
    once, CountedConnection.steps = CountedConnection.steps, 0
    assert first["updates"] == sum(e["asynchronous"]["counted"] for e in fed.rounds() if "asynchronous" in e)
    event = fed.rounds()[-1]
    with closing(Store(folder / "store")) as store, store.database.transaction():
        store.database.execute("delete from meta where key like 'updates %'")  # as an earlier version left it
        insert_events(store.database, [event] * 500)
    total = first["updates"] + 500 * event["asynchronous"]["counted"]
    with closing(Store(folder / "store")) as store, store.database.transaction():
        insert_events(store.database, [event] * 500)
    total += 500 * event["asynchronous"]["counted"]
    CountedConnection.steps = 0
    assert read_status(folder)["runs"][0]["updates"] == total
    assert CountedConnection.steps < 1.5 * once
