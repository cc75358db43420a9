"""fc.Result: what it shows, gives back, exports, and keeps in a run's folder that the commands read."""

from __future__ import annotations

import builtins
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedcenters as fc
from edge_client.data.dataset import DeviceData
from edge_client.errors import UsageError
from emulator.api import progress
from emulator.api.history import Table
from emulator.cli import app
from emulator.data.fleet_split import FleetData
from emulator.data.loaders.samples import DataSet
from emulator.data.partition_schemes import Iid
from emulator.reports.console_tables import summary_rows
from emulator.testbed.monitor import format_milestone
from export.cli import app as export_app

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def net() -> nn.Module:
    """A module with counters and frozen weights, which no center has and a state_dict does."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    layers[1].bias.requires_grad = False
    return layers


@pytest.fixture(scope="module")
def result() -> fc.Result:
    method = fc.FeSEM(3, local_steps=20)
    return fc.simulate(method, model=net, fleet=fc.fleets.digits(devices=6), rounds=3)


def test_it_shows_the_words_of_the_command(result: fc.Result) -> None:
    assert repr(result).splitlines()[0].split() == ["method", "fesem,", "3", "rounds,", "6", "devices"]
    for label, text in summary_rows(result.summary()):
        assert label in repr(result)
        assert text in repr(result)
    shown = result._repr_html_()
    assert shown.startswith("<table>")
    assert "data:image/png;base64," in shown


def test_centers_without_devices_are_counted_in_the_summary() -> None:
    method = fc.FeSEM(5, local_steps=2)
    summary = fc.simulate(method, fleet=fc.fleets.digits(devices=3), rounds=1).summary()
    assert (summary["clusters"], summary["clusters_without_devices"]) == (5, 2)
    assert dict(summary_rows(summary))["clusters"].startswith("5, 2 without devices, adjusted Rand index ")


def test_a_loss_of_ones_own_is_shown_beside_errors_that_mean_nothing_for_logits(result: fc.Result) -> None:
    summary = {**result.summary(), "accuracy": {"micro": None}, "metrics": {"squared_error": 2.0, "r2": -3.0}}
    assert ("loss", "0.25") in summary_rows({**summary, "loss": 0.25})
    assert "loss" not in dict(summary_rows({**summary, "loss": 2.0}))  # it is the squared error


def test_where_choices_are_hidden_no_center_is_said_to_have_no_devices() -> None:
    """Nor has a bundle's card: the sums of a round tell how many devices chose a center, and no record has it."""
    method = fc.IFCA(2, local_steps=2, server=fc.ServerOptions(secure="updates+membership"))
    result = fc.simulate(method, fleet=fc.fleets.digits(devices=12), rounds=1)
    summary, record = result.summary(), result.run.records[-1]
    assert (summary["clusters_without_devices"], dict(summary_rows(summary))["clusters"]) == (None, "2")
    assert "devices per center" not in format_milestone({"event": "round", "method": "ifca", "of": 1, **record})


def test_the_history_is_a_data_frame_with_a_row_per_round(result: fc.Result) -> None:
    assert list(result.history["round"]) == [1, 2, 3]
    assert set(result.history.columns) >= {"accuracy", "f1", "ari", "bytes", "seconds"}
    assert result.history["accuracy"].iloc[-1] == result.accuracy
    assert result.assignments["device-00"] == result.run.state.assignment["device-00"]


def test_without_pandas_it_is_a_light_table_that_can_become_one(
    result: fc.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = result.history
    real = builtins.__import__

    def without(name: str, *args: object, **more: object) -> object:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **more)  # type: ignore[arg-type]

    result.__dict__.pop("history")
    monkeypatch.setattr(builtins, "__import__", without)
    table = result.history
    assert isinstance(table, Table)
    assert isinstance(result.assignments, dict)
    assert len(str(table).splitlines()) == 4
    with pytest.raises(KeyError, match="there are round, accuracy"):
        table["acuracy"]
    monkeypatch.undo()
    result.__dict__.pop("history")
    assert table.to_pandas().equals(expected)


def test_a_center_loads_into_a_module_of_the_users_own(result: fc.Result) -> None:
    mine = net()
    for k, center in enumerate(result.centers):
        mine.load_state_dict(center)
        x = torch.randn(5, 1, 8, 8)
        assert torch.equal(mine.eval()(x), result.module(k)(x))
    with pytest.raises(UsageError, match="there are 3, from 0 on"):
        result.module(3)


def test_a_newcomer_finds_the_center_of_its_group_with_labels_and_without(result: fc.Result) -> None:
    group = next(iter(result.split.groups))
    new = fc.fleets.digits(devices=12)  # the same groups' ways of writing, other samples
    own = new[group]
    assert own.test is not None
    with_labels = result.nearest(own.test.x, own.test.y)
    assert with_labels.best == result.run.state.assignment[group]
    assert with_labels.probability is not None
    assert with_labels.fit in ("well", "badly", "none")
    assert result.nearest(own.test.x).samples == len(own.test.x)
    assert (result.predict(own.test.x, device=group) == own.test.y).mean() > 0.5
    with pytest.warns(
        UserWarning, match=r"tell the centers apart badly: .*give labels"
    ):  # all groups write the same digits
        assert result.predict(own.test.x).shape == own.test.y.shape
    with pytest.raises(UsageError, match="no center fits these samples"):
        result.predict(np.random.default_rng(0).uniform(size=own.test.x.shape))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"x": np.zeros((2, 64))}, r"give \[n, 1, 8, 8\]"),
        ({"x": np.zeros((2, 8, 8))}, r"give \[n, 1, 8, 8\]: x\[:, None\]"),
        ({"x": np.zeros((2, 8, 8, 1))}, r"give \[n, 1, 8, 8\]: x.transpose\(0, 3, 1, 2\)"),
        ({"x": np.full((2, 1, 8, 8), np.nan)}, "replace NaN"),
        ({"x": np.zeros((2, 1, 8, 8)), "device": "device-99"}, "no device 'device-99'"),
        ({"x": np.zeros((2, 1, 8, 8)), "center": 7}, "no center 7"),
    ],
)
def test_samples_that_do_not_fit_are_named(result: fc.Result, wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        result.predict(wrong.pop("x"), **wrong)  # type: ignore[arg-type]


def test_labels_that_are_no_whole_numbers_are_told_what_to_write(result: fc.Result) -> None:
    one = result.split.devices["device-00"].train
    with pytest.raises(UsageError, match=r"labels are float64, .* whole numbers from 0\n\nhint: .* y.astype\(int\)"):
        result.nearest(one.x, one.y.astype(float))


def test_one_scheme_of_quantization_is_given_by_its_name(result: fc.Result, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown quantization 'int9'"):
        result.export(tmp_path / "centers", quantize="int9")


def test_the_figure_has_the_curve_and_the_devices(result: fc.Result) -> None:
    titles = [axes.get_title(loc="left") for axes in result.plot().axes]
    assert titles == ["FeSEM on held-out samples", "Where each device's first update points"]


def test_a_picture_names_the_users_own_method_as_its_class(result: fc.Result) -> None:
    mine = type("SignGroups", (fc.FeSEM,), {})(clusters=3)
    assert replace(result, method=mine).plot().axes[0].get_title(loc="left") == "SignGroups on held-out samples"


def test_a_saved_run_of_ones_own_module_loads_again_with_it(result: fc.Result, tmp_path: Path) -> None:
    place = result.save(tmp_path / "mine")
    assert fc.load(place).assignments.equals(result.assignments)
    bundled = CliRunner().invoke(export_app, ["bundle", str(place), "--out", str(tmp_path / "bundle")])
    assert "make the bundle in Python: fc.load(" in bundled.output
    again = fc.load(place, model=net)
    np.testing.assert_array_equal(again.run.state.centers, result.run.state.centers)
    assert again.history.drop(columns="real_seconds").equals(result.history.drop(columns="real_seconds"))
    assert again.assignments.equals(result.assignments)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(again.module(1)(x), result.module(1)(x))


def test_the_commands_read_and_resume_a_saved_run(tmp_path: Path) -> None:
    method = fc.FedAvg(local_steps=5)
    part = fc.simulate(method, fleet=fc.fleets.digits(devices=4), rounds=1).save(tmp_path / "mine")
    whole = fc.simulate(method, fleet=fc.fleets.digits(devices=4), rounds=2)
    asked = ["simulate", str(part / "config.toml"), "--resume", "--rounds", "2", "--json"]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["accuracy"] == whole.summary()["accuracy"]
    page = CliRunner().invoke(app, ["report", str(part)])
    assert page.exit_code == 0, page.output
    np.testing.assert_allclose(fc.load(part).run.state.centers, whole.run.state.centers, rtol=1e-6)  # float32 files


@pytest.fixture(scope="module")
def exported(result: fc.Result, tmp_path_factory: pytest.TempPathFactory) -> tuple[fc.Bundle, list[str]]:
    """A bundle of a fleet that names its classes, and what a notebook showed of the export."""
    shown: list[str] = []
    named = replace(result, split=replace(result.split, classes=DIGITS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "in_notebook", lambda: True)
        patch.setattr(progress.NotebookLine, "busy", lambda _, text: shown.append(text))
        bundle = named.export(tmp_path_factory.mktemp("exported") / "centers", formats=("onnx",))
    return bundle, shown


def test_an_export_tells_what_it_makes(exported: tuple[fc.Bundle, list[str]]) -> None:
    told = [text.removeprefix("exporting centers  ") for text in exported[1]]
    assert told[0] == "reading the centers"
    assert told[-2:] == ["writing center 3 of 3", "done"]
    assert any(text.startswith("compiling onnx") for text in told)
    assert any("the devices teach" in text for text in told)


def test_a_center_has_the_formats_that_were_asked_for_and_the_program_torchs_graph(
    exported: tuple[fc.Bundle, list[str]],
) -> None:
    bundle = exported[0]
    files = sorted(path.name for path in (bundle.root / "centers/center-0").iterdir())
    assert files == ["card.json", "card.md", "model.onnx", "model.safetensors"]
    assert sorted(bundle.program.containers) == ["onnx", "pt2"]
    x = np.random.default_rng(0).uniform(size=(3, 1, 8, 8)).astype(np.float32)
    session = onnxruntime.InferenceSession(bundle.root / "centers/center-0/model.onnx")
    in_torch = bundle.module(0)(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(session.run(None, {"x": x})[0], in_torch, rtol=1e-4, atol=1e-4)  # two runtimes, float32


def test_a_card_has_the_users_names_of_the_classes(exported: tuple[fc.Bundle, list[str]]) -> None:
    folder = exported[0].root / "centers/center-0"
    card = json.loads((folder / "card.json").read_text())
    assert card["classes"] == list(DIGITS)
    assert f"| {DIGITS[0]} | {card['labels']['counts'][0]} |" in (folder / "card.md").read_text()


def test_exported_centers_answer_as_the_modules_do(result: fc.Result, exported: tuple[fc.Bundle, list[str]]) -> None:
    bundle, _ = exported
    assert len(bundle.manifest["centers"]) == 3
    x = torch.randn(4, 1, 8, 8)
    for k in range(3):
        torch.testing.assert_close(bundle.module(k)(x), result.module(k)(x), rtol=1e-4, atol=1e-4)  # float32
    assert bundle.router is not None


def test_devices_learn_with_adam_and_the_guide_leaves_out_its_local_round() -> None:
    """A guide has no words for another optimiser than SGD."""
    fleet = fc.fleets.digits(devices=4, groups=1)
    plain, adam = (
        fc.simulate(method, fleet=fleet, rounds=2)
        for method in (fc.FedAvg(), fc.FedAvg(optimiser="adam", learning_rate=0.005, clip_norm=5.0))
    )
    assert adam.accuracy is not None
    assert adam.accuracy > 0.5  # of ten classes
    assert plain.guide is not None
    assert plain.guide.round is not None
    assert adam.guide is not None
    assert adam.guide.round is None
    assert "labelled" in adam.guide.ways


@pytest.fixture(scope="module")
def alone() -> fc.Result:
    return fc.simulate(fc.NonFed(local_steps=20), model=net, fleet=fc.fleets.digits(devices=3), rounds=2)


def test_a_device_that_keeps_its_model_is_served_by_it(alone: fc.Result, tmp_path: Path) -> None:
    for result in (alone, fc.load(alone.save(tmp_path / "alone"))):
        for device, local in alone.split.devices.items():
            assert local.test is not None
            share = (result.predict(local.test.x, device=device) == local.test.y).mean()
            assert share == pytest.approx(result.accuracies[device])
            assert share > 0.4  # of 10 classes; an untrained start has about 0.1


@pytest.mark.parametrize("how", ["nearest", "predict", "center", "export"])
def test_an_untrained_start_is_no_center(alone: fc.Result, how: str, tmp_path: Path) -> None:
    x = np.zeros((2, 1, 8, 8))
    do: dict[str, Callable[[], object]] = {
        "nearest": lambda: alone.nearest(x),
        "predict": lambda: alone.predict(x),
        "center": lambda: alone.predict(x, center=0),
        "export": lambda: alone.export(tmp_path / "centers", formats=("onnx",)),
    }
    with pytest.raises(UsageError, match=r"(?s)NonFed\(.*trains no center.*predict\(x, device="):
        do[how]()


def test_the_accuracy_of_each_device_is_that_of_the_last_test(result: fc.Result) -> None:
    assert result.accuracies.to_dict() == result.run.records[-1]["per_device"]


def test_a_bundle_has_the_users_names_and_shows_itself(
    result: fc.Result, exported: tuple[fc.Bundle, list[str]]
) -> None:
    bundle, _ = exported
    assert (bundle.names.classes, bundle.names.columns) == (DIGITS, ())
    assert bundle.names.devices == result.assignments.to_dict()
    assert repr(bundle) == "Bundle(Sequential, 3 centers: onnx)"
    assert repr(bundle.module(0)) == "Center(center 0 of Sequential: [1, 8, 8] -> [10])"
    assert bundle._repr_html_().count("<tr>") == 4
    with pytest.raises(UsageError, match="there are 3, from 0 on"):
        bundle.module(3)
    assert fc.fleets.digits(devices=6)._repr_html_().count("<tr>") == 7


def test_centers_that_suit_alike_are_told_apart_from_a_fit(result: fc.Result) -> None:
    own = result.split.devices["device-00"].test
    assert own is not None
    found = result.nearest(own.x)  # all groups write the same digits
    assert found.probability is not None
    assert found.probability < 0.6
    assert any("tell the centers apart badly" in line for line in found.reasons)
    assert f"with a probability of {found.probability:.0%}" in repr(found)
    assert "apart badly: center" in found._repr_html_()


def test_a_folder_with_another_run_is_not_replaced(result: fc.Result, tmp_path: Path) -> None:
    fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleets.digits(devices=3), rounds=1).save(tmp_path / "mine")
    with pytest.raises(UsageError, match="choose another"):
        result.save(tmp_path / "mine")


class WithoutTest(Iid):
    """Each device trains on all of its samples."""

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        made = super().split(data, devices=devices, seed=seed)
        return replace(made, devices={cid: DeviceData(train=local.train) for cid, local in made.devices.items()})


def test_without_held_out_samples_centers_have_no_accuracy_and_whether_one_fits_is_not_known(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
    fleet = fc.fleet((x, (x[:, 0] > 0).astype(int)), partition=WithoutTest(), devices=4)
    result = fc.simulate(fc.FedAvg(local_steps=2), fleet=fleet, rounds=1)
    assert result.accuracy is None
    bundle = result.export(tmp_path / "centers", formats=("onnx",))
    assert bundle.reference_samples() is None
    assert bundle.manifest["centers"][0]["card"]["accuracy"] is None
    with pytest.raises(UsageError, match="it is not known whether a center fits these samples"):
        result.predict(x)


def test_a_table_without_pandas_says_what_a_data_frame_would_do() -> None:
    table = Table([{"round": 1, "accuracy": 0.5}])
    with pytest.raises(TypeError, match="pip install pandas"):
        table[["round"]]
    with pytest.raises(AttributeError, match="tail is what a DataFrame has: pip install pandas"):
        table.tail(3)
    assert list(copy.deepcopy(table)) == list(table)


def smoothed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.3, reduction="none")


def test_the_program_of_an_export_has_the_runs_own_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Devices compare centers and take personal steps by it."""
    asked: dict[str, Any] = {
        "fleet": fc.fleets.digits(devices=3),
        "model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        "rounds": 1,
    }
    own = fc.simulate(fc.FedAvg(local_steps=1), **asked, loss=smoothed).export(tmp_path / "own", formats=())
    assert own.program.own_loss
    assert "in its place" not in capsys.readouterr().err


def test_a_run_that_is_stopped_between_tests_tells_the_last_test() -> None:
    options: dict[str, Any] = {"fleet": fc.fleets.digits(devices=4), "rounds": 6, "evaluate_every": 2}
    options |= {"hostile": "sign-flip:0.25"}
    result = fc.simulate(fc.FeSEM(2, local_steps=5), **options, on_round=lambda r: len(r.history) == 3, progress=False)
    told, tested = result.summary(), result.run.records[1]
    assert (told["rounds"], told["accuracy"]["micro"]) == (3, result.accuracy)
    assert told["f1_of_devices"] == tested["f1_of_devices"]
    assert told["centers_accuracy"] == tested["accuracy"]
    assert f"{result.accuracy:.1%}" in repr(result)
    honest = [tested["per_device"][who] for who in tested["per_device"].keys() - result.attackers]
    assert told["honest_accuracy"] == pytest.approx(np.mean(honest))


def test_a_run_that_is_stopped_does_not_take_what_devices_keep_for_its_centers(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32), np.arange(80) % 2
    options: dict[str, Any] = {"fleet": fc.fleet((x, y), by=np.arange(80) % 4), "rounds": 9, "progress": False}
    cards, alone = {}, {}
    for name, method in {"own": fc.Ditto(local_steps=5), "common": fc.FedAvg(local_steps=5)}.items():
        result = fc.simulate(method, **options, on_round=lambda r: len(r.history) == 2)
        again = fc.load(result.save(tmp_path / name))  # the samples are not there, so that nothing is measured anew
        bundle = again.export(tmp_path / f"{name}-files", formats=("onnx",), progress=False)
        cards[name], alone[name] = bundle.manifest["centers"][0]["card"], again.summary()["centers_accuracy"]["micro"]
    assert (cards["own"]["accuracy"], alone["own"]) == (None, None)
    assert cards["own"]["served"]["devices"] == 4
    assert (cards["common"]["accuracy"]["devices"], alone["common"]) == (4, result.accuracy)
