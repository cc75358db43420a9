from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.storage.exchange_store import ExchangeKey, StoredReply
from coordinator.storage.store import Store
from coordinator.strategies.base import State
from edge_client.errors import ConfigError
from edge_client.protocol.blocks import manifest_of

KEY = ExchangeKey("run1", 1, 0)
REPLY = StoredReply("a", "ab" * 32, 10, 40, "delta", "cd" * 32, 0.5)


Reopen = Callable[[], Store]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Reopen]:
    """Closes the store that is open, and opens the folder again."""
    opened: list[Store] = []

    def again() -> Store:
        if opened:
            opened[-1].close()
        opened.append(Store(tmp_path / "store"))
        return opened[-1]

    yield again
    if opened:
        opened[-1].close()


@pytest.fixture
def store(reopen: Reopen) -> Store:
    return reopen()


def test_an_exchange_survives_with_its_tasks_replies_and_closing_set(store: Store, reopen: Reopen) -> None:
    store.exchanges.open(KEY, {"b": "2", "a": "1"}, 60.0)
    store.exchanges.put_replies(KEY, [REPLY])
    store = reopen()
    assert store.exchanges.exists(KEY)
    assert store.exchanges.task_hashes(KEY) == {"a": "1", "b": "2"}
    assert store.exchanges.replies(KEY) == {"a": REPLY}
    assert store.exchanges.closed_with(KEY) is None
    store.exchanges.close(KEY, ["a"])
    assert reopen().exchanges.closed_with(KEY) == ["a"]


def test_an_exchange_may_close_with_nobody(store: Store) -> None:
    store.exchanges.open(KEY, {}, 60.0)
    store.exchanges.close(KEY, [])
    assert store.exchanges.closed_with(KEY) == []
    assert store.exchanges.closed_with(ExchangeKey("run1", 1, 1)) is None


def test_the_first_reply_of_a_key_stands(store: Store) -> None:
    store.exchanges.put_replies(KEY, [REPLY])
    with pytest.raises(Exception, match="UNIQUE"):
        store.exchanges.put_replies(KEY, [REPLY._replace(sha256="ef" * 32)])
    assert store.exchanges.replies(KEY) == {"a": REPLY}


def test_replies_come_sorted_by_device(store: Store) -> None:
    for cid in ("c", "a", "b"):
        store.exchanges.put_replies(KEY, [REPLY._replace(cid=cid)])
    assert list(store.exchanges.replies(KEY)) == ["a", "b", "c"]


def test_a_state_and_its_events_are_stored_together_or_not_at_all(store: Store) -> None:
    state = State(centers=np.ones((2, 3), np.float32), assignment={"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        store.states.put("run1", 1, state, [{"event": "round", "accuracy": float("nan")}])
    assert store.states.last("run1") is None
    store.states.put("run1", 1, state, [{"event": "round"}])
    assert [json.loads(line)["event"] for line in store.events.lines()] == ["round"]


def test_the_last_state_is_that_of_the_newest_round(store: Store, reopen: Reopen) -> None:
    for number in (0, 1, 2):
        store.states.put("run1", number, State(centers=np.full((1, 2), number, np.float64)))
    store.states.put("other", 9, State(centers=np.zeros((1, 2))))
    found = reopen().states.last("run1")
    assert found is not None
    assert found[0] == 2
    np.testing.assert_array_equal(found[1].centers, np.full((1, 2), 2.0))


def test_the_time_left_is_that_of_the_last_heartbeat(store: Store, reopen: Reopen) -> None:
    store.exchanges.open(KEY, {}, 60.0)
    assert store.exchanges.begin_try(KEY, 90.0) == 60.0
    store.exchanges.heartbeat(KEY, 12.25)
    assert reopen().exchanges.begin_try(KEY, 90.0) == 12.25


def test_the_try_after_a_failed_one_has_a_whole_deadline_and_no_refusal(store: Store, reopen: Reopen) -> None:
    store.exchanges.open(KEY, {"a": "x"}, 60.0)
    store.exchanges.put_refusal(KEY, "a", "deadline")
    store.exchanges.expire(KEY)
    assert reopen().exchanges.begin_try(KEY, 90.0) == 90.0
    assert reopen().exchanges.refusals("run1", 1) == {}


def test_epochs_grow_beyond_everything_that_was_seen(store: Store, reopen: Reopen) -> None:
    assert store.facts.next_epoch(0) == 1
    assert store.facts.next_epoch(7) == 8
    assert reopen().facts.next_epoch(3) == 9


def test_facts_are_made_once(store: Store) -> None:
    assert store.facts.get_or_make("x", lambda: "first") == "first"
    assert store.facts.get_or_make("x", lambda: "second") == "first"
    assert store.states.run_id("fesem", lambda: "r1") == store.states.run_id("fesem", lambda: "r2") == "r1"


def test_a_folder_has_one_writer(store: Store) -> None:
    with pytest.raises(ConfigError, match="in use by another coordinator"):
        Store(store.folder)


def test_what_one_device_sent_is_not_there_for_another(store: Store) -> None:
    sha256 = store.updates("a").put(b"update")
    assert store.updates("a").has(sha256)
    assert not store.updates("b").has(sha256)
    assert not store.blobs.has(sha256)


def test_a_folder_in_which_no_update_is_left_does_not_outlast_a_start(store: Store, reopen: Reopen) -> None:
    """Each device that was ever asked left one for ever; one with an update, or a damaged blob, stays."""
    sha256 = store.updates("kept").put(b"update")
    store.updates("pruned").drop(store.updates("pruned").put(b"an old update"))
    store.updates("silent").partial(manifest_of(b"a part", "delta", inline=False)).close()
    (store.folder / "updates" / "damaged" / "quarantine").mkdir(parents=True)
    (store.folder / "updates" / ".DS_Store").write_bytes(b"a file browser's")
    again = reopen()
    again.drop_stale_partials()
    assert sorted(folder.name for folder in (again.folder / "updates").iterdir()) == [".DS_Store", "damaged", "kept"]
    assert again.updates("kept").read(sha256) == b"update"
    again.updates("pruned").put(b"a new update")  # the device is back


def test_the_fleet_is_enrolled_once_and_sorted(store: Store, reopen: Reopen) -> None:
    store.states.enrol({"b": (2, "litert"), "a": (1, "onnx")})
    assert list(reopen().states.enrolled().items()) == [("a", (1, "onnx")), ("b", (2, "litert"))]


def test_why_an_answer_does_not_count_is_kept_until_it_does(store: Store, reopen: Reopen) -> None:
    store.exchanges.open(KEY, {"a": "x", "b": "y"}, 60)
    store.exchanges.put_refusal(KEY, "a", "no_data: nothing here")
    store.exchanges.put_refusal(KEY, "b", "unavailable")
    store.exchanges.put_refusal(KEY, "b", "no_space")
    assert reopen().exchanges.refusals("run1", 1) == {"a": "no_data: nothing here", "b": "no_space"}
    again = reopen()
    again.exchanges.close(KEY, ["a"])
    assert again.exchanges.refusals("run1", 1) == {"b": "no_space"}
    assert again.exchanges.refusals("run1", 2) == {}


def test_late_replies_are_shown_to_one_round_which_a_replay_shows_again(store: Store, reopen: Reopen) -> None:
    store.late_updates.put(KEY, REPLY)
    store.late_updates.put(KEY, REPLY._replace(sha256="ef" * 32))  # the first of a device stands
    assert store.late_updates.assign("run1", 2) == [REPLY]
    other = REPLY._replace(cid="b")
    store.late_updates.put(KEY, other)
    again = reopen()
    assert again.late_updates.assign("run1", 2) == [REPLY]
    assert again.late_updates.assign("run1", 3) == [other]
    assert again.late_updates.assign("run2", 3) == []
    assert again.exchanges.refusals("run1", 1) == {"a": "late", "b": "late"}


def test_only_what_the_disk_refuses_is_told_as_a_full_disk(store: Store) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"), store.database.transaction():
        store.database.execute("select * from nowhere")
