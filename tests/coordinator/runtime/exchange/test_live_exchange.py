"""What devices are told by the open exchange, and what is stored of it, message by message."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.rounds.silence import Misses
from coordinator.rounds.update_validation import AskedStage
from coordinator.runtime.exchange.exchange_driver import open_exchange
from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.runtime.exchange.task_messages import prepare_tasks
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.base import StreamingExchange
from edge_client.protocol.blocks import Manifest, body_range, manifest_of, pack_block
from edge_client.protocol.task import Reply
from tests.support.virtual_federation import BALLAST, BLOCK
from tests.support.virtual_time import VirtualClock
from tests.support.wired_coordinator import DEVICES, SAMPLES, WiredCoordinator

KEY = ExchangeKey("run1", 1, 0)
DEADLINE_S = 300.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def coordinator(tmp_path: Path, clock: VirtualClock) -> Iterator[WiredCoordinator]:
    made = WiredCoordinator(tmp_path, clock, 0, len(DEVICES))
    with closing(made.store):
        yield made


def asked(coordinator: WiredCoordinator, wanted: int | None = None) -> tuple[LiveExchange, dict[str, dict[str, Any]]]:
    """-> the exchange, which is open, and the task of each device."""
    coordinator.ask(KEY, wanted)
    live = coordinator.dispatcher.exchange.live
    assert isinstance(live, LiveExchange)
    return live, {cid: message for cid, message in coordinator.said() if message["k"] == "task"}


def told(coordinator: WiredCoordinator) -> list[tuple[str, str, str]]:
    """(device, kind, status or code) since the last call."""
    return [(cid, m["k"], m.get("status", m.get("code", ""))) for cid, m in coordinator.said()]


def offer(coordinator: WiredCoordinator, cid: str, update: Manifest, key: ExchangeKey = KEY) -> None:
    about = {**key._asdict(), "attempt": 0, "n": SAMPLES, "seconds": 1.0}
    coordinator.hear(cid, "rdy", **about, what=update.kind, update=update)


def refuse(coordinator: WiredCoordinator, cid: str, re: str, code: str, **more: Any) -> None:  # noqa: ANN401 - fields
    coordinator.hear(cid, "nack", re=re, code=code, **more)


def test_a_task_says_how_much_time_is_left_and_comes_again_with_less_until_the_device_has_answered(
    coordinator: WiredCoordinator, clock: VirtualClock
) -> None:
    live, tasks = asked(coordinator)
    assert {task["left_ms"] for task in tasks.values()} == {300_000}
    clock.time_s += 100.5
    live.resend_task("d0")
    ((cid, again),) = coordinator.said()
    assert (cid, again["left_ms"]) == ("d0", 199_500)
    coordinator.announce("d0", 0, KEY)
    refuse(coordinator, "d1", tasks["d1"]["id"], "no_data")
    coordinator.said()
    for cid in ("d0", "d1", "stranger"):
        assert not live.wants(cid)
        live.resend_task(cid)
    live.begin()
    assert [(cid, m["k"]) for cid, m in sorted(coordinator.said(), key=lambda one: one[0])] == [
        ("d2", "task"),
        ("d3", "task"),
    ]
    live.close()
    coordinator.said()
    live.resend_task("d2")
    assert (coordinator.said(), live.wants("d2")) == ([], False)


def test_a_method_that_streams_sees_each_reply_when_it_counts_and_once(
    coordinator: WiredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    tasks = coordinator.tasks(KEY)
    streamed = StreamingExchange(tasks, lambda who, reply: seen.append((who, reply.n)))
    monkeypatch.setattr(coordinator, "tasks", lambda _: streamed)
    asked(coordinator)
    for cid, attempt in (("d1", 0), ("d0", 1), ("d1", 0)):
        coordinator.announce(cid, attempt, KEY)
    assert seen == [("d1", SAMPLES), ("d0", SAMPLES - 1)]


def test_a_restart_goes_on_with_the_time_that_the_last_heartbeat_left(tmp_path: Path, clock: VirtualClock) -> None:
    first = WiredCoordinator(tmp_path, clock, 0, len(DEVICES))
    live, _ = asked(first)
    assert live.wakes_at_s == clock.time_s + 5.0
    for _ in range(3):
        clock.time_s += 4.5
        live.tick()  # at 4.5 s none, at 9 s one, at 13.5 s none
    first.store.close()
    again = WiredCoordinator(tmp_path, clock, 0, len(DEVICES))
    _, tasks = asked(again)
    assert {task["left_ms"] for task in tasks.values()} == {291_000}
    again.store.close()


@pytest.mark.parametrize(
    ("quorum", "wanted", "least", "goal"), [(0.7, None, 3, 4), (0.5, None, 2, 4), (0.5, 3, 2, 3), (1.0, 9, 4, 4)]
)
def test_the_quorum_is_that_share_of_the_answers_that_are_wanted_rounded_up(
    coordinator: WiredCoordinator, quorum: float, wanted: int | None, least: int, goal: int
) -> None:
    context = replace(
        coordinator.context, config=replace(coordinator.config, round=replace(coordinator.config.round, quorum=quorum))
    )
    tasks = coordinator.tasks(KEY)
    live = LiveExchange(KEY, tasks, open_exchange(KEY, tasks, context), wanted, context)
    now = live.progress()
    assert (now["asked"], now["quorum"], now["wanted"]) == (4, least, goal)


@pytest.mark.parametrize(("waits", "least"), [((True, True), 4), ((True, False), 0), ((False, False), 0)])
def test_a_sum_that_has_begun_has_no_quorum_of_its_own(
    coordinator: WiredCoordinator, waits: tuple[bool, bool], least: int
) -> None:
    plan = replace(coordinator.config.round, quorum=1.0)
    context = replace(coordinator.context, config=replace(coordinator.config, round=plan))
    stages = {
        cid: AskedStage(
            stage="shares", message=b"m", work=None, decode=lambda _: Reply(n=1), max_bytes=9, needs_quorum=quorum
        )
        for cid, quorum in zip(DEVICES, 2 * waits, strict=True)
    }
    live = LiveExchange(KEY, stages, open_exchange(KEY, stages, context), None, context)
    assert live.progress()["quorum"] == least


@pytest.mark.parametrize(("spares", "waits"), [((0, 3), True), ((1, 3), False), ((None, None), False)])
def test_a_sum_that_may_lose_no_device_waits_for_one_that_owes_answers(
    coordinator: WiredCoordinator, spares: tuple[int | None, int | None], *, waits: bool
) -> None:
    """It closed when the others had answered, and failed."""
    coordinator.context.misses["d3"] = Misses(0, 15)
    stages = {
        cid: AskedStage(stage="shares", message=b"m", work=None, decode=lambda _: Reply(n=1), max_bytes=9, spare=spare)
        for cid, spare in zip(DEVICES, 2 * spares, strict=True)
    }
    coordinator.dispatcher.exchange.live = live = LiveExchange(
        KEY, stages, open_exchange(KEY, stages, coordinator.context), None, coordinator.context
    )
    for cid in ("d0", "d1", "d2"):
        offer(coordinator, cid, manifest_of(b"m", "masked", inline=True))
    assert live.closed is not waits


def test_an_update_of_another_kind_or_size_than_asked_is_answered_with_its_code(coordinator: WiredCoordinator) -> None:
    asked(coordinator)
    right, _ = coordinator.update(KEY, "d0", 0)
    most = prepare_tasks(KEY, coordinator.tasks(KEY), coordinator.context)["d0"].max_size
    offer(coordinator, "d0", manifest_of(b"x", "stats"))
    offer(coordinator, "d0", replace(right, size=most + 1, inline=None))
    offer(coordinator, "d0", right, KEY._replace(exchange=7))
    assert told(coordinator) == [("d0", "err", "bad_field"), ("d0", "err", "too_big"), ("d0", "err", "closed")]
    offer(coordinator, "d0", replace(right, size=most, inline=None))
    assert told(coordinator) == [("d0", "go", "")]


def test_a_device_that_could_not_fetch_its_task_is_asked_once_more_and_then_has_refused(
    coordinator: WiredCoordinator,
) -> None:
    live, tasks = asked(coordinator)
    refuse(coordinator, "d0", tasks["d0"]["id"], "unreachable")
    ((cid, again),) = coordinator.said()
    assert (cid, again["k"]) == ("d0", "task")
    refuse(coordinator, "d0", tasks["d0"]["id"], "unreachable")  # the first message again: not the last one
    assert live.wants("d0")
    refuse(coordinator, "d0", again["id"], "unreachable", detail="no route")
    assert not live.wants("d0")
    assert coordinator.store.exchanges.refusals(KEY.run, KEY.round) == {"d0": "unreachable: no route"}
    refuse(coordinator, "d1", tasks["d1"]["id"], "unreachable")  # each device has its own
    assert [cid for cid, _ in coordinator.said()] == ["d1"]


def test_a_refusal_counts_for_the_exchange_that_it_names_and_for_this_process_alone(
    coordinator: WiredCoordinator,
) -> None:
    live, tasks = asked(coordinator)
    old = f"c{coordinator.sender.epoch - 1}-1"
    for re, named in (
        (old, KEY._asdict()),
        (tasks["d0"]["id"], KEY._replace(exchange=1)._asdict()),
        (tasks["d0"]["id"], {"run": KEY.run}),
        (tasks["d1"]["id"], {}),
        (old, {}),
    ):
        refuse(coordinator, "d0", re, "no_data", **named)
        assert live.wants("d0")
    refuse(coordinator, "d0", f"c{coordinator.sender.epoch}-999", "no_data", **KEY._asdict())
    refuse(coordinator, "d1", tasks["d1"]["id"], "no_data")
    assert not live.wants("d0")
    assert not live.wants("d1")
    assert coordinator.store.exchanges.refusals(KEY.run, KEY.round) == {"d0": "no_data", "d1": "no_data"}


def test_a_refusal_after_an_accepted_update_is_not_shown(coordinator: WiredCoordinator) -> None:
    live, tasks = asked(coordinator)
    coordinator.announce("d0", 0, KEY)
    refuse(coordinator, "d0", tasks["d0"]["id"], "no_data", **KEY._asdict())
    assert coordinator.store.exchanges.refusals(KEY.run, KEY.round) == {}
    assert live.progress()["answered"] == ["d0"]


def test_a_closing_stops_those_who_have_not_answered_and_counts_their_silence(
    coordinator: WiredCoordinator, clock: VirtualClock
) -> None:
    coordinator.context.misses.update({"d0": Misses(2, 8), "d3": Misses(1, 4), "gone": Misses(4, 15)})
    live, tasks = asked(coordinator)
    coordinator.announce("d0", 0, KEY)
    refuse(coordinator, "d1", tasks["d1"]["id"], "no_data")
    coordinator.said()
    clock.time_s += DEADLINE_S
    live.tick()
    stops = [(cid, m["k"], m["why"], m["exchange"]) for cid, m in coordinator.said()]
    assert stops == [(cid, "stop", "the exchange is closed", 0) for cid in ("d2", "d3")]
    assert coordinator.context.misses == {
        "d0": Misses(0, 7),
        "d2": Misses(1, 4),
        "d3": Misses(2, 8),
        "gone": Misses(4, 15),
    }
    assert live.late_updates is None
    assert live.wakes_at_s == clock.time_s + 5.0
    assert math.isinf(live.unsynced_since_s)


def test_an_update_with_another_hash_than_announced_may_be_sent_once_more(tmp_path: Path, clock: VirtualClock) -> None:
    coordinator = WiredCoordinator(tmp_path, clock, BALLAST, len(DEVICES))
    asked(coordinator)
    manifest, data = coordinator.update(KEY, "d0", 0)
    lie = replace(manifest, sha256="ab" * 32)
    for status in ("bad_hash", "bad_hash"):
        offer(coordinator, "d0", lie)
        assert told(coordinator) == [("d0", "go", "")]
        for index in range(manifest.total):
            body = data[slice(*body_range(manifest, index))]
            coordinator.block("d0", lie, index, pack_block(body, index, manifest.total))
        assert told(coordinator) == [("d0", "ack", status)]
    refused = coordinator.store.exchanges.refusals(KEY.run, KEY.round)
    assert list(refused) == ["d0"]
    assert refused["d0"].startswith("bad_hash")
    coordinator.store.close()


def test_a_device_that_the_test_may_not_ask_yet_is_asked_when_it_comes_again(coordinator: WiredCoordinator) -> None:
    free, tasks = {"d0", "d1"}, coordinator.tasks(KEY)
    prepared = open_exchange(KEY, tasks, coordinator.context)
    live = LiveExchange(KEY, tasks, prepared, None, coordinator.context, may_ask=free.__contains__)
    coordinator.dispatcher.exchange.live = live
    live.begin()
    assert sorted(cid for cid, _ in coordinator.said()) == ["d0", "d1"]
    live.resend_task("d2")
    assert coordinator.said() == []
    free.add("d2")
    live.resend_task("d2")
    assert [cid for cid, _ in coordinator.said()] == ["d2"]
    live.close()
    assert sorted(cid for cid, message in coordinator.said() if message["k"] == "stop") == ["d0", "d1", "d2"]


def test_while_uploads_wait_for_credits_no_further_task_is_handed_out(tmp_path: Path, clock: VirtualClock) -> None:
    made = WiredCoordinator(tmp_path, clock, BALLAST, 1, task_window=2)
    live, tasks = asked(made)
    first, second = tasks
    for cid in (first, second):
        offer(made, cid, replace(made.update(KEY, cid, 0)[0], inline=None))
    assert told(made) == [(first, "go", "")]
    clock.time_s += 15.0
    live.on_quiet()
    assert [m for _, m in made.said() if m["k"] == "task"] == []
    manifest, _ = made.update(KEY, first, 0)
    made.send(KEY, first, 0, list(range(manifest.total)))
    made.said()
    clock.time_s += 15.0
    live.on_quiet()
    assert len([m for _, m in made.said() if m["k"] == "task"]) == 1
    made.store.close()


def test_blocks_that_come_after_the_credit_went_back_are_dropped_and_what_had_come_is_kept(
    tmp_path: Path, clock: VirtualClock
) -> None:
    made = WiredCoordinator(tmp_path, clock, BALLAST, 1)
    live, _ = asked(made)
    update = replace(made.update(KEY, "d0", 0)[0], inline=None)
    assert update.block == BLOCK
    offer(made, "d0", update)
    made.send(KEY, "d0", 0, [0])
    clock.time_s += 31.0
    live.tick()
    made.send(KEY, "d0", 0, [1])
    made.said()
    offer(made, "d0", update)
    ((_, go),) = made.said()
    assert go["have"] is not None
    made.send(KEY, "d0", 0, list(range(1, update.total)))
    assert told(made) == [("d0", "ack", "ok")]
    made.store.close()


def asked_of(coordinator: WiredCoordinator, exchange: int, code: str) -> set[str]:
    """Open an exchange in which d0 refuses with this code and the others update; -> those that got a task."""
    key = ExchangeKey("run1", exchange, 0)
    coordinator.ask(key, None)
    tasks = {cid: message for cid, message in coordinator.said() if message["k"] == "task"}
    for cid, task in tasks.items():
        if cid == "d0":
            for _ in range(2):  # a broker may bring it twice
                refuse(coordinator, cid, task["id"], code, detail="a model of 9 bytes")
        else:
            coordinator.announce(cid, 0, key)
    assert coordinator.dispatcher.exchange.live is not None
    assert coordinator.dispatcher.exchange.live.closed
    coordinator.dispatcher.exchange.end()
    return set(tasks)


def test_a_device_that_cannot_hold_the_model_is_asked_ever_more_seldom_until_it_connects_again(
    coordinator: WiredCoordinator,
) -> None:
    asked_it = [number for number in range(1, 12) if "d0" in asked_of(coordinator, number, "no_space")]
    assert asked_it == [1, 2, 3, 5, 9]
    why = coordinator.store.exchanges.refusals("run1", 4)["d0"]
    assert why == "no_space: a model of 9 bytes (not asked again yet)"
    coordinator.hear("d0", "st", s="on", bd=2, caps={"engine": "onnx", "n": SAMPLES})
    assert "d0" in asked_of(coordinator, 12, "no_space")


def test_a_task_that_is_sent_again_does_not_end_a_row_of_refusals(coordinator: WiredCoordinator) -> None:
    """It did where the blobs were unreachable at first, and beside a test of a run without rounds."""
    for number in (1, 2):
        asked_of(coordinator, number, "no_space")
    coordinator.ask(ExchangeKey("run1", 3, 0), None)
    tasks = {cid: message for cid, message in coordinator.said() if message["k"] == "task"}
    refuse(coordinator, "d0", tasks["d0"]["id"], "unreachable")
    ((_, again),) = coordinator.said()
    refuse(coordinator, "d0", again["id"], "no_space")
    coordinator.dispatcher.exchange.end()
    assert "d0" not in asked_of(coordinator, 4, "no_space")


def test_an_update_more_than_are_wanted_in_one_sync_is_told_that_it_is_late(coordinator: WiredCoordinator) -> None:
    coordinator.ask(KEY, len(DEVICES) - 1)
    coordinator.said()
    coordinator.more = True
    for cid in DEVICES:
        coordinator.announce(cid, 0, KEY)
    assert told(coordinator) == []
    coordinator.dispatcher.exchange.sync()
    statuses = [status for _, kind, status in told(coordinator) if kind == "ack"]
    assert sorted(statuses) == ["late", *["ok"] * (len(DEVICES) - 1)]


def test_a_late_update_ends_a_row_of_refusals_as_any_other(coordinator: WiredCoordinator) -> None:
    for number in range(1, 5):
        asked_of(coordinator, number, "no_space")
    late = ExchangeKey("run1", 5, 0)
    coordinator.ask(late, len(DEVICES) - 1, late=True)
    for cid in DEVICES[1:]:
        coordinator.announce(cid, 0, late)
    coordinator.dispatcher.exchange.end()
    coordinator.announce("d0", 0, late)
    assert ("d0", "ack", "ok") in told(coordinator)
    assert "d0" in asked_of(coordinator, 6, "no_space")
    assert "d0" in asked_of(coordinator, 7, "no_space")


def test_a_device_that_refuses_for_another_reason_is_asked_each_time(coordinator: WiredCoordinator) -> None:
    assert all("d0" in asked_of(coordinator, number, "no_data") for number in range(1, 8))
