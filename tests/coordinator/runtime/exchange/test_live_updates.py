"""What devices are told in a run that waits for none, and when they get their next task, message by message."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from coordinator.runtime.exchange.journalled_training import EXPIRED, STALE
from coordinator.runtime.exchange.uploads import NO_CREDIT
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.journal_store import END, EXPIRE, HAND, REFUSE, TAKE
from edge_client.protocol.blocks import manifest_of
from tests.support.updates_run import DEADLINE_S, ROUND, Begun, begun, full
from tests.support.virtual_federation import BALLAST
from tests.support.wired_coordinator import DEVICES

__all__ = ["begun"]  # a fixture


def test_a_free_device_gets_the_task_of_one_that_has_answered_until_the_round_has_its_updates(begun: Begun) -> None:
    run = begun(concurrency=1, buffer=2)
    (first,) = tasks = run.tasks()
    assert {task["left_ms"] for task in tasks.values()} == {300_000}
    run.announce(tasks[first], first)
    (_, ack), (second, task) = run.said()
    assert (ack["status"], task["k"], second != first) == ("ok", "task", True)
    assert run.live.progress()["wanted"] == 2
    run.announce(task, second)
    assert run.told() == [(second, "ack", "ok")]  # the round is over, and the next one hands out more
    assert run.live.closed
    assert run.steps() == [HAND, TAKE, HAND, TAKE]
    run.next_round()
    assert len(run.tasks()) == 1


def test_a_device_that_sent_half_of_a_rounds_updates_waits_while_another_is_at_work(begun: Begun) -> None:
    run = begun(concurrency=2, buffer=4)
    tasks, updates = run.tasks(), run.live.updates
    third, *_ = sorted(set(DEVICES) - set(tasks))
    updates.journalled.counts.count(third, 0)
    assert updates.may_get(third)
    updates.journalled.counts.count(third, 0)
    assert not updates.may_get(third)
    run.online = {third}
    for cid, task in tasks.items():
        run.refuse(cid, task["id"], "no_data")
    assert third in run.tasks()


def test_an_update_of_another_kind_or_size_than_asked_is_answered_with_its_code(begun: Begun) -> None:
    run = begun(concurrency=1)
    ((cid, task),) = run.tasks().items()
    right, _ = run.coordinator.update(ExchangeKey("run1", ROUND, 0), cid, 0)
    most = run.live.updates.journalled.prepared[cid].max_size
    run.offer(task, cid, manifest_of(b"x", "stats"))
    run.offer(task, cid, replace(right, size=most + 1, inline=None))
    run.offer(task | {"exchange": 9}, cid, right)
    assert run.told() == [(cid, "err", "bad_field"), (cid, "err", "too_big"), (cid, "err", "closed")]
    run.offer(task, cid, replace(right, size=most, inline=None))
    assert run.told() == [(cid, "go", "")]


def test_a_device_without_a_credit_is_told_to_come_again_in_two_seconds(begun: Begun) -> None:
    run = begun(ballast=BALLAST, free=1)
    (first, one), (second, other) = sorted(run.tasks().items())
    updates = {
        cid: replace(run.coordinator.update(ExchangeKey("run1", ROUND, 0), cid, 0)[0], inline=None)
        for cid in (first, second)
    }
    run.offer(one, first, updates[first])
    run.offer(other, second, updates[second])
    (_, go), (_, busy) = run.said()
    assert (go["k"], busy["code"], busy["detail"], busy["retry_ms"]) == ("go", "busy", NO_CREDIT, 2_000)
    now = run.live.progress()
    assert (now["uploading"], now["open"]) == ([first], [second])
    run.clock.time_s += 29.0
    run.coordinator.send(ExchangeKey("run1", ROUND, 0), first, 0, [0, 1])  # enough to keep its credit for 30 s
    run.clock.time_s += 29.0
    run.offer(other, second, updates[second])
    assert run.told() == [(second, "err", "busy")]
    run.clock.time_s += 1.0
    run.offer(other, second, updates[second])
    assert run.told() == [(second, "go", "")]


def test_a_device_that_could_not_fetch_its_task_is_asked_once_more_and_then_waits_for_a_deadline(begun: Begun) -> None:
    run = begun(concurrency=1)
    ((cid, task),) = run.tasks().items()
    run.refuse(cid, "c1-999", "no_data")
    assert run.said() == []
    run.refuse(cid, task["id"], "unreachable")
    ((again, second),) = run.tasks().items()
    assert (again, run.key_of(second)) == (cid, run.key_of(task))
    run.online = {cid}
    run.refuse(cid, second["id"], "unreachable", detail="no route")
    assert run.said() == []
    assert run.steps() == [HAND, REFUSE]
    assert run.coordinator.store.exchanges.refusals("run1", ROUND) == {cid: "unreachable: no route"}
    assert run.live.progress()["refused"] == [cid]
    assert run.live.wakes_at_s == run.clock.time_s + DEADLINE_S
    run.clock.time_s += DEADLINE_S - 0.1
    run.live.tick()
    assert run.said() == []
    run.clock.time_s += 0.1
    run.live.tick()
    assert list(run.tasks()) == [cid]


def test_a_device_that_cannot_do_its_tasks_is_asked_ever_more_seldom_as_in_rounds(begun: Begun) -> None:
    run = begun(concurrency=1)
    ((cid, task),) = run.tasks().items()
    run.online = {cid}
    asked, tasks = list[int](), [task]
    for number in range(20):  # times without a task
        if tasks:
            asked.append(number)
            run.refuse(cid, tasks[0]["id"], "no_space", detail="no room")
        run.clock.time_s += DEADLINE_S
        run.live.tick()
        tasks = list(run.tasks().values())
    assert asked == [0, 1, 2, 4, 8, 16]
    assert run.live.wakes_at_s == run.clock.time_s + DEADLINE_S
    run.coordinator.dispatcher.exchange.on_connected(cid)
    assert list(run.tasks()) == [cid]


def test_a_device_that_did_a_task_again_is_asked_as_before(begun: Begun) -> None:
    run = begun(concurrency=1, buffer=9)
    ((cid, task),) = run.tasks().items()
    run.online = {cid}
    for _ in range(2):
        run.refuse(cid, task["id"], "no_space")
        run.clock.time_s += DEADLINE_S
        run.live.tick()
        task = run.tasks()[cid]
    run.announce(task, cid)
    assert run.coordinator.context.unable.rows[cid] == {}


def test_a_device_that_refused_and_connects_again_gets_a_task_at_once(begun: Begun) -> None:
    run = begun(concurrency=4, buffer=4)
    tasks = run.tasks()
    run.refuse("d0", tasks["d0"]["id"], "no_data")
    assert run.said() == []
    run.live.resend_task("d0")
    ((cid, again),) = run.tasks().items()
    assert (cid, run.key_of(again) != run.key_of(tasks["d0"])) == ("d0", True)
    run.clock.time_s += 100.0
    run.live.resend_task("d1")
    ((cid, same),) = run.tasks().items()
    assert (cid, run.key_of(same), same["left_ms"]) == ("d1", run.key_of(tasks["d1"]), 200_000)


def test_a_task_without_an_answer_ends_at_its_deadline_with_a_word_to_the_device(begun: Begun) -> None:
    run = begun(concurrency=4, buffer=4)
    run.tasks()
    assert run.live.wakes_at_s == DEADLINE_S
    assert run.live.progress()["left_s"] == 300.0
    run.clock.time_s = DEADLINE_S - 0.04
    run.live.tick()
    assert (run.said(), run.live.progress()["left_s"]) == ([], 0.0)
    run.clock.time_s = DEADLINE_S
    run.live.tick()
    stops = run.said()
    assert sorted(cid for cid, message in stops if message["k"] == "stop") == list(DEVICES)
    assert {message["why"] for _, message in stops} == {"another device has its turn"}
    assert run.steps() == [HAND, *[EXPIRE] * 4]
    state = run.live.updates.journalled
    assert (state.counts.expired, state.refused) == (4, dict.fromkeys(DEVICES, EXPIRED))
    assert run.live.progress()["left_s"] == 0.0


def test_a_task_whose_center_went_on_is_stopped_and_its_update_is_late(begun: Begun) -> None:
    run = begun(concurrency=4, buffer=3, staleness=0)
    tasks = run.tasks()
    run.coordinator.more = True
    for cid in ("d0", "d1", "d2", "d3"):  # all on disk together; the third makes a version
        run.announce(tasks[cid], cid)
    run.live.sync()
    said = run.told()
    assert [one for one in said if one[1] == "ack"] == [(cid, "ack", "ok") for cid in ("d0", "d1", "d2")]
    assert ("d3", "stop", "") in said
    state = run.live.updates.journalled
    assert (state.counts.stale, state.refused["d3"], state.closed) == (1, STALE, True)
    run.next_round()
    assert ("d3", "ack", "late") in run.told()
    assert [path for path in run.coordinator.store.folder.glob("updates/d3/*") if path.is_file()] == []


def test_an_update_that_waits_for_the_disk_is_never_that_of_the_next_task_of_its_device(begun: Begun) -> None:
    """It was stored for that task; with another start the next replay refused it, and no start came further."""
    run = begun(concurrency=4, buffer=4)
    tasks = run.tasks()
    run.coordinator.more = True
    run.announce(tasks["d0"], "d0")
    run.refuse("d0", tasks["d0"]["id"], "no_data")
    run.live.resend_task("d0")
    ((_, task),) = run.tasks().items()
    run.live.sync()
    assert run.told() == [("d0", "ack", "late")]
    assert run.steps() == [HAND, REFUSE, HAND]
    run.announce(task, "d0")
    run.live.sync()
    assert run.told() == [("d0", "ack", "ok")]


def test_where_a_newcomer_waits_and_no_device_is_at_work_or_free_the_round_ends_with_what_it_has(begun: Begun) -> None:
    run = begun(concurrency=4, buffer=4)
    tasks = run.tasks()
    run.announce(tasks["d0"], "d0")
    run.online.clear()
    for cid in ("d1", "d2"):
        run.refuse(cid, tasks[cid]["id"], "no_data")
    run.newcomers = True
    run.live.tick()
    assert not run.live.closed  # d3 is at work
    run.newcomers = False
    run.refuse("d3", tasks["d3"]["id"], "no_data")
    assert not run.live.closed
    run.newcomers = True
    run.live.tick()
    assert run.live.closed
    assert run.steps()[-1] == END


def test_a_step_for_which_the_disk_has_no_room_is_tried_again_after_five_seconds(
    begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(concurrency=1, buffer=2)
    ((cid, task),) = run.tasks().items()
    journal = run.coordinator.store.journal
    with monkeypatch.context() as patch:
        patch.setattr(journal, "take", full)
        run.announce(task, cid)
        assert [(one[1], one[2]) for one in run.told()] == [("ack", "retry")]
        assert run.live.wakes_at_s == run.clock.time_s + 5.0
        patch.setattr(journal, "end_round", full)
        run.live.close()
        assert not run.live.closed
        patch.setattr(journal, "end", full)
        run.clock.time_s = DEADLINE_S
        run.live.tick()
        assert run.live.updates.has_task(cid)
        assert run.live.wakes_at_s == DEADLINE_S + 5.0
    run.clock.time_s += 5.0
    run.live.tick()
    assert run.steps()[:2] == [HAND, EXPIRE]
    with monkeypatch.context() as patch:
        patch.setattr(journal, "hand", full)
        (next_one, task), *_ = run.tasks().items()
        run.refuse(next_one, task["id"], "no_data")
        assert run.tasks() == {}
        assert run.live.wakes_at_s == run.clock.time_s + 5.0
    run.live.tick()
    assert len(run.tasks()) == 1


def test_it_shows_who_is_at_work_what_has_come_and_how_long_a_task_has(begun: Begun) -> None:
    run = begun(concurrency=2, buffer=3)
    (first, task), (second, _) = run.tasks().items()
    run.clock.time_s += 60.0
    run.announce(task, first)
    ((third, _),) = run.tasks().items()
    assert run.live.progress() == {
        "run": "run1",
        "round": ROUND,
        "exchange": 0,
        "asked": 2,
        "wanted": 3,
        "quorum": 0,
        "closed": False,
        "left_s": 240.0,
        "answered": [first],
        "uploading": [],
        "waiting": [],
        "refused": [],
        "open": sorted([second, third]),
        "updates": {
            "versions": [0],
            "counted": 1,
            "stale": 0,
            "expired": 0,
            "staleness": {"mean": 0.0, "most": 0},
            "devices": 4,
            "concurrency": 2,
        },
    }


def test_at_the_end_of_a_run_tasks_are_stopped_and_shown_as_late(begun: Begun) -> None:
    run = begun(concurrency=2)
    at_work = sorted(run.tasks())
    run.live.finish()
    assert sorted(run.told()) == [(cid, "stop", "") for cid in at_work]
    assert run.coordinator.store.exchanges.refusals("run1", ROUND) == dict.fromkeys(at_work, "late")
    assert not any(run.live.updates.has_task(cid) for cid in DEVICES)
    assert math.isinf(run.live.unsynced_since_s)


def test_an_update_that_waits_for_the_disk_when_its_run_is_over_leaves_nothing_there(begun: Begun) -> None:
    run = begun(concurrency=1, ballast=BALLAST)
    ((cid, task),) = run.tasks().items()
    folder = run.coordinator.config.folder / "store" / "updates"
    before = set(folder.rglob("*"))
    run.coordinator.more = True
    manifest, _ = run.coordinator.update(ExchangeKey("run1", ROUND, 0), cid, 0)
    run.offer(task, cid, manifest)
    run.coordinator.send(ExchangeKey("run1", ROUND, 0), cid, 0, list(range(manifest.total)))
    assert [path for path in folder.rglob("*") if path.is_file()]
    run.live.finish()
    assert not [path for path in set(folder.rglob("*")) - before if path.is_file()]
    run.live.sync()
    assert [one[1] for one in run.told()] == ["go", "stop"]


def test_a_task_keeps_its_deadline_in_the_next_round(begun: Begun) -> None:
    run = begun(concurrency=4, buffer=3)
    tasks = run.tasks()
    run.clock.time_s += 50.0
    for cid in ("d0", "d1", "d2"):
        run.announce(tasks[cid], cid)
    assert run.live.closed
    run.said()
    run.next_round()
    left = {cid: task["left_ms"] for cid, task in run.tasks().items()}
    assert left == {"d0": 300_000, "d1": 300_000, "d2": 300_000, "d3": 250_000}


def test_a_refusal_is_told_in_the_round_in_which_it_came(begun: Begun) -> None:
    """Its task may be of an earlier one, whose record is written."""
    run = begun(concurrency=4, buffer=3)
    tasks = run.tasks()
    for cid in ("d0", "d1", "d2"):
        run.announce(tasks[cid], cid)
    run.next_round()
    run.refuse("d3", run.tasks()["d3"]["id"], "no_data")
    assert run.live.updates.journalled.refused == {"d3": "no_data"}
