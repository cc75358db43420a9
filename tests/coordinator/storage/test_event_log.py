from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store

NOW_MS = 1_700_000_000_000


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


def test_an_event_that_was_stored_with_something_else_is_shown_once(tmp_path: Path, store: Store) -> None:
    event_log = EventLog(tmp_path / "m.jsonl", store.events, lambda _: None, lambda: NOW_MS)
    store.facts.put("fact", "1", [{"event": "round"}])
    event_log.append_stored({"event": "round"})
    event_log.catch_up()
    assert lines(tmp_path / "m.jsonl") == [{"event": "round"}]
