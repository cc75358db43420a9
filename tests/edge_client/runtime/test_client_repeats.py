"""Whatever happens to a task, its result arrives once: repeats, late answers, stops, and power that comes and goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest

from edge_client.protocol.blocks import Manifest
from edge_client.protocol.task import Array, Probe, Tensors
from edge_client.transport.base import Event
from tests.support.scripted_coordinator import (
    DEVICE,
    FEDERATION,
    BallastEngine,
    DeviceStage,
    Script,
    StagedTransport,
)


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return DeviceStage(tmp_path)


def test_a_task_that_is_done_is_announced_again_and_not_trained_again(stage: DeviceStage) -> None:
    stage.play_turns(lambda: stage.ask(stage.fit()), lambda: stage.ask(stage.fit()))
    first, second = stage.said("rdy")
    assert first["update"] == second["update"]
    assert first["seconds"] == second["seconds"]
    assert first["attempt"] == second["attempt"] == 0


def test_a_result_without_an_answer_is_announced_again_after_a_minute(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield 59
        assert len(stage.said("rdy")) == 1
        yield 20
        assert len(stage.said("rdy")) == 2

    stage.play(script())


def test_an_acknowledged_result_is_not_announced_again(stage: DeviceStage) -> None:
    stage.play_turns(lambda: stage.ask(stage.fit()), lambda: stage.ack("ok"), 600)
    stage.play(iter(()))
    assert len(stage.said("rdy")) == 1


def test_a_device_that_lost_power_after_training_announces_its_result_when_it_is_back(stage: DeviceStage) -> None:
    stage.play_turns(lambda: stage.ask(stage.fit()))
    stage.opened.clear()
    stage.play(iter(()))
    first, second = stage.said("rdy")
    assert first["update"] == second["update"]
    assert stage.opened == []


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_an_update_that_the_disk_lost_is_trained_again_when_the_task_comes_again(
    stage: DeviceStage, damage: Callable[[Path], object]
) -> None:
    stage.play_turns(lambda: stage.ask(stage.fit()))
    damage(stage.folder / "state" / "kept" / stage.last("rdy")["update"]["sha256"])
    stage.play_turns(stage.go, lambda: stage.ask(stage.fit()), stage.go)
    assert len(stage.opened) == 2
    assert stage.uploaded()


def test_a_stored_result_that_cannot_be_announced_is_forgotten_and_its_task_is_done_again(stage: DeviceStage) -> None:
    stage.play_turns(lambda: stage.ask(stage.fit()))
    file = stage.config().state / "state.json"
    raw = json.loads(file.read_bytes())
    raw["result"]["metrics"]["loss"] = "none"
    file.write_text(json.dumps(raw))
    announced = len(stage.said("rdy"))
    assert stage.play_turns(0.0).state.result is None
    assert len(stage.said("rdy")) == announced
    stage.play_turns(lambda: stage.ask(stage.fit()))
    assert len(stage.said("rdy")) == announced + 1


def test_a_lost_link_costs_one_announcement_and_only_the_missing_blocks(stage: DeviceStage) -> None:
    stage.play_turns(
        lambda: stage.ask(stage.fit()),
        lambda: stage.broker.drop_connection(f"{FEDERATION}.{DEVICE}"),
        stage.go,
    )
    assert len(stage.said("rdy")) == 2
    stage.uploaded()


def test_a_new_boot_makes_the_device_announce_again_within_the_spread(stage: DeviceStage) -> None:
    def script() -> Script:
        stage.lead(1)
        yield
        stage.ask(stage.fit())
        yield
        stage.lead(2, spread_ms=4_000)
        yield
        assert len(stage.said("rdy")) == 1
        yield 4
        assert len(stage.said("rdy")) == 2

    stage.play(script())


def test_a_credit_of_before_the_new_boot_is_not_used_after_it(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        assert Manifest.from_json(stage.last("rdy")["update"]).total > 2
        stage.go()
        stage.lead(2, spread_ms=4_000)
        yield
        assert len(stage.arrived) <= 1  # what was under way when the new boot was heard of
        yield 4
        stage.go()
        yield

    stage.play(script())
    stage.uploaded()


def test_a_device_announces_itself_again_to_each_connection_of_the_coordinator_that_is_newer_than_its_own(
    stage: DeviceStage,
) -> None:
    def script() -> Script:
        yield
        stage.lead(1, link=1)
        yield
        assert len(stage.said("st")) == 2
        stage.lead(1, link=1, state={"doing": "serve", "newcomers": "no"})
        yield
        assert len(stage.said("st")) == 2
        stage.lead(1, link=2, spread_ms=4_000)
        yield 4
        assert len(stage.said("st")) == 3

    stage.play(script())


def test_to_a_coordinator_that_was_there_before_it_announces_itself_once(stage: DeviceStage) -> None:
    stage.lead(1, link=1)
    stage.play_turns(lambda: None, lambda: None)
    assert [message["s"] for message in stage.said("st")] == ["on", "off"]


def test_an_old_task_that_comes_late_is_ignored(stage: DeviceStage) -> None:
    stage.play_turns(lambda: stage.ask(stage.fit(), round_=2), lambda: stage.ask(stage.fit(), round_=1))
    assert [m["round"] for m in stage.said("rdy")] == [2]


def test_retry_and_busy_are_obeyed_after_the_time_they_name(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.ack("retry", retry_ms=5_000)
        yield 4
        assert len(stage.said("rdy")) == 1
        yield 20
        assert len(stage.said("rdy")) == 2
        stage.tell("err", re=stage.last("rdy")["id"], code="busy", retry_ms=5_000)
        yield 4
        assert len(stage.said("rdy")) == 2
        yield 20
        assert len(stage.said("rdy")) == 3

    stage.play(script())


def test_the_longest_times_that_a_message_can_name_are_waited_for_in_parts(
    stage: DeviceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue raises OverflowError for a wait of more than 292 years, and a message can name a thousand times that."""
    longest_ms, waits, receive = 2**53 - 1, list[float](), StagedTransport.receive

    def noted(transport: StagedTransport, timeout_s: float) -> Event | None:
        waits.append(timeout_s)
        return receive(transport, timeout_s)

    monkeypatch.setattr(StagedTransport, "receive", noted)
    stage.serve = False
    first, second = (partial(stage.ask, stage.fit(k), round_=k, codec="i8", left_ms=longest_ms) for k in (1, 2))

    def script() -> Script:
        yield
        first()
        yield
        stage.tell("err", re=stage.last("get")["id"], code="busy", retry_ms=longest_ms)
        yield 1
        stage.send_blocks(stage.last("get"))
        stage.serve = True
        yield
        stage.ack("retry", retry_ms=longest_ms)
        yield
        second()
        yield 1

    stage.play(script())
    assert len(stage.said("rdy")) >= 2
    with pytest.raises(OverflowError):
        SimpleQueue[None]().get(timeout=longest_ms / 1000)
    assert max(waits) <= 60


def test_a_wrong_hash_is_sent_again_once(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.ack("bad_hash")
        yield
        assert len(stage.said("rdy")) == 2
        stage.ack("bad_hash")
        yield 600

    stage.play(script())
    assert len(stage.said("rdy")) == 2


def test_a_forged_acknowledgement_of_another_update_changes_nothing(stage: DeviceStage) -> None:
    device = stage.play_turns(
        lambda: stage.ask(stage.fit()),
        lambda: stage.tell("ack", run="r1", round=1, exchange=0, attempt=0, sha256="0" * 64, status="ok"),
    )
    assert device.state.result is not None
    assert device.state.result.status is None


def test_stop_drops_a_task_that_is_being_fetched(stage: DeviceStage) -> None:
    stage.serve = False

    stage.play_turns(lambda: stage.ask(stage.fit()), lambda: stage.tell("stop", run="r1", round=1, exchange=0), 200)
    assert stage.said("rdy") == stage.said("nack") == []


def test_stop_drops_a_task_in_the_middle_of_its_training(stage: DeviceStage) -> None:
    steps: list[float] = []

    def stop_at_the_third() -> None:
        steps.append(stage.clock.time_s)
        stage.clock.time_s += 1
        if len(steps) == 3:
            stage.tell("stop", run="r1", round=1, exchange=0)

    stage.before_step = stop_at_the_third

    device = stage.play_turns(lambda: stage.ask(stage.fit(steps=100)), 200)
    assert len(steps) == 3
    assert stage.said("rdy") == stage.said("nack") == []
    assert device.state.result is None


def test_stop_drops_a_task_in_the_middle_of_an_evaluation(stage: DeviceStage, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, batches = BallastEngine.evaluate, list[int]()

    def stop_at_the_third(engine: BallastEngine, feeds: Tensors) -> dict[str, Array]:
        batches.append(1)
        stage.clock.time_s += 1
        if len(batches) == 3:
            stage.tell("stop", run="r1", round=1, exchange=0)
        return evaluate(engine, feeds)

    monkeypatch.setattr(BallastEngine, "evaluate", stop_at_the_third)
    task = Probe(models=[stage.model(0), stage.model(1)], want=frozenset({"loss"}), batch=2, seed=0)
    stage.play_turns(lambda: stage.ask(task), 200)
    assert len(batches) == 3
    assert stage.said("rdy") == stage.said("nack") == []


def test_a_device_that_is_told_to_leave_does_not_finish_its_training(stage: DeviceStage) -> None:
    steps: list[int] = []

    def leave_at_the_third() -> None:
        steps.append(1)
        if len(steps) == 3 and stage.playing is not None:
            stage.playing.stop()

    stage.before_step = leave_at_the_third

    stage.play_turns(lambda: stage.ask(stage.fit(steps=100)), 200)
    assert len(steps) == 3
    assert stage.said("rdy") == stage.said("nack") == []


def test_training_that_outlasts_its_deadline_ends_with_a_nack(stage: DeviceStage) -> None:
    def a_minute_passes() -> None:
        stage.clock.time_s += 60

    stage.before_step = a_minute_passes

    stage.play_turns(lambda: stage.ask(stage.fit(steps=100), left_ms=150_000))
    assert [m["code"] for m in stage.said("nack")] == ["deadline"]


def test_a_task_that_is_sent_again_has_its_new_deadline(stage: DeviceStage) -> None:
    steps: list[int] = []

    def a_minute_passes_and_the_task_comes_again() -> None:
        steps.append(1)
        stage.clock.time_s += 60
        if len(steps) == 2:  # a coordinator that was restarted gives the exchange more time
            stage.ask(stage.fit(steps=4), left_ms=600_000)

    stage.before_step = a_minute_passes_and_the_task_comes_again

    def script() -> Script:
        yield
        stage.ask(stage.fit(steps=4), left_ms=150_000)
        yield

    stage.play(script())
    assert (len(steps), stage.said("nack"), len(stage.said("rdy"))) == (4, [], 1)


def test_a_device_asks_again_after_its_last_update_when_the_next_task_comes_again(stage: DeviceStage) -> None:
    """A coordinator whose connection is new sends tasks again; it may have missed the question, which took a minute."""

    def ask(round_: int) -> None:
        stage.ask(stage.fit(round_), round_=round_, codec="i8")

    stage.play_turns(lambda: ask(1), lambda: ask(2), lambda: ask(2))
    assert [m["round"] for m in stage.said("rdy")] == [1, 1, 1]


def test_stop_ends_the_announcing(stage: DeviceStage) -> None:
    stage.play_turns(lambda: stage.ask(stage.fit()), lambda: stage.tell("stop", run="r1", round=1, exchange=0), 600)
    assert len(stage.said("rdy")) == 1


def test_the_owner_is_told_once_how_every_result_was_answered(stage: DeviceStage) -> None:
    def stop(number: int) -> None:
        stage.tell("stop", run="r1", round=number, exchange=0)

    stage.play_turns(
        lambda: stage.ask(stage.fit(), round_=1),
        lambda: stop(1),
        lambda: stop(1),
        lambda: stage.ask(stage.fit(), round_=2),
        lambda: stage.tell("err", re=stage.last("rdy")["id"], code="closed"),
        lambda: stage.ask(stage.fit(), round_=3),
        lambda: stage.ack("ok"),
        lambda: stop(3),
    )
    answers = [(event["round"], event["status"]) for event in stage.told if event["event"] == "answered"]
    assert answers == [(1, "late"), (2, "closed"), (3, "ok")]


def test_a_newer_task_replaces_the_one_being_fetched(stage: DeviceStage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit(), round_=1)
        yield
        stage.serve = True
        stage.ask(stage.fit(1), round_=2)
        yield

    stage.play(script())
    assert [m["round"] for m in stage.said("rdy")] == [2]
    assert stage.said("nack") == []
