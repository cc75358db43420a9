"""Which center suits a device that never trained: the choice, the visit, and what goes wrong on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.nearest.answer import answer_near
from edge_client.data.dataset import Dataset
from edge_client.engines.center_file import run_file
from edge_client.errors import ConfigError, Malformed, NetworkError, ProgramRefused
from edge_client.nearest.over_mqtt import VISIT_TIMEOUT_S
from edge_client.nearest.result import score
from edge_client.protocol import messages, signing
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.nearest import catalog as offered
from edge_client.protocol.program import IGNORED
from edge_client.protocol.task import Array, Flat, Tensors
from tests.support import softmax_program
from tests.support.frozen_stage import fetches_of_the_base, frozen_stage
from tests.support.scripted_coordinator import (
    CONTAINERS,
    DEVICE,
    FEDERATION,
    BallastEngine,
    DeviceStage,
    Script,
    program,
)
from tests.support.softmax_program import FEATURES


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return DeviceStage(tmp_path, program=program(ballast=0))


def good_model(stage: DeviceStage, seed: int = 0) -> Flat:
    """A center for this device's data: after thirty steps on it."""
    return stage.trained(stage.fit(seed, steps=30))


def onnx_file(stage: DeviceStage, model: Flat) -> bytes:
    """A center's self-contained file: x -> x W^T + b."""
    from onnx import TensorProto, helper, numpy_helper

    parts = stage.schema.split(model.astype(np.float32))
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["logits"], transB=1)],
        "center",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", softmax_program.FEATURES])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", softmax_program.CLASSES])],
        [
            numpy_helper.from_array(np.ascontiguousarray(parts["head.weight"]), "w"),
            numpy_helper.from_array(np.ascontiguousarray(parts["head.bias"]), "b"),
        ],
    )
    model_proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model_proto.SerializeToString())


def catalog_of(stage: DeviceStage, models: list[Flat], *, abstain: float = 1.4) -> offered.Catalog:
    centers = [
        offered.CatalogCenter(
            model=stage.put(model, "model"),
            devices=1,
            files={"onnx": stage.blob(onnx_file(stage, model), "container")},
        )
        for model in models
    ]
    container = stage.containers["evaluate"]
    return offered.Catalog(
        version=1, program=stage.manifest, containers={"onnx": container}, centers=tuple(centers), abstain=abstain
    )


def publish(stage: DeviceStage, catalog: offered.Catalog) -> None:
    manifest = stage.blob(catalog.to_bytes(), "catalog")
    message = messages.write_message("cat", ident="k", t_ms=0, epoch=1, ver=1, catalog=manifest)
    stage.desk.publish(stage.topics.catalog(), message, retain=True)


def answering(stage: DeviceStage, catalog: offered.Catalog) -> Script:
    publish(stage, catalog)
    yield
    near = stage.last("near")
    stage.tell("near", re=near["id"], **answer_near(catalog, near, stage.schema))
    yield


def test_a_device_takes_home_the_center_of_least_loss_and_tells_how_it_does(stage: DeviceStage) -> None:
    models = [stage.model(1), good_model(stage), stage.model(2)]
    catalog = catalog_of(stage, models)
    answer = stage.visit(answering(stage, catalog))
    assert answer.center == 1
    assert answer.losses[1] == min(answer.losses.values())
    assert (answer.n, answer.samples) == (10, 30)
    assert answer.file is not None
    assert Path(answer.file).name == "center-1.onnx"
    assert Path(answer.file).read_bytes() == onnx_file(stage, models[1])
    served = stage.last("served")
    assert (served["center"], served["n"]) == (1, 10)
    assert served["metrics"]["accuracy"] == answer.accuracy == 1.0
    assert {m["s"] for m in stage.said("st")} == {"on", "off"}
    assert all(m["caps"]["n"] == 0 for m in stage.said("st") if m["s"] == "on")  # so it gets no tasks


def test_predicted_classes_have_the_names_of_the_device_or_else_of_the_catalog(stage: DeviceStage) -> None:
    catalog = replace(catalog_of(stage, [good_model(stage)]), class_names=("sitting", "walking"))
    assert stage.visit(answering(stage, catalog)).class_names == ("sitting", "walking")
    stage.local = replace(stage.local, class_names=("sit", "walk"))
    assert stage.visit(answering(stage, catalog)).class_names == ("sit", "walk")


def test_frozen_tensors_are_fetched_with_the_file_that_evaluates(tmp_path: Path) -> None:
    stage = frozen_stage(tmp_path)
    stage.visit(answering(stage, catalog_of(stage, [stage.model(1), good_model(stage)])))
    assert stage.opened == ["evaluate", "frozen"]
    assert fetches_of_the_base(stage) == 1


def test_only_the_losses_leave_the_device(stage: DeviceStage) -> None:
    catalog = catalog_of(stage, [good_model(stage)])
    stage.visit(answering(stage, catalog))
    assert {m["k"] for m in stage.heard} == {"st", "get", "near", "served"}
    stats = Manifest.from_json(stage.last("near")["stats"])
    assert stats.inline is not None
    assert len(stats.inline) < 500


def test_a_device_that_no_center_fits_is_told_so(stage: DeviceStage) -> None:
    catalog = catalog_of(stage, [stage.model(1), stage.model(2)], abstain=0.1)
    answer = stage.visit(answering(stage, catalog))
    assert answer.center is None
    assert answer.file is None
    assert (answer.n, answer.samples) == (0, 30)
    assert set(answer.losses) == {0, 1}
    assert stage.said("served") == []


def test_a_lost_question_is_asked_again(stage: DeviceStage) -> None:
    catalog = catalog_of(stage, [good_model(stage)])

    def script() -> Script:
        publish(stage, catalog)
        yield 7
        assert len(stage.said("near")) == 1
        yield 1
        assert len(stage.said("near")) == 2
        near = stage.last("near")
        stage.tell("near", re=near["id"], **answer_near(catalog, near, stage.schema))
        yield

    assert stage.visit(script()).center == 0


def test_an_answer_to_an_earlier_question_is_not_taken(stage: DeviceStage, caplog: pytest.LogCaptureFixture) -> None:
    catalog = catalog_of(stage, [good_model(stage)])

    def script() -> Script:
        publish(stage, catalog)
        stage.tell("near", re="of-before", center=None)
        yield
        stage.tell("near", re=stage.last("near")["id"], center=0)
        yield

    assert stage.visit(script()).center == 0
    assert "prefers center" not in caplog.text


def test_of_centers_that_all_give_no_number_none_fits_and_nothing_is_asked(
    stage: DeviceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = softmax_program.SoftmaxEngine.evaluate

    def no_number(self: softmax_program.SoftmaxEngine, feeds: Tensors) -> Tensors:
        found = evaluate(self, feeds)
        return found | {"loss": np.full_like(found["loss"], np.nan)}

    monkeypatch.setattr(softmax_program.SoftmaxEngine, "evaluate", no_number)
    catalog = catalog_of(stage, [stage.model(1), stage.model(2)])
    assert stage.visit(answering(stage, catalog)).center is None
    assert stage.said("near") == []


def test_a_coordinator_that_is_silent_is_waited_for_as_long_as_is_told(stage: DeviceStage) -> None:
    """Also where the broker has the catalog: its blobs come from the coordinator."""
    stage.serve = False
    told: list[tuple[float, str]] = []

    def tell(text: str) -> None:
        told.append((stage.clock.now_s(), text))

    def catalog_only(*, online: bool) -> Script:
        publish(stage, catalog_of(stage, [stage.model(1)]))
        stage.lead(1, online=online)
        yield

    nothing_came, no_answer = "did not send its catalog of centers", f"^the coordinator of {FEDERATION} does not answer"
    for script, away, wrong in (
        (iter(()), "", nothing_came),
        (catalog_only(online=True), "", no_answer),
        (catalog_only(online=False), ", which is away", no_answer),
    ):
        began_s = stage.clock.now_s()
        with pytest.raises(NetworkError, match=wrong):
            stage.visit(script, tell=tell)
        assert told == [(began_s + 5, f"waiting for the coordinator of {FEDERATION}{away}, at most 115 s more")]
        assert stage.clock.now_s() == began_s + 120
        told.clear()


def test_a_coordinator_that_comes_back_late_is_asked_again_at_once(stage: DeviceStage) -> None:
    catalog = catalog_of(stage, [good_model(stage)])
    stage.serve = False

    def script() -> Script:
        publish(stage, catalog)
        stage.lead(1, online=False)
        yield 100
        stage.serve = True
        stage.lead(2)
        yield
        near = stage.last("near")
        stage.tell("near", re=near["id"], **answer_near(catalog, near, stage.schema))
        yield

    began_s = stage.clock.now_s()
    assert stage.visit(script()).center == 0
    assert stage.clock.now_s() == began_s + 100


def test_a_device_that_computes_for_long_still_gets_its_file(
    stage: DeviceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = softmax_program.SoftmaxEngine.evaluate

    def slowly(self: softmax_program.SoftmaxEngine, feeds: Tensors) -> Tensors:
        stage.clock.time_s += 200
        return evaluate(self, feeds)

    monkeypatch.setattr(softmax_program.SoftmaxEngine, "evaluate", slowly)
    assert stage.visit(answering(stage, catalog_of(stage, [good_model(stage)]))).center == 0


def test_a_transfer_that_goes_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = DeviceStage(tmp_path, program=program(ballast=65_536))
    send = stage.send_blocks

    def slowly(get: dict[str, Any]) -> None:
        stage.clock.time_s += 7
        send(get)

    monkeypatch.setattr(stage, "send_blocks", slowly)
    assert stage.visit(answering(stage, catalog_of(stage, [stage.model(1), good_model(stage)]))).center == 1
    assert stage.clock.now_s() > VISIT_TIMEOUT_S


def test_an_answer_in_time_is_not_announced_as_waiting(stage: DeviceStage) -> None:
    told: list[str] = []
    stage.visit(answering(stage, catalog_of(stage, [good_model(stage)])), tell=told.append)
    assert told == []


def test_a_catalog_that_does_not_come_is_told_with_a_hint(stage: DeviceStage) -> None:
    with pytest.raises(NetworkError, match="did not send its catalog of centers") as wrong:
        stage.visit(iter(()))
    assert "when training is done" in wrong.value.hint


@pytest.mark.parametrize(("split", "labels"), [("train", True), ("train", False), ("test", True)])
def test_samples_of_another_shape_are_a_matter_of_the_data(
    stage: DeviceStage,
    split: str,
    labels: bool,  # noqa: FBT001 - a parameter of the case
) -> None:
    wrong = Dataset(np.ones((4, FEATURES, 1)), np.zeros(4, np.int64))
    local = stage.local
    stage.local = replace(local, train=wrong) if split == "train" else replace(local, test=wrong)
    catalog = catalog_of(stage, [stage.model(1)])
    with pytest.raises(ConfigError, match=r"^x has samples of shape \[5, 1\], the program reads \[5\]: save x") as told:
        stage.visit(answering(stage, catalog), labels=labels)
    assert f"{split}.npz" in told.value.hint


def test_an_unsigned_program_in_a_catalog_is_refused(stage: DeviceStage) -> None:
    catalog = catalog_of(stage, [stage.model(1)])
    forged = signing.sign_manifest(stage.manifest, bytes(32), FEDERATION)
    other = offered.Catalog(**{**vars(catalog), "program": forged})
    with pytest.raises(Malformed, match="bad_signature"):
        stage.visit(answering(stage, other))
    assert stage.opened == []


def test_a_container_that_the_program_does_not_list_is_refused(stage: DeviceStage) -> None:
    catalog = catalog_of(stage, [stage.model(1)])
    swapped = stage.blob(CONTAINERS["evaluate"][::-1], "container")
    other = offered.Catalog(**{**vars(catalog), "containers": {"onnx": swapped}})
    with pytest.raises(Malformed, match="bad_program"):
        stage.visit(answering(stage, other))


def test_a_format_that_is_not_on_offer_is_named(stage: DeviceStage) -> None:
    catalog = catalog_of(stage, [good_model(stage)])
    with pytest.raises(Malformed, match="no tflite file"):
        stage.visit(answering(stage, catalog), file_format="tflite")


def test_a_coordinator_that_does_not_know_the_device_hears_it_again(stage: DeviceStage) -> None:
    catalog = catalog_of(stage, [good_model(stage)])
    stage.serve = False

    def script() -> Script:
        publish(stage, catalog)
        yield
        stage.tell("rebirth")
        stage.serve = True
        yield
        near = stage.last("near")
        stage.tell("near", re=near["id"], **answer_near(catalog, near, stage.schema))
        yield

    assert stage.visit(script()).center == 0
    assert stage.clock.time_s == 0
    assert [m["s"] for m in stage.said("st") if m["s"] == "on"] == ["on", "on"]
    assert {m["bd"] for m in stage.said("st")} == {1}
    assert stage.topics.state(DEVICE) in stage.broker.retained


def test_accuracy_and_loss_are_those_of_the_logits() -> None:
    logits: Array = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]))
    data = Dataset(np.zeros((2, 1)), np.array([0, 1]))
    accuracy, loss = score(logits + 5.0, data)
    assert accuracy == 0.5
    assert loss == pytest.approx(-(np.log(0.7) + np.log(0.3)) / 2)


def test_numbers_instead_of_classes_have_no_accuracy() -> None:
    data = Dataset(np.zeros((2, 1)), np.array([[1.0], [3.0]]))
    assert score(np.array([[0.0], [3.0]]), data) == (None, 0.5)


@pytest.mark.parametrize(
    ("file_format", "words"), [("onnx", "this is no ONNX file"), ("tflite", "the tflite file does not run")]
)
def test_a_file_that_is_no_model_is_refused_in_words(file_format: str, words: str) -> None:
    with pytest.raises(ProgramRefused, match=words):
        run_file(file_format, b"no model", np.zeros((1, 5), np.float32))


def test_personal_steps_that_diverge_are_told_beside_the_answer(
    stage: DeviceStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The visit ended with an error after the center's file had come."""
    step, catalog = BallastEngine.step, catalog_of(stage, [stage.model(1), good_model(stage)])

    def diverges(self: BallastEngine, feeds: Tensors) -> Tensors:
        return step(self, feeds) | {"loss": np.array(np.nan)}

    monkeypatch.setattr(BallastEngine, "step", diverges)
    answer = stage.visit(answering(stage, catalog), steps=3)
    assert (answer.center, answer.accuracy, answer.personal) == (1, 1.0, None)
    assert "no personal model: not_finite: training diverged" in caplog.text
    assert not list(stage.config().state.glob("personal-*"))


def test_a_centers_file_that_gives_nan_is_refused_as_a_bad_file(stage: DeviceStage) -> None:
    """Its loss could not be sent, so the visit ended with a message about the protocol."""
    fine = good_model(stage)
    catalog = catalog_of(stage, [stage.model(1), fine])
    bad = {"onnx": stage.blob(onnx_file(stage, np.full_like(fine, np.nan)), "container")}
    other = replace(catalog, centers=(catalog.centers[0], replace(catalog.centers[1], files=bad)))
    with pytest.raises(ProgramRefused, match=r"^the onnx file of center 1 gives NaN"):
        stage.visit(answering(stage, other))


def test_soft_labels_have_the_cross_entropy_as_their_loss() -> None:
    """It was the squared error of the logits."""
    y = np.array([[0.9, 0.1], [0.25, 0.75]])
    logits: Array = np.log(np.array([[0.8, 0.2], [0.5, 0.5]])) + 3.0
    known = -(y * np.log([[0.8, 0.2], [0.5, 0.5]])).sum() / 2
    accuracy, loss = score(logits, Dataset(np.zeros((2, 1)), y), soft=True)
    assert accuracy is None
    assert loss == pytest.approx(known)


def test_labels_of_which_none_counts_have_no_score() -> None:
    assert score(np.zeros((2, 3, 4)), Dataset(np.zeros((2, 1)), np.full((2, 3), IGNORED))) == (None, None)
