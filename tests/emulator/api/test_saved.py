"""fc.load: a run's folder answers without module and data, and says by name which part is not the run's."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedcenters as fc
from edge_client.errors import ConfigError, UsageError
from emulator.config import read_table
from emulator.reports.repeat import repeat_in_python
from export.cli import app

COLUMNS = ("height", "width", "depth")


def frame(seed: int = 0, people: tuple[str, ...] = ("anna", "ben", "cleo", "dora")) -> pd.DataFrame:
    """Two kinds of fruit; half of the people call them by each other's name."""
    rng = np.random.default_rng(seed)
    x, kind = rng.normal(size=(160, 3)), np.arange(160) % 2
    x[:, 0] += 4 * kind
    owner = np.repeat(np.arange(4), 40)
    called = np.where(kind ^ (owner % 2), "plum", "fig")
    return pd.DataFrame({**dict(zip(COLUMNS, x.T, strict=True)), "label": called, "who": np.array(people)[owner]})


def net() -> nn.Module:
    """Normalization, dropout and a frozen weight, none of which a vector of weights shows."""
    layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))
    frozen = layers.get_parameter("0.bias")
    nn.init.constant_(frozen, 0.1)
    frozen.requires_grad = False
    return layers


def fruit(data: pd.DataFrame | None = None) -> fc.Fleet:
    return fc.fleet(frame() if data is None else data, by="who", name="fruit")


@dataclass(frozen=True, kw_only=True, repr=False)
class Mine(fc.FeSEM):
    """A method of the user's own."""


@pytest.fixture(scope="module")
def result() -> fc.Result:
    return fc.simulate(fc.FeSEM(2, local_steps=10), model=net(), fleet=fruit(), rounds=3)


@pytest.fixture(scope="module")
def place(result: fc.Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return result.save(tmp_path_factory.mktemp("runs") / "mine")


def test_predictions_are_the_users_own_values_of_columns_by_name(result: fc.Result) -> None:
    assert result.classes == ("fig", "plum")
    assert result.columns == COLUMNS
    mine = frame(seed=1).query("who == 'ben'")
    assert (result.predict(mine, device="ben") == mine["label"]).mean() > 0.9
    turned = mine[["label", *reversed(COLUMNS)]]
    np.testing.assert_array_equal(result.predict(turned, device="ben"), result.predict(mine, device="ben"))
    with pytest.raises(UsageError, match=r"(?s)no column 'width'.*height, width, depth; it has height, wide"):
        result.predict(mine.rename(columns={"width": "wide"}), device="ben")
    with pytest.raises(UsageError, match=r"(?s)no class 'pear'.*the run has fig, plum"):
        result.nearest(mine, mine["label"].replace("fig", "pear"))


def test_test_data_with_its_columns_in_another_order_are_read_by_name() -> None:
    data, test = frame(), frame(seed=1)
    made = fc.fleet(data, by="who", test=test[["label", *reversed(COLUMNS), "who"]])
    held = made["anna"].test
    assert held is not None
    np.testing.assert_array_equal(held.x, test.query("who == 'anna'")[list(COLUMNS)].to_numpy(np.float32))


def test_true_and_false_are_classes() -> None:
    data = frame()
    made = fc.fleet(data.assign(label=data["label"] == "fig"), by="who")
    result = fc.simulate(fc.FedAvg(local_steps=1), model=net(), fleet=made, rounds=1)
    assert result.predict(data, center=0).dtype == bool


def test_a_loaded_run_took_the_time_that_the_result_told(result: fc.Result, place: Path) -> None:
    """It was that of the rounds alone, without the preparation."""
    assert fc.load(place).summary()["seconds"] == result.summary()["seconds"] > sum(result.run.real_seconds)


def test_a_folder_answers_without_the_module_and_without_the_data(result: fc.Result, place: Path) -> None:
    again, new = fc.load(place), frame(seed=1)
    assert again.assignments.equals(result.assignments)
    assert again.history.drop(columns="real_seconds").equals(result.history.drop(columns="real_seconds"))
    assert repr(again).splitlines()[0] == repr(result).splitlines()[0]
    for device, rows in new.groupby("who"):
        np.testing.assert_array_equal(again.predict(rows, device=str(device)), result.predict(rows, device=str(device)))
        found, expected = (r.nearest(rows, rows["label"]) for r in (again, result))
        assert found.best == expected.best == result.assignments[device]
        assert found.fit == expected.fit
    x = torch.randn(5, 3)
    for k, center in enumerate(again.centers):
        mine = net()
        mine.load_state_dict(center)
        torch.testing.assert_close(mine.eval()(x), result.module(k)(x), rtol=1e-6, atol=1e-6)  # float32 files


def test_a_device_is_predicted_for_by_the_number_that_the_user_calls_it(tmp_path: Path) -> None:
    data = frame().assign(who=np.repeat([7, 8, 9, 10], 40))
    made = fc.fleet(data, by="who")
    by_number = fc.fleet({np.int64(k): (x, np.arange(20) % 2) for k, x in enumerate(np.ones((3, 20, 4)))})
    again = fc.load(fc.simulate(fc.FedAvg(local_steps=1), fleet=by_number, rounds=1).save(tmp_path / "numbers"))
    assert len(again.predict(np.ones((2, 4)), device=1)) == 2
    result = fc.simulate(fc.FeSEM(2, local_steps=10), model=net(), fleet=made, rounds=3)
    rows = frame(seed=1).query("who == 'ben'")
    for told in (result, fc.load(result.save(tmp_path / "mine"))):
        expected = told.predict(rows, device="who-08")
        np.testing.assert_array_equal(told.predict(rows, device=8), expected)
        np.testing.assert_array_equal(told.predict(rows, device=np.int64(8)), expected)
        with pytest.raises(UsageError, match=r"(?s)no device 11.*the run has who-07, who-08, who-09 \.\.\."):
            told.predict(rows, device=11)
    centers = data["who"].map(made.name).map(result.assignments)
    assert centers.notna().all()
    assert centers.iloc[0] == result.assignments["who-07"]


def test_a_loaded_run_is_exported_without_its_samples_and_says_what_it_misses(
    result: fc.Result, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = fc.load(place).export(tmp_path / "centers", formats=("onnx",))
    assert "compared on random inputs" in capfd.readouterr().err
    assert bundle.reference_samples() is None
    whole = result.export(tmp_path / "whole", formats=("onnx",))
    for key in ("devices", "samples", "labels", "accuracy"):
        mine, expected = ([c["card"][key] for c in each.manifest["centers"]] for each in (bundle, whole))
        assert mine == expected
    assert bundle.manifest["names"] == whole.manifest["names"]


def test_a_coordinators_folder_is_told_as_one(tmp_path: Path) -> None:
    """As `fc.federation` leaves it. It was "no simulated run", with the folder that `save` wrote as what to give."""
    (tmp_path / "home/store").mkdir(parents=True)
    (tmp_path / "home/store/coordinator.sqlite").touch()
    with pytest.raises(ConfigError, match="home is a coordinator's folder") as refused:
        fc.load(tmp_path / "home")
    assert "`save` the result" in refused.value.hint


def test_what_needs_the_samples_says_so(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)samples of 'fruit'.*fc.load\(.*fleet="):
        fc.load(place).export(tmp_path / "centers", formats=("onnx",), quantize=("int8-static",))


def test_a_loaded_run_without_its_samples_is_not_saved_by_halves(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)samples of 'fruit'.*fc.load\(.*fleet="):
        fc.load(place).save(tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_the_command_that_cannot_export_a_run_says_what_python_exports_it(place: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bundle", str(place), "--out", str(tmp_path / "centers")])
    assert done.exit_code == 3
    assert f'fc.load("{place}").export(' in done.stderr


def test_the_runs_own_fleet_and_module_are_taken(result: fc.Result, place: Path) -> None:
    again = fc.load(place, model=net(), fleet=fruit())
    rows = frame(seed=1).head(40)
    np.testing.assert_array_equal(again.predict(rows, center=1), result.predict(rows, center=1))
    assert len(again.split.devices["anna"].train) == 32


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"fleet": fruit(frame(people=("anna", "ben", "cleo", "emil")))}, "has 'emil', .* the run had 'dora'"),
        ({"fleet": fruit(frame().drop(index=range(10)))}, "'anna' has 24 training samples, .* the run 32"),
        ({"fleet": fruit(frame().rename(columns={"depth": "deep"}))}, "columns height, width, deep"),
        ({"fleet": fruit(frame().replace("fig", "pear"))}, "classes pear, plum"),
        ({"model": nn.Linear(3, 2)}, r"this module has no '0.weight' \[8, 3\]"),
        (
            {"model": nn.Sequential(nn.Linear(3, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 2))},
            r"'0.weight' of this module is \[9, 3\], that of the run \[8, 3\]",
        ),
        ({"method": fc.FedAvg()}, "the run's method is fesem, not fedavg"),
        ({"method": fc.FeSEM(3, local_steps=10)}, "clusters = 2, this one has 3"),
    ],
)
def test_a_part_that_is_not_the_runs_is_named(place: Path, part: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=f"(?s){said}"):
        fc.load(place, **part)


def test_a_run_that_was_ended_while_it_wrote_its_centers_says_how_it_goes_on(place: Path, tmp_path: Path) -> None:
    """The centers of a run that went on to more rounds are removed before the new ones are there."""
    shutil.copytree(place, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint")  # that of the run has another round than its metrics then
    for file in (tmp_path / "cut" / "centers").rglob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no centers: a run was ended while it wrote them") as told:
        fc.load(tmp_path / "cut")
    assert "resume=True" in told.value.hint


def test_a_method_that_cannot_be_imported_is_given(tmp_path: Path) -> None:
    """As one of a script: no module of that name has it when the folder is loaded."""

    @dataclass(frozen=True, kw_only=True, repr=False)
    class Mine(fc.FeSEM):
        pass

    Mine.__module__, Mine.__qualname__ = "__main__", "Mine"
    run = fc.simulate(Mine(2, local_steps=1), fleet=fc.fleets.digits(devices=3), rounds=1)
    place = run.save(tmp_path / "mine")
    assert len(fc.load(place, method=Mine(2, local_steps=1)).history) == 1
    with pytest.raises(ConfigError, match="the method __main__:Mine cannot be made again") as refused:
        fc.load(place)
    assert "fc.load(folder, method=Mine(...))" in refused.value.hint


def smoothed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.3, reduction="none")


def test_a_folder_names_the_runs_own_loss_and_takes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The program of a bundle takes personal steps by it."""
    fleet = fc.fleets.digits(devices=3)
    run = fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, model="digits-mlp", rounds=1, loss=smoothed)
    place = run.save(tmp_path / "mine")
    assert fc.load(place, loss=smoothed).export(tmp_path / "with", formats=()).program.own_loss
    assert "own loss" not in caplog.text
    assert not fc.load(place).export(tmp_path / "without", formats=()).program.own_loss
    assert "own loss smoothed is not in" in caplog.text
    assert "fc.load(folder, loss=...)" in caplog.text
    with pytest.raises(ConfigError, match="loss is smoothed, not CrossEntropyLoss"):
        fc.load(place, loss=nn.CrossEntropyLoss())


def test_a_loss_that_the_run_had_not_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="trained on cross-entropy, and no loss of your own"):
        fc.load(place, loss=smoothed)


def test_targets_of_another_shape_than_the_outputs_are_kept(tmp_path: Path) -> None:
    """A loss of the user's own may compare two outputs with one target."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    devices = {f"d{i}": (x[i::3], x[i::3, :1]) for i in range(3)}

    def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets) ** 2).sum(1)

    method = fc.FedAvg(local_steps=1)
    run = fc.simulate(method, fleet=fc.fleet(devices), model=lambda: nn.Linear(3, 2), rounds=1, loss=spread)
    again = fc.load(run.save(tmp_path / "mine"), loss=spread)
    assert again.export(tmp_path / "bundle", formats=()).program.truth == (1,)


class Tagger(nn.Module):
    """Tokens as numbers: those beyond its table cannot be looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.embed(x.long()))
        return made


def test_a_run_on_numbers_that_nothing_has_scaled_is_loaded(tmp_path: Path) -> None:
    """Times in nanoseconds, and targets whose squared error is above 2^53."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(180, 2)) * [1, 1e17]
    fleet = fc.fleet((x, 1e9 * (1 + x[:, :1])), by=np.repeat(list("abcdef"), 30))
    method = fc.FeSEM(2, local_steps=2, optimiser="adam", learning_rate=0.01)
    result = fc.simulate(method, model=nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 1)), fleet=fleet, rounds=1)
    again = fc.load(result.save(tmp_path / "large"))
    assert repr(again.nearest(x[:20])) == repr(result.nearest(x[:20]))


def test_a_model_of_tokens_answers_without_its_code(tmp_path: Path) -> None:
    """Only its graph tells how many tokens it knows; samples drawn as other numbers were refused."""
    x = np.random.default_rng(0).integers(7, size=(40, 5))
    fleet = fc.fleet((x, x % 3), by=np.repeat([0, 1], 20))
    result = fc.simulate(fc.FedAvg(local_steps=5), model=Tagger(), fleet=fleet, rounds=1)
    loaded = fc.load(result.save(tmp_path / "tokens"))
    np.testing.assert_array_equal(loaded.predict(x, center=0), result.predict(x, center=0))
    bundle = loaded.export(tmp_path / "exported", formats=("onnx",))
    assert bundle.program.golden["onnx"].tokens == 7


class Shared(nn.Module):
    """A layer under two names, a weight in two layers, an unsaved buffer, a mask of infinities, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.again, self.one, self.two = self.body, nn.Linear(4, 3), nn.Linear(4, 3)
        self.two.weight = self.one.weight
        self.register_buffer("shift", torch.full((4,), 0.5), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0, 0.0]))
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.again(torch.relu(self.body(x + self.get_buffer("shift")))) * self.get_buffer("mask").exp()
        made: torch.Tensor = self.one(hidden) + self.two(hidden) * self.scale
        return made


def test_tied_weights_and_tensors_that_no_center_has_are_found_again(tmp_path: Path) -> None:
    """Each copy was a weight of its own: `predict` ended in a RuntimeError of torch."""
    rng = np.random.default_rng(0)
    fleet = fc.fleet((rng.normal(size=(40, 4)), rng.normal(size=(40, 3))), by=np.repeat([0, 1], 20))
    result = fc.simulate(fc.FedAvg(local_steps=5), model=Shared(), fleet=fleet, rounds=1)
    loaded, x = fc.load(result.save(tmp_path / "shared")), rng.normal(size=(5, 4))
    np.testing.assert_allclose(loaded.predict(x, center=0), result.predict(x, center=0), atol=1e-5)
    assert loaded.export(tmp_path / "exported", formats=()).program.schema.size == 4 * 4 + 4 + 4 * 3 + 3 + 3
    # to another process: it ended in "Can't pickle local object" of torch
    again, center = pickle.loads(pickle.dumps((loaded, loaded.module(0))))  # noqa: S301 - our own
    np.testing.assert_allclose(again.predict(x, center=0), result.predict(x, center=0), atol=1e-5)
    given = torch.from_numpy(x).float()
    np.testing.assert_allclose(center(given).detach(), loaded.module(0)(given).detach())


@pytest.mark.parametrize(
    "fleet",
    [
        lambda: fc.fleets.digits(devices=6, groups=2).without("device-05"),
        lambda: fc.fleets.digits(devices=6, partition=[list(range(i * 100, i * 100 + 100)) for i in range(6)]),
    ],
)
def test_a_known_data_set_that_was_shared_in_python_keeps_what_its_devices_taught(
    fleet: Callable[[], fc.Fleet], tmp_path: Path
) -> None:
    """Its folder names a partition that no file can have, and loading it ended with an error about that."""
    result = fc.simulate(fc.FeSEM(2, local_steps=5), fleet=fleet(), rounds=1, progress=False)
    found = fc.load(result.save(tmp_path / "run"))
    x = next(iter(fleet().values())).test.x  # type: ignore[union-attr]
    assert found.nearest(x).center == result.nearest(x).center
    with pytest.raises(ConfigError, match="does not hold the samples of 'digits'"):
        next(iter(found.split.devices.values()))
    hint = str(repeat_in_python(read_table(tmp_path / "run" / "config.toml"), tmp_path / "run"))
    assert hint == "('samples', 'fc.simulate(fc.FeSEM(2, local_steps=5), fleet=fleet, rounds=1, seed=0)')"


def test_a_loaded_history_has_its_columns_in_the_same_order(tmp_path: Path) -> None:
    """Metrics came in alphabetical order after `fc.load`."""
    metrics = {"wrong": lambda y, outputs: (outputs.argmax(1) != y).mean(), "bias": lambda y, outputs: outputs.mean()}
    made = fc.simulate(fc.FeSEM(2), model=net(), fleet=fruit(), rounds=1, metrics=metrics)
    assert list(fc.load(made.save(tmp_path / "mine")).history.columns) == list(made.history.columns)
