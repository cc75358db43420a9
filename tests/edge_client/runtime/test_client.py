"""The device's life, step by step, against a scripted coordinator in virtual time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_client.errors import ProtocolError
from edge_client.protocol import codecs
from edge_client.protocol.blocks import Bitmap
from edge_client.protocol.task import OWN_MODEL, Probe
from edge_client.training.learner import EngineLearner
from tests.support.scripted_coordinator import DEVICE, FEDERATION, BallastEngine, DeviceStage, Script


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return DeviceStage(tmp_path)


# -- presence


def test_a_device_announces_itself_with_what_it_can_do_and_leaves_with_off(stage: DeviceStage) -> None:
    stage.play(iter(()))
    first, last = stage.said("st")
    assert (first["s"], first["caps"]["engine"], first["caps"]["n"]) == ("on", "onnx", 30)
    assert (last["s"], last["bd"]) == ("off", first["bd"])


def test_every_connection_is_a_birth_and_the_will_carries_its_number(stage: DeviceStage) -> None:
    stage.play_turns(lambda: stage.broker.drop_connection(f"{FEDERATION}.{DEVICE}"))
    stage.play(iter(()))
    states = [(m["s"], m["bd"]) for m in stage.said("st")]
    assert states == [("on", 1), ("lost", 1), ("on", 2), ("off", 2), ("on", 3), ("off", 3)]


def test_rebirth_is_answered_with_presence(stage: DeviceStage) -> None:
    stage.play_turns(lambda: stage.tell("rebirth"))
    assert [m["s"] for m in stage.said("st")] == ["on", "on", "off"]


# -- a task from beginning to end


def test_a_fit_is_fetched_trained_and_delivered_as_the_difference_to_its_start(stage: DeviceStage) -> None:
    task = stage.fit()

    device = stage.play_turns(lambda: stage.ask(task), stage.go, lambda: stage.ack("ok"))
    start = stage.put(np.asarray(task.start), "model")
    delta = codecs.decode_vector(stage.uploaded(), stage.schema, kind="delta", codec="f32", base=start.sha256)
    assert np.array_equal(delta, stage.trained(task) - task.start)
    rdy = stage.last("rdy")
    assert (rdy["n"], rdy["what"], rdy["attempt"]) == (30, "delta", 0)
    assert rdy["metrics"]["loss"] > 0
    assert device.state.result is not None
    assert device.state.result.status == "ok"


def test_a_probe_is_answered_in_one_message(stage: DeviceStage) -> None:
    models = [stage.model(k) for k in range(3)]

    stage.play_turns(
        lambda: stage.ask(Probe(models=models, want=frozenset({"loss", "confusion"}), batch=8, seed=1, split="test"))
    )
    rdy = stage.last("rdy")
    reply = codecs.decode_stats(stage.uploaded(), stage.schema, rdy["n"], models=3)
    assert (rdy["what"], rdy["n"]) == ("stats", 10)
    losses, _ = EngineLearner(BallastEngine(), stage.program).evaluate(
        models, stage.local.test or stage.local.train, batch=8
    )
    assert reply.losses is not None
    assert np.array_equal(reply.losses, losses.mean(axis=1))
    assert reply.confusion is not None
    assert reply.confusion.sum() == 30


def test_a_gradient_is_taken_with_the_step_alone(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        wanted = Probe(models=[stage.model(1)], want=frozenset({"grad"}), batch=8, seed=1)
        stage.ask(wanted, container=stage.containers["step"])
        yield
        stage.go()
        yield

    stage.play(script())
    reply = codecs.decode_stats(stage.uploaded(), stage.schema, stage.last("rdy")["n"], models=1)
    assert stage.opened == ["step"]
    assert reply.grad is not None
    assert reply.grad.shape == (stage.schema.n_params,)


def test_own_models_are_kept_per_run_and_slot(stage: DeviceStage) -> None:
    first = stage.fit(1, slot="a")
    later = stage.fit(start=OWN_MODEL, init=stage.model(2), slot="a")

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
    own = stage.trained(first)
    _, second, third = (codecs.decode_vector(data, stage.schema, kind="delta") for data in results)
    assert np.array_equal(second, stage.trained(later, own))  # goes on from the first
    assert np.array_equal(third, stage.trained(later))  # another run: from `init`


def test_programs_and_containers_are_fetched_once(stage: DeviceStage) -> None:
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


def test_upload_blocks_that_the_coordinator_has_are_not_sent_again(stage: DeviceStage) -> None:
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


# -- who leads


def test_a_coordinator_with_an_old_epoch_is_told_so_and_ignored_even_after_a_restart(stage: DeviceStage) -> None:
    stage.epoch = 5

    def script() -> Script:
        stage.lead(1)
        yield

    stage.play(script())
    stage.epoch = 4
    stage.play_turns(lambda: stage.ask(stage.fit()))
    assert stage.last("nack")["code"] == "old_epoch"
    assert stage.said("rdy") == []


def test_a_device_that_is_not_enrolled_ends_with_an_error(stage: DeviceStage) -> None:
    with pytest.raises(ProtocolError, match="not enrolled"):
        stage.play_turns(lambda: stage.tell("err", code="not_member"))


# -- compression with error feedback


def int8_round(stage: DeviceStage, round_: int, status: str) -> Script:
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
        stage = DeviceStage(tmp_path / status)

        def script(stage: DeviceStage = stage, status: str = status) -> Script:
            yield
            yield from int8_round(stage, 1, status)
            yield from int8_round(stage, 2, "ok")

        (tmp_path / status).mkdir()
        stage.play(script())
        sent[status] = codecs.decode_vector(stage.uploaded(), stage.schema, kind="delta")
    task = stage.fit(2)
    delta = stage.trained(task) - task.start
    name = "zero"  # only the quantised values matter here
    without, _ = codecs.encode_with_feedback(delta, None, stage.schema, codec="i8", base=name)
    first = stage.fit(1)
    _, rest = codecs.encode_with_feedback(stage.trained(first) - first.start, None, stage.schema, codec="i8", base=name)
    with_rest, _ = codecs.encode_with_feedback(delta, rest, stage.schema, codec="i8", base=name)
    assert np.array_equal(sent["late"], codecs.decode_vector(without, stage.schema, kind="delta"))
    assert np.array_equal(sent["ok"], codecs.decode_vector(with_rest, stage.schema, kind="delta"))
    assert not np.array_equal(sent["late"], sent["ok"])
