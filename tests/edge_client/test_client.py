"""The device's life, step by step, against a scripted coordinator in virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client import client as client_module
from edge_client import training
from edge_client.errors import DeviceRefused, ProtocolError
from edge_client.learner import OverEngine
from edge_client.protocol import compress, signing
from edge_client.protocol.blocks import Bitmap
from edge_client.protocol.task import OWN, Fit, Flat, Probe
from edge_client.transport.memory import MemoryTransport
from tests import softmax
from tests.edge_client.stage import BLOCK, DEVICE, FEDERATION, Engine, Script, Stage, program


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def trained_here(stage: Stage, task: Fit, own: Flat | None = None) -> Flat:
    """What the task gives when it is run by hand, float32."""
    learner = OverEngine(Engine(), stage.program)
    vector: Flat = training.fit(learner, task, stage.local.train, own=own).vector
    return vector.astype(np.float32)


# -- presence


def test_a_device_announces_itself_with_what_it_can_do_and_leaves_with_off(stage: Stage) -> None:
    stage.play(iter(()))
    first, last = stage.said("st")
    assert (first["s"], first["caps"]["engine"], first["caps"]["n"]) == ("on", "onnx", 30)
    assert (last["s"], last["bd"]) == ("off", first["bd"])


def test_every_connection_is_a_birth_and_the_will_carries_its_number(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.broker.cut(f"{FEDERATION}.{DEVICE}")
        yield

    stage.play(script())
    stage.play(iter(()))
    states = [(m["s"], m["bd"]) for m in stage.said("st")]
    assert states == [("on", 1), ("lost", 1), ("on", 2), ("off", 2), ("on", 3), ("off", 3)]


def test_rebirth_is_answered_with_presence(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.tell("rebirth")
        yield

    stage.play(script())
    assert [m["s"] for m in stage.said("st")] == ["on", "on", "off"]


# -- a task from beginning to end


def test_a_fit_is_fetched_trained_and_delivered_as_the_difference_to_its_start(stage: Stage) -> None:
    task = stage.fit()

    def script() -> Script:
        yield
        stage.ask(task)
        yield
        stage.go()
        yield
        stage.ack("ok")
        yield

    device = stage.play(script())
    start = stage.put(np.asarray(task.start), "model")
    delta = compress.decode(stage.uploaded(), stage.schema, kind="delta", codec="f32", base=start.sha256)
    assert np.array_equal(delta, trained_here(stage, task) - task.start)
    rdy = stage.last("rdy")
    assert (rdy["n"], rdy["what"], rdy["attempt"]) == (30, "delta", 0)
    assert rdy["metrics"]["loss"] > 0
    assert device.state.result is not None
    assert device.state.result.status == "ok"


def test_a_probe_is_answered_in_one_message(stage: Stage) -> None:
    models = [stage.model(k) for k in range(3)]

    def script() -> Script:
        yield
        stage.ask(Probe(models=models, want=frozenset({"loss", "confusion"}), batch=8, seed=1, split="test"))
        yield

    stage.play(script())
    rdy = stage.last("rdy")
    reply = compress.decode_stats(stage.uploaded(), stage.schema, rdy["n"], models=3)
    assert (rdy["what"], rdy["n"]) == ("stats", 10)
    losses, _ = OverEngine(Engine(), stage.program).evaluate(models, stage.local.test or stage.local.train, batch=8)
    assert reply.losses is not None
    assert np.array_equal(reply.losses, losses.mean(axis=1))
    assert reply.confusion is not None
    assert reply.confusion.sum() == 30


def test_a_gradient_is_taken_with_the_step_alone(stage: Stage) -> None:
    def script() -> Script:
        yield
        wanted = Probe(models=[stage.model(1)], want=frozenset({"grad"}), batch=8, seed=1)
        stage.ask(wanted, container=stage.containers["step"])
        yield
        stage.go()
        yield

    stage.play(script())
    reply = compress.decode_stats(stage.uploaded(), stage.schema, stage.last("rdy")["n"], models=1)
    assert stage.opened == ["step"]
    assert reply.grad is not None
    assert reply.grad.shape == (stage.schema.n_params,)


def test_own_models_are_kept_per_run_and_slot(stage: Stage) -> None:
    first = stage.fit(1, slot="a")
    later = stage.fit(start=OWN, init=stage.model(2), slot="a")

    def script() -> Script:
        yield
        for round_, run, task in ((1, "r1", first), (2, "r1", later), (1, "r2", later)):
            stage.ask(task, round_=round_, run=run, base="start" if task is first else "zero")
            yield
            stage.go()
            yield
            stage.ack("ok")
            results.append(stage.uploaded())
            yield

    results: list[bytes] = []
    stage.play(script())
    own = trained_here(stage, first)
    _, second, third = (compress.decode(data, stage.schema, kind="delta") for data in results)
    assert np.array_equal(second, trained_here(stage, later, own))  # goes on from the first
    assert np.array_equal(third, trained_here(stage, later))  # another run: from `init`


def test_programs_and_containers_are_fetched_once(stage: Stage) -> None:
    def script() -> Script:
        yield
        for round_ in (1, 2):
            stage.ask(stage.fit(round_), round_=round_)
            yield
            stage.go()
            yield
            stage.ack("ok")
            yield

    stage.play(script())
    fetched = [m["sha256"] for m in stage.said("get")]
    assert fetched.count(stage.manifest.sha256) == 1
    assert fetched.count(stage.containers["step"].sha256) == 1
    assert stage.opened == ["step"]


def test_upload_blocks_that_the_coordinator_has_are_not_sent_again(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        have = Bitmap(5)
        have.add(0)
        have.add(3)
        stage.go(have=have.to_base64())
        yield

    stage.play(script())
    assert sorted(stage.arrived) == [1, 2, 4]


# -- repeating


def test_a_task_that_is_done_is_announced_again_and_not_trained_again(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.ask(stage.fit())
        yield

    stage.play(script())
    first, second = stage.said("rdy")
    assert first["update"] == second["update"]
    assert first["seconds"] == second["seconds"]
    assert first["attempt"] == second["attempt"] == 0


def test_a_result_that_nobody_answers_is_announced_again_after_a_minute(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield 59
        assert len(stage.said("rdy")) == 1
        yield 20
        assert len(stage.said("rdy")) == 2

    stage.play(script())


def test_an_acknowledged_result_is_not_announced_again(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.ack("ok")
        yield 600

    stage.play(script())
    stage.play(iter(()))
    assert len(stage.said("rdy")) == 1


def test_a_device_that_lost_power_after_training_announces_its_result_when_it_is_back(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield

    stage.play(script())
    stage.opened.clear()
    stage.play(iter(()))
    first, second = stage.said("rdy")
    assert first["update"] == second["update"]
    assert stage.opened == []


def test_a_lost_link_costs_one_announcement_and_only_the_missing_blocks(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.broker.cut(f"{FEDERATION}.{DEVICE}")
        yield
        stage.go()
        yield

    stage.play(script())
    assert len(stage.said("rdy")) == 2
    stage.uploaded()


def test_a_new_boot_makes_the_device_announce_again_within_the_spread(stage: Stage) -> None:
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


def test_an_old_task_that_comes_late_is_ignored(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit(), round_=2)
        yield
        stage.ask(stage.fit(), round_=1)
        yield

    stage.play(script())
    assert [m["round"] for m in stage.said("rdy")] == [2]


def test_retry_and_busy_are_obeyed_after_the_time_they_name(stage: Stage) -> None:
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


def test_a_wrong_hash_is_sent_again_once(stage: Stage) -> None:
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


def test_a_forged_acknowledgement_of_another_update_changes_nothing(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.tell("ack", run="r1", round=1, exchange=0, attempt=0, sha256="0" * 64, status="ok")
        yield

    device = stage.play(script())
    assert device.state.result is not None
    assert device.state.result.status is None


def test_stop_drops_a_task_that_is_being_fetched(stage: Stage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.tell("stop", run="r1", round=1, exchange=0)
        yield 200

    stage.play(script())
    assert stage.said("rdy") == stage.said("nack") == []


def test_stop_drops_a_task_in_the_middle_of_its_training(stage: Stage) -> None:
    steps: list[float] = []

    def stop_at_the_third() -> None:
        steps.append(stage.clock.time_s)
        stage.clock.time_s += 1
        if len(steps) == 3:
            stage.tell("stop", run="r1", round=1, exchange=0)

    stage.before_step = stop_at_the_third

    def script() -> Script:
        yield
        stage.ask(stage.fit(steps=100))
        yield 200

    device = stage.play(script())
    assert len(steps) == 3
    assert stage.said("rdy") == stage.said("nack") == []
    assert device.state.result is None


def test_a_device_that_is_told_to_leave_does_not_finish_its_training(stage: Stage) -> None:
    steps: list[int] = []

    def leave_at_the_third() -> None:
        steps.append(1)
        if len(steps) == 3 and stage.playing is not None:
            stage.playing.stop()

    stage.before_step = leave_at_the_third

    def script() -> Script:
        yield
        stage.ask(stage.fit(steps=100))
        yield 200

    stage.play(script())
    assert len(steps) == 3
    assert stage.said("rdy") == stage.said("nack") == []


def test_training_that_outlasts_its_deadline_ends_with_a_nack(stage: Stage) -> None:
    def a_minute_passes() -> None:
        stage.clock.time_s += 60

    stage.before_step = a_minute_passes

    def script() -> Script:
        yield
        stage.ask(stage.fit(steps=100), left_ms=150_000)
        yield

    stage.play(script())
    assert [m["code"] for m in stage.said("nack")] == ["deadline"]


def test_stop_ends_the_announcing(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.tell("stop", run="r1", round=1, exchange=0)
        yield 600

    stage.play(script())
    assert len(stage.said("rdy")) == 1


def test_a_newer_task_replaces_the_one_being_fetched(stage: Stage) -> None:
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


# -- transfers


def test_lost_blocks_are_asked_for_again_and_three_timeouts_give_up(stage: Stage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield 8 + 16 + 31
        assert stage.said("nack") == []
        yield 1

    stage.play(script())
    assert len(stage.said("get")) == 3
    assert stage.last("nack")["code"] == "unreachable"


def test_damaged_blocks_are_dropped_and_fetched_again(stage: Stage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.send_blocks(stage.last("get"), damage=lambda message: message[:-1] + bytes([message[-1] ^ 1]))
        yield
        stage.serve = True
        yield 8

    stage.play(script())
    assert len(stage.said("rdy")) == 1


def test_a_blob_with_good_blocks_and_a_wrong_hash_is_refused_after_a_second_try(stage: Stage) -> None:
    def script() -> Script:
        yield
        other = stage.blob(b"x" * len(stage.blobs[stage.containers["step"].sha256]), "container")
        stage.blobs[stage.containers["step"].sha256] = stage.blobs[other.sha256]
        stage.ask(stage.fit())
        yield

    stage.play(script())
    assert stage.last("nack")["code"] == "bad_hash"
    assert stage.opened == []


def test_a_broken_link_asks_again_at_once(stage: Stage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.serve = True
        stage.broker.cut(f"{FEDERATION}.{DEVICE}")
        yield

    stage.play(script())
    assert stage.clock.time_s == 0
    assert len(stage.said("rdy")) == 1


def test_a_partial_download_survives_a_restart(stage: Stage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.serve = True
        stage.listen()
        get = next(m for m in reversed(stage.said("get")))
        stage.send_blocks(get)
        yield
        stage.serve = False
        yield

    stage.play(script())
    already = stage.served_blocks
    stage.serve = True

    def again() -> Script:
        yield
        stage.ask(stage.fit())
        yield

    stage.play(again())
    data = [stage.blobs[sha] for sha in (stage.manifest.sha256, stage.containers["step"].sha256)]
    model = stage.put(stage.model(0), "model")
    every_block = sum(-(-len(d) // BLOCK) for d in data) + model.total
    assert already > 0
    assert stage.served_blocks == every_block


# -- refusing


def refusal(stage: Stage, task: Fit | Probe, **fields: Any) -> str:  # noqa: ANN401
    def script() -> Script:
        yield
        stage.ask(task, **fields)
        yield 60

    stage.play(script())
    assert stage.said("rdy") == []
    nack = stage.last("nack")
    assert (nack["run"], nack["round"], nack["exchange"]) == ("r1", 1, 0)
    return str(nack["code"])


def test_a_program_signed_by_a_stranger_is_refused_before_a_byte_of_it_is_fetched(stage: Stage) -> None:
    forged = signing.signed(stage.manifest, bytes(32), FEDERATION)
    assert refusal(stage, stage.fit(), program=forged) == "bad_signature"
    assert stage.said("get") == []


def test_a_program_signed_for_another_federation_is_refused(stage: Stage) -> None:
    forged = signing.signed(stage.manifest, bytes(range(32)), "other")
    assert refusal(stage, stage.fit(), program=forged) == "bad_signature"


def test_a_container_that_the_signed_program_does_not_list_is_never_fetched(stage: Stage) -> None:
    swapped = stage.blob(b"something else", "container")
    assert refusal(stage, stage.fit(), container=swapped) == "bad_program"
    assert swapped.sha256 not in [m["sha256"] for m in stage.said("get")]


def test_the_container_of_another_function_is_refused(stage: Stage) -> None:
    assert refusal(stage, stage.fit(), container=stage.containers["evaluate"]) == "bad_program"


def test_a_program_that_is_no_program_is_refused(stage: Stage) -> None:
    garbage = signing.signed(stage.blob(b'{"v":1}', "program"), bytes(range(32)), FEDERATION)
    assert refusal(stage, stage.fit(), program=garbage) == "bad_program"


def test_another_schema_is_refused(stage: Stage) -> None:
    assert refusal(stage, stage.fit(), schema="0" * 64) == "bad_schema"


def test_a_model_that_is_pickle_is_refused(stage: Stage) -> None:
    pickled = stage.blob(b"\x80\x05." * 100, "model")
    assert refusal(stage, stage.fit(), start=pickled.to_json()) == "bad_schema"


def test_own_without_anything_kept_is_refused(stage: Stage) -> None:
    assert refusal(stage, stage.fit(start=OWN), base="zero") == "no_own_model"


def test_a_rate_at_which_training_diverges_is_reported(stage: Stage) -> None:
    with np.errstate(all="ignore"):
        assert refusal(stage, stage.fit(lr=1e300, steps=20)) == "not_finite"


def test_an_update_above_the_allowed_size_is_not_announced(stage: Stage) -> None:
    assert refusal(stage, stage.fit(), reply={"codec": "f32", "base": "start", "max_size": 100}) == "too_big"


def test_a_task_without_time_is_refused_without_training(stage: Stage) -> None:
    assert refusal(stage, stage.fit(), left_ms=0) == "deadline"
    assert stage.opened == []


def test_a_program_without_this_engine_is_refused(stage: Stage, tmp_path: Path) -> None:
    other = Stage(tmp_path / "b", program=replace(program(), containers={"litert": stage.program.containers["onnx"]}))
    (tmp_path / "b").mkdir()
    assert refusal(other, other.fit()) == "no_engine"


def test_a_low_battery_is_unavailable_with_a_time_to_ask_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def low(*, min_battery_percent: int) -> None:
        raise DeviceRefused("battery is at 3 %", retry_s=600)

    monkeypatch.setattr(client_module, "may_train", low)
    assert refusal(stage, stage.fit()) == "unavailable"
    assert stage.last("nack")["retry_ms"] == 600_000


def test_our_own_bug_is_answered_internal_and_the_device_lives_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "fit", lambda *_args, **_more: 1 / 0)
    assert refusal(stage, stage.fit()) == "internal"
    monkeypatch.undo()

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield

    stage.play(script())
    assert len(stage.said("rdy")) == 1


def test_a_task_whose_fields_contradict_is_answered_bad_task(stage: Stage) -> None:
    def script() -> Script:
        yield
        payload = (
            b'{"v":1,"k":"task","id":"x9","t":0,"epoch":1,"run":"r1","round":1,"exchange":0,"left_ms":1,"job":"fit"}'
        )
        stage.desk.publish(stage.topics.down(DEVICE), payload)
        yield

    stage.play(script())
    assert (stage.last("nack")["re"], stage.last("nack")["code"]) == ("x9", "bad_field")


@pytest.mark.parametrize("payload", [b"", b"\xff", b"[]", b"{", b"[" * 8_000, b'{"v":1,"k":"nonsense","id":7}'])
def test_garbage_on_its_topics_does_not_end_a_device(stage: Stage, payload: bytes) -> None:
    def script() -> Script:
        yield
        for topic in (stage.topics.down(DEVICE), stage.topics.coord(), stage.topics.down_block(DEVICE, "0" * 16, 0)):
            stage.desk.publish(topic, payload)
        yield
        stage.tell("rebirth")
        yield

    stage.play(script())
    assert [m["s"] for m in stage.said("st")] == ["on", "on", "off"]


# -- who leads


def test_a_coordinator_with_an_old_epoch_is_told_so_and_ignored_even_after_a_restart(stage: Stage) -> None:
    stage.epoch = 5

    def script() -> Script:
        stage.lead(1)
        yield

    stage.play(script())
    stage.epoch = 4

    def old() -> Script:
        yield
        stage.ask(stage.fit())
        yield

    stage.play(old())
    assert stage.last("nack")["code"] == "old_epoch"
    assert stage.said("rdy") == []


def test_a_device_that_is_not_enrolled_ends_with_an_error(stage: Stage) -> None:
    def script() -> Script:
        yield
        stage.tell("err", code="not_member")
        yield

    with pytest.raises(ProtocolError, match="not enrolled"):
        stage.play(script())


# -- compression with error feedback


def int8_round(stage: Stage, round_: int, status: str) -> Script:
    stage.arrived.clear()
    stage.ask(stage.fit(round_), round_=round_, codec="i8", center=0)
    yield
    stage.go()
    yield
    stage.ack(status)
    yield


def test_what_int8_loses_is_added_to_the_next_update_once_the_first_was_taken(tmp_path: Path) -> None:
    sent = {}
    for status in ("ok", "late"):
        stage = Stage(tmp_path / status)

        def script(stage: Stage = stage, status: str = status) -> Script:
            yield
            yield from int8_round(stage, 1, status)
            yield from int8_round(stage, 2, "ok")

        (tmp_path / status).mkdir()
        stage.play(script())
        sent[status] = compress.decode(stage.uploaded(), stage.schema, kind="delta")
    task = stage.fit(2)
    delta = trained_here(stage, task) - task.start
    name = "zero"  # only the quantised values matter here
    without, _ = compress.encode_feedback(delta, None, stage.schema, codec="i8", base=name)
    first = stage.fit(1)
    _, rest = compress.encode_feedback(
        trained_here(stage, first) - first.start, None, stage.schema, codec="i8", base=name
    )
    with_rest, _ = compress.encode_feedback(delta, rest, stage.schema, codec="i8", base=name)
    assert np.array_equal(sent["late"], compress.decode(without, stage.schema, kind="delta"))
    assert np.array_equal(sent["ok"], compress.decode(with_rest, stage.schema, kind="delta"))
    assert not np.array_equal(sent["late"], sent["ok"])


def test_the_labels_of_a_device_stay_on_it(stage: Stage) -> None:
    """Nothing that it sends holds a sample: not the bytes of any row of x, in float32 or float64."""
    sent: list[bytes] = []
    publish = stage.broker.publish

    def record(sender: MemoryTransport | None, topic: str, payload: bytes, *, retain: bool) -> None:
        if sender is not stage.desk:
            sent.append(payload)
        publish(sender, topic, payload, retain=retain)

    stage.broker.publish = record  # type: ignore[method-assign]

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.go()
        yield

    stage.play(script())
    everything = b"".join(sent)
    for row in stage.local.train.x:
        assert row.tobytes() not in everything
        assert row.astype(np.float32).tobytes() not in everything
    assert softmax.FEATURES > 1
