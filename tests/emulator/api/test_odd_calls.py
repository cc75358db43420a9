"""Slips of those who write Python: each is told by what is wrong, and does nothing else. Odd calls that work, too."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedcenters as fc
from edge_client.errors import ConfigError, UsageError
from emulator.reports.console_tables import summary_rows

RNG = np.random.default_rng(0)
FLEET = fc.fleet((RNG.normal(size=(60, 3)), np.arange(60) % 3), by=np.repeat([1, 2, 3], 20))


def run(**options: Any) -> fc.Result:  # noqa: ANN401 - those of `simulate`
    return fc.simulate(fc.FedAvg(local_steps=1), fleet=FLEET, progress=False, **{"rounds": 1, **options})


def test_a_fleet_of_ones_own_samples_goes_to_another_process() -> None:
    """It ended in "Can't pickle local object", where a pool of processes runs one seed each."""
    again = pickle.loads(pickle.dumps(FLEET))  # noqa: S301 - our own
    assert again.name(2) == "device-2"
    np.testing.assert_array_equal(again["device-2"].train.x, FLEET["device-2"].train.x)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda r: r.history["accuracy"] > 0.9, "Series"),
        (lambda _: torch.tensor([True, False]), "Tensor"),
        (lambda _: pd.NA, "NAType"),
    ],
    ids=["column", "tensor", "NA"],
)
def test_what_a_callback_returns_is_one_truth_value(made: Callable[[fc.Result], Any], kind: str) -> None:
    """A column of the history, as in `r.history["accuracy"] > 0.9`, ended in an error of pandas."""
    with pytest.raises(UsageError, match=f"on_round returned {kind}") as told:
        run(rounds=2, on_round=made)
    assert "r.accuracy > 0.9" in told.value.hint


@pytest.mark.parametrize("name", ["..", "a/../../b", "/tmp/elsewhere"])  # noqa: S108 - it is refused
def test_the_name_of_a_run_does_not_leave_its_folder(tmp_path: Path, name: str) -> None:
    """`..` asked to delete the folder above."""
    with pytest.raises(UsageError, match="name is"):
        run(out=tmp_path / "runs", name=name)
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_other_files_is_not_asked_to_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save(".")` made a folder of another name in it."""
    (tmp_path / "notes").write_text("mine")
    monkeypatch.chdir(tmp_path)
    for place in (".", tmp_path):
        with pytest.raises(UsageError, match="that can be read") as told:
            run().save(place)
        assert "delete" not in told.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize("name", ["pictures.npz", "newcomers/guide.json"])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str) -> None:
    """The error named no folder: "bad_json: not strict JSON", or a ValueError."""
    file = run().save(tmp_path / "mine") / name
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ConfigError, match=f"mine/{name} cannot be read") as told:
        fc.load(tmp_path / "mine")
    assert "save the run again" in told.value.hint


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy, nn.NLLLoss()])
@pytest.mark.parametrize("model", [None, nn.Linear(3, 2)])
def test_a_loss_of_classes_refuses_classes_that_became_floats(loss: Any, model: nn.Module | None) -> None:  # noqa: ANN401
    """The cross-entropy of the one output that a float target has is always 0: the run trained nothing, in silence."""
    fleet = fc.fleet((RNG.normal(size=(60, 3)), np.arange(60) % 2 * 1.0), by=np.repeat([1, 2], 30))
    with pytest.raises(UsageError, match="the loss is one of classes") as told:
        fc.simulate(fc.FedAvg(), fleet=fleet, model=model, loss=loss, rounds=1, progress=False)
    assert "y.astype(int)" in told.value.hint


@pytest.mark.parametrize("device", [["device-1"], pd.Series([1, 2]), np.array([1, 2])], ids=["list", "Series", "array"])
def test_several_devices_for_one_prediction_are_named_by_their_kind(device: object) -> None:
    """The error printed the whole column as the name of a device that does not exist."""
    with pytest.raises(UsageError, match=f"device is a {type(device).__name__}") as told:
        run().predict(np.zeros((2, 3)), device=device)
    assert "give one device" in told.value.hint


def test_answers_that_did_not_count_for_their_size_are_shown_with_the_usual_cause() -> None:
    """A learning rate of 10 ended at the accuracy of guessing, and the one sign of it was "7 answers (rejected)"."""
    run = {**fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3), rounds=1).summary()}
    told = {
        why: dict(summary_rows({**run, "refused": {why: 2}}))["did not count in the last round"]
        for why in ("rejected", "not_finite", "late")
    }
    cause = "; a learning rate that is too large does this, columns or targets that are not scaled, or a hostile device"
    assert told["late"] == "2 answers (late)"
    assert (told["rejected"], told["not_finite"]) == (f"2 answers (rejected){cause}", f"2 answers (not_finite){cause}")


def test_devices_that_no_round_has_drawn_are_counted_in_the_summary() -> None:
    """They are served as new devices, and drew the accuracy of a small cohort's run down without a word."""
    fleet = fc.fleet((RNG.normal(size=(60, 3)), np.arange(60) % 2), by=np.repeat(np.arange(6), 10))
    half = fc.simulate(fc.FeSEM(2, fraction_train=0.5, local_steps=2), fleet=fleet, rounds=1, progress=False)
    bare = sorted({*half.split.devices} - {*half.assignments.index})
    assert (half.summary()["devices_without_center"], len(bare)) == (3, 3)
    assert dict(summary_rows(half.summary()))["without a center"] == "3 of the devices; served as new ones"
    most = int(half.assignments.value_counts().idxmax())
    x = half.split.devices[bare[0]].train.x
    np.testing.assert_array_equal(half.predict(x, device=bare[0]), half.predict(x, center=most))
    whole = fc.simulate(fc.FeSEM(2, local_steps=2), fleet=fleet, rounds=1, progress=False)
    assert "devices_without_center" not in whole.summary()


def test_of_very_many_devices_those_that_were_not_tested_are_not_told_as_without_a_center() -> None:
    """A record has the centers of at most 10,000 devices, else of those that its round tested: here of one in 1,000."""
    owner = np.repeat(np.arange(10_001), 2)
    fleet = fc.fleet((RNG.normal(size=(len(owner), 2)), np.arange(len(owner)) % 2), by=owner)
    method = fc.FedAvg(fraction_train=0.001, local_steps=1)
    stopped = fc.simulate(
        method, fleet=fleet, rounds=2, fraction_evaluate=0.001, on_round=lambda _: True, progress=False
    )
    assert len(stopped.run.records[-1]["assignment"]) < len(stopped.assignments) == 10_001
    assert "devices_without_center" not in stopped.summary()


def test_a_run_on_sums_that_is_stopped_between_tests_is_summed_up_by_its_last_test() -> None:
    """Such a test tells no device's accuracy, and the summary had none of the fleet either."""
    method = fc.FedAvg(local_steps=1, server=fc.ServerOptions(secure="updates"))
    stopped = fc.simulate(
        method,
        fleet=fc.fleets.digits(devices=6),
        rounds=4,
        evaluate_every=2,
        on_round=lambda so_far: len(so_far.history) == 3,
        progress=False,
    )
    assert stopped.accuracy is not None
    assert stopped.summary()["accuracy"]["micro"] == stopped.accuracy


def test_tasks_without_an_answer_are_told_in_the_summary(tmp_path: Path) -> None:
    """Where no device answered, the summary had a method, a number of centers and a time, and no word of it."""
    kinds, link = tmp_path / "kinds.toml", "step-ms = 1\nevaluate-ms = 1\ndown-mbit = 1\nup-mbit = 1\nlatency-ms = 1"
    kinds.write_text(f"[[profiles]]\nname = 'gone'\n{link}\ndropout = 1.0\n")
    fleet = fc.fleets.digits(devices=3)
    gone = fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, rounds=1, profiles=kinds, progress=False)
    assert dict(summary_rows(gone.summary()))["answered in the last round"] == "0.0% of the tasks"
    whole = run().summary()
    assert "answered in the last round" not in dict(summary_rows(whole))
    assert dict(summary_rows(whole | {"answered": 0.9999}))["answered in the last round"] == "99.9% of the tasks"


def test_a_private_run_shows_what_its_centers_cost() -> None:
    """The epsilon stood in metrics.jsonl alone."""
    summary = run().summary()
    spent = {"epsilon": 9.9973, "delta": 1e-05, "releases": 4, "noise": 1.0, "clip": 0.5, "given_assignments": False}
    shown = dict(summary_rows({**summary, "privacy": spent}))
    assert shown["privacy"] == "epsilon 9.9973 for delta 1e-05, 4 releases"
    given = dict(summary_rows({**summary, "privacy": {**spent, "releases": 1, "given_assignments": True}}))
    assert given["privacy"] == "epsilon 9.9973 for delta 1e-05, 1 release; given the center of each device"
    assert "privacy" not in dict(summary_rows(summary))


def test_the_warning_of_a_doubtful_center_points_at_the_users_line() -> None:
    """It showed a line of ours."""
    x = RNG.normal(size=(200, 3))
    fleet = fc.fleet((x, np.arange(200) % 2), by=np.repeat(np.arange(10), 20))
    result = fc.simulate(fc.FeSEM(2, local_steps=2), fleet=fleet, rounds=1, progress=False)
    with pytest.warns(UserWarning, match="tell the centers apart badly") as told:
        result.predict(x[:40])
    assert told[0].filename == __file__


def test_a_fleet_is_equal_to_itself_alone() -> None:
    """`==` of two fleets compared their samples, and ended in numpy's error of a truth value."""
    other = fc.fleet((RNG.normal(size=(60, 3)), np.arange(60) % 3), by=np.repeat([1, 2, 3], 20))
    assert other != FLEET
    assert [other, FLEET].index(FLEET) == 1
    assert {FLEET: 1, other: 2}[other] == 2


def test_a_program_and_its_state_are_equal_to_themselves_alone() -> None:
    """As with fleets: `==` ended in numpy's error of a truth value."""
    program = fc.compile(nn.Linear(3, 2), (3,), progress=False)
    assert program != fc.TrainingProgram(manifest=program.manifest, files=program.files, weights={**program.weights})
    assert program.start() != program.start()
    assert len({program, program.start()}) == 2


@pytest.mark.parametrize("left", [np.int64(2), np.array([2]), 2], ids=["int64", "array", "int"])
def test_a_device_is_left_out_by_the_number_that_a_column_gives(left: object) -> None:
    """`for who in frame["subject"].unique(): fleet.without(who)` ended in "int64 is not iterable"."""
    assert list(FLEET.without(left)) == ["device-1", "device-3"]
    assert list(FLEET.only(left)) == ["device-2"]


def test_a_device_that_is_called_by_a_fraction_is_left_out_by_it() -> None:
    fleet = fc.fleet((RNG.normal(size=(60, 3)), np.arange(60) % 3), by=np.repeat([0.5, 1.5, 2.5], 20))
    assert list(fleet.without(1.5)) == [fleet.name(0.5), fleet.name(2.5)]


def test_the_share_that_tests_may_be_a_number_of_numpy() -> None:
    """A float32 was taken for test data: "nothing says whose the test samples are"."""
    data: dict[str, Any] = {"data": (RNG.normal(size=(60, 3)), np.arange(60) % 3), "by": np.repeat([1, 2, 3], 20)}
    assert len(fc.fleet(**data, test=np.float32(0.5))["device-1"].train) == 10
    with pytest.raises(UsageError, match="test is"):
        fc.fleet(**data, test=np.int64(1))
    with pytest.raises(UsageError, match="each device has samples of its own that test"):
        fc.fleet(dict(FLEET), test=np.float32(0.5))


@pytest.mark.parametrize(
    "y",
    [
        pd.date_range("2026", periods=60),
        pd.date_range("2026", periods=60, tz="UTC"),
        pd.to_timedelta(np.arange(60), unit="D"),
        [dt.date(2026, 1, 1 + day % 3) for day in range(60)],
    ],
    ids=["dates", "time zone", "durations", "of Python"],
)
def test_dates_are_no_labels(y: Any) -> None:  # noqa: ANN401 - a column of pandas
    """Each date became a class, without a word."""
    with pytest.raises(ConfigError, match=r"y is (datetime|timedelta)64|y holds dates"):
        fc.fleet((RNG.normal(size=(60, 3)), y), by=np.repeat([1, 2, 3], 20))


def test_a_metric_may_write_into_what_it_is_given() -> None:
    """A softmax in place changed the outputs of the next metric, and a write into y the labels of later rounds."""

    def spoils(y: np.ndarray, outputs: np.ndarray) -> float:
        y[:], outputs[:] = 0, 0.0
        return 0.0

    def share(y: np.ndarray, outputs: np.ndarray) -> float:
        return float((outputs.argmax(1) == y).mean())

    plain = run(rounds=2, metrics={"share": share})
    both = run(rounds=2, metrics={"spoils": spoils, "share": share})
    assert both.history["share"].tolist() == plain.history["share"].tolist() == plain.history["accuracy"].tolist()
    assert both.history["accuracy"].tolist() == plain.history["accuracy"].tolist()


@pytest.mark.parametrize(
    "center", [0, np.int64(0), np.array(0), torch.tensor(0)], ids=["int", "int64", "array", "tensor"]
)
def test_the_number_of_a_center_may_be_one_of_numpy_or_torch(center: Any) -> None:  # noqa: ANN401
    result, x = run(), np.eye(3)
    assert result.predict(x, center=center).tolist() == result.predict(x, center=0).tolist()
    assert result.module(center).state_dict().keys() == result.module(0).state_dict().keys()


@pytest.mark.parametrize("center", [-1, 1, 0.0, "0", True, None])
def test_what_is_no_number_of_a_center_is_refused(center: Any) -> None:  # noqa: ANN401 - wrong on purpose
    """0.0, "0" and True ended in errors of numpy; None asks `predict` for the nearest."""
    result = run()
    with pytest.raises(UsageError, match="there is no center"):
        result.module(center)
    if center is not None:
        with pytest.raises(UsageError, match="there is no center"):
            result.predict(np.zeros((2, 3)), center=center)


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (np.ones((2, 3)) + 1j, "samples are complex128"),
        (torch.ones(2, 3, dtype=torch.complex64).conj(), "samples are complex64"),
        (np.full((2, 3), "1"), "samples are <U1"),
        (np.full((2, 3), "1", dtype=object), "samples are object"),
        (np.full((2, 3), 1e300), "not finite"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_samples_that_are_no_numbers_of_float32_are_refused_in_words(x: Any, told: str) -> None:  # noqa: ANN401
    """Imaginary parts were dropped, and texts read as numbers; `fc.fleet` refuses both."""
    with pytest.raises(UsageError, match=told):
        run().predict(x, device=1)


def test_labels_may_be_a_column_for_the_nearest_center_as_they_may_for_a_fleet() -> None:
    """It ended in an error of torch."""
    x, y = RNG.normal(size=(20, 3)), np.arange(20) % 3
    assert run().nearest(x, y[:, None]).center == run().nearest(x, y).center


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda y: np.eye(3, dtype=int)[y], r"^y has labels of shape \[3\], the program reads \[\]"),
        (lambda y: np.where(y == y[0], -100, y), "^class labels must be one integer per sample"),
    ],
)
def test_labels_of_another_kind_are_named_by_the_nearest_center(made: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        run().nearest(RNG.normal(size=(20, 3)), made(np.arange(20) % 3))


def test_true_and_false_stay_what_they_are_where_the_model_has_more_outputs() -> None:
    x = np.random.default_rng(0).normal(size=(20, 4))
    fleet = fc.fleet((x, x[:, 0] > 0), by=np.repeat(["anna", "ben"], 10))
    result = fc.simulate(fc.FedAvg(), fleet=fleet, model=nn.Linear(4, 3), rounds=1)
    assert {*result.predict(x, center=0)} <= {True, False}


def test_numbers_in_an_array_of_objects_are_numbers() -> None:
    """As `to_numpy()` of a data frame with a column of True and False gives them; labels of a fleet may be such."""
    result, x, y = run(), np.eye(3), np.arange(3)
    assert result.predict(x.astype(object), center=0).tolist() == result.predict(x, center=0).tolist()
    assert result.nearest(x, y.astype(object)).center == result.nearest(x, y).center


def test_tensors_with_a_gradient_are_samples() -> None:
    """A program of `fc.compile` ended in an error of torch, where a fleet and `predict` take them."""
    x = torch.eye(3).requires_grad_()
    module = nn.Linear(3, 2)
    program = fc.compile(module, (3,), progress=False)
    weights: Any = dict(module.named_parameters())
    np.testing.assert_allclose(program.predict(weights, x), module(x).detach(), atol=1e-6)
    assert program.step(program.start(), x, torch.tensor([0, 1, 1]), anchor=weights, mu=0.1).steps == 1
    turned = torch.complex(x, x).conj().imag.detach()  # its numbers are negated when they are read
    np.testing.assert_array_equal(program.predict(weights, turned), program.predict(weights, -torch.eye(3)))


def test_a_loaded_result_goes_to_another_process(tmp_path: Path) -> None:
    """Of a data set with a name; it ended in "Can't pickle local object"."""
    made = fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3), rounds=1, progress=False)
    loaded = fc.load(made.save(tmp_path / "mine"))
    again = pickle.loads(pickle.dumps(loaded))  # noqa: S301 - our own
    assert again.history["accuracy"].tolist() == loaded.history["accuracy"].tolist()


def test_methods_of_several_kinds_are_compared_from_a_list() -> None:
    """mypy takes the list for one of what they extend, which was no method to it; it checks this file."""
    methods = [fc.FedAvg(local_steps=1), fc.FedSGD()]
    found = fc.compare(methods, fleet=FLEET, rounds=1, seeds=[0], progress=False)
    assert list(found.results) == ["FedAvg(local_steps=1)", "FedSGD()"]


@pytest.mark.parametrize(
    "model", [None, lambda: nn.Linear(3, 3), nn.Linear(3, 3)], ids=["default", "function", "module"]
)
@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad])
def test_a_run_within_torchs_inference_mode_is_the_run_without(model: Any, around: Callable[[], Any]) -> None:  # noqa: ANN401
    """It ended in "Inference tensors do not track version counter"."""
    plain = run(model=model, metrics={"mean": lambda _, outputs: float(outputs.mean())})
    with around():
        within = run(model=model, metrics={"mean": lambda _, outputs: float(outputs.mean())})
        assert within.predict(np.eye(3), device=1).tolist() == plain.predict(np.eye(3), device=1).tolist()
    assert within.history["mean"].tolist() == plain.history["mean"].tolist()


def test_a_run_within_autocast_is_refused_in_words() -> None:
    """It ended in "dot : expected both vectors to have same dtype"."""
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match=r"torch\.autocast is on"):
        run()


def test_a_device_with_a_name_that_is_not_ascii_is_found_by_it(tmp_path: Path) -> None:
    one = (RNG.normal(size=(20, 3)), np.arange(20) % 3)
    fleet = fc.fleet({"日本": one, "東京": one, "José": one})
    result = fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, rounds=1, progress=False)
    loaded = fc.load(result.save(tmp_path / "mine"))
    for who in ("日本", "東京", "José"):
        assert fleet[who] is fleet[fleet.name(who)]
        assert list(fleet.only(who)) == [fleet.name(who)]
        assert who in fleet
        assert result.predict(one[0], device=who).tolist() == loaded.predict(one[0], device=who).tolist()
