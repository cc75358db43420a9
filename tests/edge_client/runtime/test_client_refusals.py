"""What a device does not do, and what it answers then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.config import ClientConfig
from edge_client.data.dataset import DataFolder
from edge_client.errors import DeviceRefused, Malformed
from edge_client.protocol import signing
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.secure.parameters import SECURE_MODES
from edge_client.protocol.sum_codec import SumStage, stage_fields
from edge_client.protocol.summed_task import SOFT
from edge_client.protocol.task import OWN_MODEL, Fit, Probe
from edge_client.runtime import client as client_module
from edge_client.runtime.active_task import check_secure, may_announce
from edge_client.runtime.state import StoredResult, TaskKey
from edge_client.training import fit_probe
from tests.support import softmax_program, sum_tasks
from tests.support.scripted_coordinator import DEVICE, FEDERATION, DeviceStage, Script, program
from tests.support.sum_tasks import STAGES


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return DeviceStage(tmp_path)


def refusal(stage: DeviceStage, task: Fit | Probe, **fields: Any) -> str:  # noqa: ANN401
    stage.play_turns(lambda: stage.ask(task, **fields), 60)
    assert stage.said("rdy") == []
    nack = stage.last("nack")
    assert (nack["run"], nack["round"], nack["exchange"]) == ("r1", 1, 0)
    return str(nack["code"])


def test_a_program_signed_by_a_stranger_is_refused_before_a_byte_of_it_is_fetched(stage: DeviceStage) -> None:
    forged = signing.sign_manifest(stage.manifest, bytes(32), FEDERATION)
    assert refusal(stage, stage.fit(), program=forged) == "bad_signature"
    assert stage.said("get") == []


def test_a_program_signed_for_another_federation_is_refused(stage: DeviceStage) -> None:
    forged = signing.sign_manifest(stage.manifest, bytes(range(32)), "other")
    assert refusal(stage, stage.fit(), program=forged) == "bad_signature"


def test_a_container_that_the_signed_program_does_not_list_is_never_fetched(stage: DeviceStage) -> None:
    swapped = stage.blob(b"something else", "container")
    assert refusal(stage, stage.fit(), container=swapped) == "bad_program"
    assert swapped.sha256 not in [m["sha256"] for m in stage.said("get")]


def test_the_container_of_another_function_is_refused(stage: DeviceStage) -> None:
    assert refusal(stage, stage.fit(), container=stage.containers["evaluate"]) == "bad_program"


def test_a_program_that_is_no_program_is_refused(stage: DeviceStage) -> None:
    garbage = signing.sign_manifest(stage.blob(b'{"v":1}', "program"), bytes(range(32)), FEDERATION)
    assert refusal(stage, stage.fit(), program=garbage) == "bad_program"


def test_another_schema_is_refused(stage: DeviceStage) -> None:
    assert refusal(stage, stage.fit(), schema="0" * 64) == "bad_schema"


def test_a_model_that_is_pickle_is_refused(stage: DeviceStage) -> None:
    pickled = stage.blob(b"\x80\x05." * 100, "model")
    assert refusal(stage, stage.fit(), start=pickled.to_json()) == "bad_schema"


def test_own_without_anything_kept_is_refused(stage: DeviceStage) -> None:
    assert refusal(stage, stage.fit(start=OWN_MODEL), base="zero") == "no_own_model"


def test_a_rate_at_which_training_diverges_is_reported(stage: DeviceStage) -> None:
    with np.errstate(all="ignore"):
        assert refusal(stage, stage.fit(lr=1e300, steps=20)) == "not_finite"


def test_an_update_above_the_allowed_size_is_not_announced(stage: DeviceStage) -> None:
    assert refusal(stage, stage.fit(), reply={"codec": "f32", "base": "start", "max_size": 100}) == "too_big"


def test_a_task_without_time_is_refused_without_training(stage: DeviceStage) -> None:
    assert refusal(stage, stage.fit(), left_ms=0) == "deadline"
    assert stage.opened == []


def test_a_program_without_this_engine_is_refused(stage: DeviceStage, tmp_path: Path) -> None:
    other = DeviceStage(
        tmp_path / "b", program=replace(program(), containers={"litert": stage.program.containers["onnx"]})
    )
    (tmp_path / "b").mkdir()
    assert refusal(other, other.fit()) == "no_engine"


def test_samples_that_are_corrected_serve_the_next_task_of_the_same_round(tmp_path: Path) -> None:
    """The coordinator repeats a round that failed; the file was corrected in between."""
    x, y = np.ones((8, softmax_program.FEATURES), np.float32), np.arange(8) % softmax_program.CLASSES
    np.savez(tmp_path / "train.npz", x=x[:, :, None], y=y)
    stage = DeviceStage(tmp_path, samples=DataFolder(tmp_path))

    def correct() -> None:
        np.savez(tmp_path / "train.npz", x=x, y=y)

    stage.play_turns(lambda: stage.ask(stage.fit(), exchange=0), correct, lambda: stage.ask(stage.fit(), exchange=1))
    nack = stage.last("nack")
    assert (nack["exchange"], nack["code"]) == (0, "no_data")
    assert nack["detail"] == "x has samples of shape [5, 1], the program reads [5]: save x with shape [n, 5]"
    assert [m["exchange"] for m in stage.said("rdy")] == [1]


def test_a_low_battery_is_unavailable_with_a_time_to_ask_again(
    stage: DeviceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def low(_config: ClientConfig) -> None:
        raise DeviceRefused("battery is at 3 %", retry_s=600)

    monkeypatch.setattr(client_module, "check_may_train", low)
    assert refusal(stage, stage.fit()) == "unavailable"
    assert stage.last("nack")["retry_ms"] == 600_000


def test_a_device_that_demands_secure_answers_nothing_for_itself_alone(tmp_path: Path) -> None:
    """Neither an update nor a figure of its own, whatever the coordinator signs; it does not even fetch the models."""
    stage = DeviceStage(tmp_path, secure="updates")
    probe = Probe(models=[stage.model(1)], want=frozenset({"confusion"}), split="test", batch=8, seed=0)
    for task in (stage.fit(), probe):
        assert refusal(stage, task) == "bad_task"
    assert stage.last("nack")["detail"] == "this run is without `secure`, which this device's client.toml demands"
    assert (stage.said("get"), stage.opened) == ([], [])


@pytest.mark.parametrize("name", STAGES)
def test_a_device_that_demands_hidden_membership_takes_part_in_sums_and_tells_no_choice(name: str) -> None:
    fields = changed(sum_tasks.job(name), share=1.0)
    check_secure(fields, "off")
    check_secure(fields, "updates")
    if name != "tell":
        check_secure(fields, "updates+membership")
        return
    with pytest.raises(Malformed, match=r"client\.toml demands secure = updates\+membership"):
        check_secure(fields, "updates+membership")


def changed(fields: dict[str, Any], **choice: Any) -> dict[str, Any]:  # noqa: ANN401
    """The job fields of a stage, with another choice of a center where it has one."""
    added = fields.get("work", {}).get("sum", {})
    if "choose" not in added:
        return fields
    return fields | {"work": fields["work"] | {"sum": added | choice}}


@pytest.mark.parametrize("least", SECURE_MODES)
@pytest.mark.parametrize("choose", sorted(SOFT))
def test_weights_in_several_centers_are_told_in_sums_alone(choose: str, least: str) -> None:
    """A coordinator hides them in both modes; one that asked was told each center of more than an equal part."""
    check_secure(changed(sum_tasks.job("add"), choose=choose), least)
    with pytest.raises(Malformed, match="weights in several centers are never told in the clear"):
        check_secure(changed(sum_tasks.job("tell"), choose=choose), least)


@pytest.mark.parametrize("choose", ["loss", "nearest"])
def test_a_device_that_hides_its_center_takes_no_weight_by_which_the_sum_would_name_it(choose: str) -> None:
    """A coordinator that gives device i the weight 2^-i reads from the sum of a center's weights who is in it."""
    fields = changed(sum_tasks.job("add"), choose=choose, share=0.25)
    check_secure(fields, "updates")
    with pytest.raises(Malformed, match=r"client\.toml demands secure = updates\+membership"):
        check_secure(fields, "updates+membership")
    check_secure(changed(fields, choose="posterior"), "updates+membership")  # its weights in the centers are not known
    check_secure(changed(fields, part="choose"), "updates+membership")  # counts without weights


def test_a_result_of_before_the_owner_demanded_secure_is_not_delivered(stage: DeviceStage) -> None:
    """It lay in the state folder, and the next process announced it with its loss."""
    stage.play_turns(lambda: stage.ask(stage.fit()))
    assert len(stage.said("rdy")) == 1
    stage.secure = "updates"
    stage.play_turns(stage.go, lambda: stage.ask(stage.fit()), 60)
    assert (len(stage.said("rdy")), stage.arrived) == (1, {})
    assert stage.last("nack")["code"] == "bad_task"
    assert list((stage.folder / "state" / "kept").iterdir()) != []  # its own model stays


@pytest.mark.parametrize(
    ("what", "told", "kept_by"),
    [("delta", False, ["off"]), ("masked", True, SECURE_MODES[:2]), ("masked", False, SECURE_MODES)],
)
def test_what_is_announced_again_follows_the_setting_of_this_start(what: str, told: bool, kept_by: list[str]) -> None:  # noqa: FBT001 - a row
    key, update = TaskKey(run="r1", round=1, exchange=0), manifest_of(b"1", what, inline=True)
    result = StoredResult(key=key, n=1, what=what, update=update, seconds=0.0, told=told)
    assert [secure for secure in SECURE_MODES if may_announce(result, secure)] == [*kept_by]


def test_our_own_bug_is_answered_internal_and_the_device_lives_on(
    stage: DeviceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_probe, "run_fit", lambda *_args, **_more: 1 / 0)
    assert refusal(stage, stage.fit()) == "internal"
    monkeypatch.undo()

    stage.play_turns(lambda: stage.ask(stage.fit()))
    assert len(stage.said("rdy")) == 1


@pytest.mark.parametrize("wrong", [MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("CUDA out of memory")])
def test_a_runtime_that_finds_no_memory_is_answered_no_space(stage: DeviceStage, wrong: Exception) -> None:
    def fail() -> None:
        raise wrong

    stage.before_step = fail
    assert refusal(stage, stage.fit()) == "no_space"


def test_a_task_whose_fields_contradict_is_answered_bad_task(stage: DeviceStage) -> None:
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
def test_garbage_on_its_topics_does_not_end_a_device(stage: DeviceStage, payload: bytes) -> None:
    def script() -> Script:
        yield
        for topic in (stage.topics.down(DEVICE), stage.topics.coord(), stage.topics.down_block(DEVICE, "0" * 16, 0)):
            stage.desk.publish(topic, payload)
        yield
        stage.tell("rebirth")
        yield

    stage.play(script())
    assert [m["s"] for m in stage.said("st")] == ["on", "on", "off"]


def test_a_task_under_way_is_not_replaced_by_one_that_tells_more_under_the_same_name(tmp_path: Path) -> None:
    stage = DeviceStage(tmp_path, secure="updates")
    stage.serve = False
    asked = {"program": stage.manifest, "container": stage.containers["step"], "schema": stage.schema.sha256}
    asked |= {"run": "r1", "round": 1, "exchange": 0, "left_ms": 600_000}
    asked["reply"] = {"codec": "f32", "base": "zero", "max_size": 1 << 20}
    keep = stage_fields(SumStage(stage="keep", work=stage.fit(upload=False)), stage.put, nothing)

    def serve_the_last() -> None:
        stage.ask(stage.fit())
        stage.serve = True

    stage.play_turns(lambda: stage.tell("task", **asked, **keep), serve_the_last, 60)
    assert [m["what"] for m in stage.said("rdy")] == ["masked"]


def nothing(_message: bytes) -> Manifest:
    raise AssertionError("this stage has no message")
