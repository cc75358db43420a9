from __future__ import annotations

import json
import resource
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.dashboard.displayed_metrics import replay_events
from coordinator.storage.event_log import EventLog, insert_events
from coordinator.storage.store import Store

NOW_MS = 1_700_000_000_000
LONG, OF_THEM = 20_000, 1_000  # bytes of a line, and lines of a long history


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store")
    yield store
    store.close()


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line_and_is_told(tmp_path: Path, store: Store) -> None:
    told: list[Mapping[str, Any]] = []
    event_log = EventLog(tmp_path / "m.jsonl", store.events, told.append, lambda: NOW_MS)
    event_log.write("start", epoch=1)
    event_log.write("done")
    assert (
        lines(tmp_path / "m.jsonl")
        == [
            {"event": "start", "unix_ms": NOW_MS, "epoch": 1},
            {"event": "done", "unix_ms": NOW_MS},
        ]
        == told
    )


def test_lines_that_a_crash_kept_out_are_added_and_half_a_line_is_made_whole(tmp_path: Path, store: Store) -> None:
    for event in ("a", "b", "c"):
        store.events.put({"event": event})
    path = tmp_path / "m.jsonl"
    path.write_text('{"event":"a"}\n{"eve')
    EventLog(path, store.events, lambda _: None, lambda: NOW_MS)
    assert [line["event"] for line in lines(path)] == ["a", "b", "c"]


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was_and_comes_with_a_later_one(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Mapping[str, Any]] = []
    event_log, path = EventLog(tmp_path / "m.jsonl", store.events, told.append, lambda: NOW_MS), tmp_path / "m.jsonl"
    event_log.write("start")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    put = store.events.put

    def put_on_a_disk_that_is_full_then(event: Mapping[str, Any]) -> None:
        put(event)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(store.events, "put", put_on_a_disk_that_is_full_then)
            assert event_log.note("joined", device="d0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [line["event"] for line in lines(path)] == ["start"]
    event_log.write("done")
    assert [line["event"] for line in lines(path)] == ["start", "joined", "done"] == [one["event"] for one in told]


def test_an_event_that_was_stored_with_something_else_is_shown_once(tmp_path: Path, store: Store) -> None:
    event_log = EventLog(tmp_path / "m.jsonl", store.events, lambda _: None, lambda: NOW_MS)
    store.facts.put("fact", "1", [{"event": "round"}])
    event_log.append_stored({"event": "round"})
    event_log.catch_up()
    assert lines(tmp_path / "m.jsonl") == [{"event": "round"}]


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that `work` has in memory at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_start_after_a_long_history_has_a_small_part_of_it_in_memory(tmp_path: Path, store: Store) -> None:
    """The file is compared with the database, half a line at its end is cut, and the dashboard hears all events."""
    with store.database.transaction():
        insert_events(store.database, [{"event": "note", "text": "n" * LONG}] * OF_THEM)
    path = tmp_path / "m.jsonl"

    def start() -> None:
        EventLog(path, store.events, lambda _: None, lambda: NOW_MS)

    for place in (0, LONG * OF_THEM // 2, LONG * OF_THEM + OF_THEM):  # none, half and all of it is written
        whole = path.read_bytes() if path.exists() else b""
        path.write_bytes(whole[:place] + b'{"eve')
        assert peak_bytes(start) < LONG * OF_THEM / 8
        assert len(lines(path)) == OF_THEM
    assert peak_bytes(lambda: replay_events(store.events.lines())) < LONG * OF_THEM / 8


def test_half_a_line_that_is_longer_than_a_part_of_the_file_is_cut(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "m.jsonl"
    store.events.put({"event": "a"})
    for before in (b"", b'{"event":"a"}\n'):
        path.write_bytes(before + b'{"event":"' + b"b" * 200_000)
        EventLog(path, store.events, lambda _: None, lambda: NOW_MS)
        assert lines(path) == [{"event": "a"}]
