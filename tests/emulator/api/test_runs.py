"""fc.simulate and fc.rounds: the command's numbers, from values of Python; own methods, models, losses and metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedcenters as fc
from coordinator.strategies.base import Fleet, Round, State
from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.task import Array, Schema
from emulator.api.runs import RunOptions
from emulator.cli import app
from emulator.options import OPTIONS

STEPS = 5
TIMES = ("seconds", "run")  # the clock's, and where the folder lies


def digits(devices: int = 4) -> fc.Fleet:
    return fc.fleets.digits(devices=devices)


def own_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def test_python_and_the_command_give_the_same_numbers_to_the_last_digit(tmp_path: Path) -> None:
    asked = ["simulate", "--method", "fesem", "--clusters", "2", "--devices", "4", "--groups", "2", "--rounds", "2"]
    told = CliRunner().invoke(app, [*asked, "-c", "local-steps=5", "--json", "--out", str(tmp_path)])
    assert told.exit_code == 0, told.output
    fleet = fc.fleets.digits(devices=4, groups=2)
    result = fc.simulate(fc.FeSEM(2, local_steps=STEPS), fleet=fleet, rounds=2, out=tmp_path, name="python")
    printed, mine = json.loads(told.stdout), result.summary()
    assert {k: v for k, v in printed.items() if k not in TIMES} == {k: v for k, v in mine.items() if k not in TIMES}
    folders = Path(printed["run"]), tmp_path / "python"
    files = [sorted(folder.glob("centers/*/*")) for folder in folders]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_rounds_gives_the_run_of_simulate_one_round_at_a_time_and_what_it_gave_stays() -> None:
    method = fc.FedAvg(local_steps=STEPS)
    seen = list(fc.rounds(method, fleet=digits(), rounds=3))
    whole = fc.simulate(method, fleet=digits(), rounds=3)
    assert [len(r.history) for r in seen] == [1, 2, 3]
    np.testing.assert_array_equal(seen[-1].run.state.centers, whole.run.state.centers)
    assert not np.array_equal(seen[0].run.state.centers, whole.run.state.centers)


class HalfWay(fc.FedAvg):
    """FedAvg whose center goes half of the way: a user's method, as it is written in a notebook's cell."""

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        after = yield from super().round(state, schema, fleet, rng)
        return State(centers=(state.centers + after.centers) / 2, assignment=after.assignment)


def test_a_method_of_ones_own_is_a_class_with_round() -> None:
    own = fc.simulate(HalfWay(local_steps=STEPS), fleet=digits(), rounds=1)
    ours = fc.simulate(fc.FedAvg(local_steps=STEPS), fleet=digits(), rounds=1)
    np.testing.assert_allclose(own.run.state.centers, (own.start + ours.run.state.centers) / 2)
    assert "HalfWay, 1 round, 4 devices" in repr(own)


class Mean(fc.LocalSgd):
    """A method from nothing: all devices train from one center, which becomes their plain mean."""

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        replies = yield {who: self.fit(start=state.centers[0], seed=int(rng.integers(2**31))) for who in sorted(fleet)}
        models = [reply.update for reply in replies.values() if reply.update is not None]
        return fc.State(centers=np.mean(models, axis=0)[None])


def test_a_method_from_nothing_is_five_lines_and_learns() -> None:
    result = fc.simulate(Mean(local_steps=STEPS), fleet=fc.fleets.digits(devices=3, groups=1), rounds=5)
    assert (result.accuracy or 0) > 0.4  # ten classes
    assert repr(result.method) == "Mean(local_steps=5)"


class Remembers(Mean):
    """Notes what `round` is given of assignments."""

    given: ClassVar[list[dict[str, int]]] = []

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        self.given.append(dict(state.assignment))
        return (yield from super().round(state, schema, fleet, rng))


def test_a_method_of_ones_own_with_one_center_and_no_assignment_has_every_device_on_it(tmp_path: Path) -> None:
    fleet = digits()
    result = fc.simulate(Remembers(local_steps=STEPS), fleet=fleet, rounds=2, evaluate_every=2)
    assert dict(result.assignments) == dict.fromkeys(fleet, 0)
    assert "without devices" not in repr(result)
    assert [dict(record["assignment"]) for record in result.run.records] == [dict.fromkeys(fleet, 0)] * 2
    assert result.run.records[-1]["per_center"] == [result.accuracy]
    assert len(result.plot().axes) == 2  # the curve and the devices
    assert Remembers.given == [{}, {}]  # the method's own state stays as it made it
    again = fc.load(result.save(tmp_path / "mine"), method=Remembers(local_steps=STEPS))
    assert dict(again.assignments) == dict.fromkeys(fleet, 0)


def test_devices_that_keep_their_own_models_are_on_no_center() -> None:
    result = fc.simulate(fc.NonFed(local_steps=STEPS), fleet=digits(), rounds=1)
    assert dict(result.assignments) == {}


def test_a_model_of_ones_own_trains_and_comes_back_as_its_own_state_dicts() -> None:
    module = own_net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = fc.simulate(fc.FeSEM(2, local_steps=STEPS), model=module, fleet=digits(), rounds=2)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module.load_state_dict(result.centers[1])
    x = result.split.devices["device-00"].test.x  # type: ignore[union-attr]
    with torch.no_grad():
        np.testing.assert_array_equal(result.predict(x, center=1), module(torch.from_numpy(x)).argmax(-1).numpy())
    assert torch.equal(result.module(1)(torch.from_numpy(x)), module.eval()(torch.from_numpy(x)))


def test_a_function_that_makes_the_model_has_weights_drawn_by_the_seed() -> None:
    def start(seed: int) -> Array:
        return fc.simulate(fc.NonFed(local_steps=1), model=own_net, fleet=digits(), rounds=1, seed=seed).start

    np.testing.assert_array_equal(start(0), start(0))
    assert not np.array_equal(start(0), start(1))


def test_workers_give_the_numbers_of_one_process_for_a_model_that_no_module_has() -> None:
    class Local(nn.Module):  # only this function knows it
        def __init__(self) -> None:
            super().__init__()
            self.layers = own_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.layers(x)
            return made

    module, method = Local(), fc.FedAvg(local_steps=STEPS)
    one, two = (fc.simulate(method, model=module, fleet=digits(), rounds=1, workers=n) for n in (1, 2))
    np.testing.assert_array_equal(one.run.state.centers, two.run.state.centers)


def test_a_loss_of_ones_own_that_is_cross_entropy_gives_the_numbers_of_ours() -> None:
    method = fc.FedAvg(local_steps=STEPS)
    ours = fc.simulate(method, fleet=digits(), rounds=1)
    own = fc.simulate(method, fleet=digits(), rounds=1, loss=nn.CrossEntropyLoss())
    other = fc.simulate(method, fleet=digits(), rounds=1, loss=nn.CrossEntropyLoss(label_smoothing=0.3))
    np.testing.assert_allclose(own.run.state.centers, ours.run.state.centers, rtol=1e-4, atol=1e-5)  # float32's order
    assert np.abs(other.run.state.centers - ours.run.state.centers).max() > 1e-3


class Own(fc.FedAvg):
    """A method whose round returns what its test wants."""

    returned: Any = None

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        after = yield from super().round(state, schema, fleet, rng)
        return self.returned(after)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda _after: None, "Own.round returned NoneType.*return the next State"),
        (lambda after: after.centers, "Own.round returned ndarray"),
        (lambda after: State(centers=after.centers[0]), r"centers of shape \[\d+\].*number of centers"),
        (lambda after: State(centers=after.centers * np.nan), "NaN or infinity in center 0.*a mean over no replies"),
    ],
)
def test_a_round_that_returns_no_state_is_named(returned: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    monkeypatch.setattr(Own, "returned", staticmethod(returned))
    with pytest.raises(UsageError, match=f"(?s){said}"):
        fc.simulate(Own(local_steps=1), fleet=digits(3), rounds=1)


class Elsewhere(fc.FedAvg):
    """A method that asks a device which is not there."""

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        yield {"device-99": self.fit(start=state.centers[0], seed=0)}
        return state


def test_a_round_that_asks_an_unknown_device_is_named() -> None:
    with pytest.raises(UsageError, match=r"(?s)the method asks 'device-99', which is no device.*as 'device-00'"):
        fc.simulate(Elsewhere(), fleet=digits(3), rounds=1)


@pytest.mark.parametrize("server", [{"privacy_noise": 1.0}, {"reduce": "median"}])
def test_noise_and_robust_rules_that_a_round_of_ones_own_may_ignore_are_refused(
    server: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Own(local_steps=1, server=fc.ServerOptions(**server))
    with pytest.raises(ConfigError, match=r"(?s)with Own, which has a `round` of its own.*applies_server_options"):
        fc.simulate(asked, fleet=digits(3), rounds=1)
    monkeypatch.setattr(Own, "returned", staticmethod(lambda after: after))
    monkeypatch.setattr(Own, "applies_server_options", True, raising=False)
    assert len(fc.simulate(asked, fleet=digits(3), rounds=1).history) == 1


def test_a_metric_of_ones_own_is_a_column_of_the_history() -> None:
    def right(y: Array, outputs: Array) -> float:
        return float((outputs.argmax(-1) == y).mean())

    result = fc.simulate(fc.FedEM(2, local_steps=STEPS), fleet=digits(), rounds=2, metrics={"right": right})
    assert list(result.history["right"]) == pytest.approx(list(result.history["accuracy"]))
    assert "right" in repr(result)


def pixels(layout: str) -> fc.Fleet:
    """Three devices whose pixels' labels say whether the pixel is above zero; one in five has none."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 1, 4, 4)).astype(np.float32)
    y = np.where(rng.random((60, 4, 4)) < 0.2, -100, x[:, 0] > 0)
    if layout == "tokens":
        x, y = x.reshape(60, 16, 1), y.reshape(60, 16)
    return fc.fleet({f"d{i}": (x[20 * i : 20 * i + 20], y[20 * i : 20 * i + 20]) for i in range(3)})


@pytest.mark.parametrize("layout", ["pixels", "tokens"])
def test_a_label_for_each_position_is_learned_and_counted(layout: str) -> None:
    model = nn.Conv2d(1, 2, 1) if layout == "pixels" else nn.Linear(1, 2)
    method = fc.FedAvg(local_steps=10, learning_rate=0.5)
    result = fc.simulate(method, fleet=pixels(layout), model=model, rounds=2)
    assert result.history["accuracy"].iloc[-1] > 0.95
    test = result.split.devices["d0"].test
    assert test is not None
    assert result.predict(test.x, center=0).shape == test.y.shape
    stacked = fc.simulate(method, fleet=pixels(layout), model=model, rounds=2, engine="stacked")
    np.testing.assert_allclose(stacked.run.state.centers, result.run.state.centers, atol=1e-4)  # float32's order


def test_a_run_with_labels_for_each_position_is_exported_saved_and_loaded_with_its_fleet(tmp_path: Path) -> None:
    result = fc.simulate(fc.FedAvg(local_steps=STEPS), fleet=pixels("pixels"), model=nn.Conv2d(1, 2, 1), rounds=1)
    card = result.export(tmp_path / "centers", formats=("onnx",)).manifest["centers"][0]["card"]
    labels = np.concatenate([device.train.y.ravel() for device in result.split.devices.values()])
    assert card["labels"]["counts"] == np.bincount(labels[labels >= 0]).tolist()
    result.save(tmp_path / "mine")
    assert fc.load(tmp_path / "mine", fleet=pixels("pixels")).assignments.equals(result.assignments)


def test_labels_for_each_position_need_a_model_with_a_row_of_outputs_for_each() -> None:
    with pytest.raises(UsageError, match="no model of ours gives so many"):
        fc.simulate(fc.FedAvg(), fleet=pixels("tokens"), rounds=1)
    with pytest.raises(UsageError, match="whose labels are of shape"):
        fc.simulate(fc.FedAvg(), fleet=pixels("tokens"), model=nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), rounds=1)


def test_a_loss_of_ones_own_trains_in_a_devices_own_runtime_as_in_torch() -> None:
    def smoothed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="none")

    method = fc.FedAvg(local_steps=STEPS)
    lean, onnx = (
        fc.simulate(method, fleet=digits(), rounds=1, loss=smoothed, model=own_net, engine=name)
        for name in ("lean", "onnx")
    )
    np.testing.assert_allclose(onnx.run.state.centers, lean.run.state.centers, atol=1e-5)  # float32's order


def test_targets_that_are_no_classes_have_a_squared_error_and_predictions() -> None:
    fleet = fc.fleets.regression(devices=3)
    method = fc.FedAvg(local_steps=STEPS, learning_rate=0.01)
    ours = fc.simulate(method, fleet=fleet, rounds=2)
    other = fc.simulate(method, fleet=fleet, rounds=2, loss=nn.HuberLoss(), model=lambda: nn.Linear(10, 1))
    assert ours.history["squared_error"].iloc[1] < ours.history["squared_error"].iloc[0]
    assert ours.history["accuracy"].isna().all()
    assert "squared_error" in repr(other)
    assert "accuracy" not in repr(other)
    test = other.split.devices["device-00"].test
    assert test is not None
    assert other.predict(test.x, center=0).shape == test.y.shape
    assert len(other.plot().axes) == 2


def test_the_options_are_those_of_the_commands_table() -> None:
    explicit = {"rounds", "seed", "workers", "out", "name", "model"}
    values = {"method", "data_set", "partition", "devices", "groups", "data", "data_seed"}  # of the method and fleet
    rows = {row.name for row in OPTIONS.values()} - {"broker"}  # fc.federation
    assert set(RunOptions.__annotations__) | explicit | values == rows


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"method": fc.FeSEM}, UsageError, r"FeSEM is a class.*write FeSEM\(\)"),
        ({"method": "fesem"}, UsageError, r"is no method.*class Mine\(fc.LocalSgd\)"),
        ({"fleet": "digits"}, ConfigError, "fc.fleets.digits"),
        ({"worker": 2}, UsageError, "did you mean 'workers'"),
        ({"devices": 3}, UsageError, r"a run has no option 'devices'.*fc.fleets.digits\(...\)"),
        ({"broker": "auto"}, UsageError, r"a run has no option 'broker'.*fc.federation\("),
        ({"learning_rate": 0.1}, UsageError, r"belongs to the method: FedAvg\(learning_rate=...\)"),
        ({"rounds": None}, UsageError, "rounds is None.*give a whole number"),
        ({"model": nn.Linear(64, 10)}, Exception, "does not take samples of shape"),
        ({"model": nn.Linear}, UsageError, r"'in_features'.*write its arguments: model=lambda: Linear\(...\)"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 4))}, UsageError, "4 outputs.*class 9"),
        ({"rounds": 0}, UsageError, "use at least 1"),
        ({"resume": True}, UsageError, 'out="runs"'),
        ({"metrics": {"bad": lambda y, outputs: "x"}}, UsageError, "metric bad gives str"),
        ({"metrics": ["f1"]}, UsageError, "metrics is list.*name functions"),
        ({"loss": "mse"}, UsageError, "loss is 'mse'.*give a function"),
        ({"loss": nn.CrossEntropyLoss}, UsageError, r"loss is CrossEntropyLoss.*CrossEntropyLoss\(\)"),
        ({"on_round": 3}, UsageError, "on_round is 3"),
        ({"out": 3}, UsageError, 'out is 3.*out="runs"'),
        ({"rounds": 2.5}, UsageError, "rounds is 2.5.*whole number"),
        ({"seed": -1}, UsageError, "seed is -1.*at least 0"),
        ({"seed": 2**63}, UsageError, "seed is 9223372036854775808.*at most"),
        ({"name": "mine"}, UsageError, r"name is 'mine', and there is no folder.*out=.runs"),
        ({"metrics": {"round": lambda y, outputs: 1.0}}, UsageError, "a metric is called 'round'"),
        ({"workers": "2"}, UsageError, "workers is '2'"),
        ({"model": "wecfl-cnn"}, UsageError, r"device-00 cannot train wecfl-cnn: x has samples of shape \[1, 8, 8\]"),
        ({"resume": True, "out": "no-such-folder"}, ConfigError, "leave out `resume`, or give the run's own `out`"),
    ],
)
def test_an_error_names_what_was_wrong_and_what_to_write(wrong: dict[str, Any], error: type, said: str) -> None:
    asked: dict[str, Any] = {"method": fc.FedAvg(local_steps=1), "fleet": digits(3), "rounds": 1} | wrong
    with pytest.raises(error, match=f"(?s){said}"):
        fc.simulate(asked.pop("method"), **asked)


X = np.random.default_rng(0).random((60, 4), dtype=np.float32)
Y, WHO = np.arange(60) % 3, np.repeat(["anna", "ben", "cleo"], 20)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (Y + 1, r"3 outputs, and a device has a sample of class 3.*number the classes from 0"),
        (Y.astype(float), r"device anna cannot train Linear: y has targets of shape \[1\].*y.astype\(int\)"),
        (np.where(np.arange(60) == 7, 3, Y), "a device has a sample of class 3"),  # wherever it is held out
    ],
)
def test_labels_that_a_model_has_no_output_for_are_named_before_the_first_round(labels: Array, said: str) -> None:
    seen: list[object] = []
    for seed in range(3):
        with pytest.raises(UsageError, match=f"(?s){said}"):
            fc.simulate(
                fc.FedAvg(local_steps=1),
                fleet=fc.fleet((X, labels), by=WHO, seed=seed),
                model=nn.Linear(4, 3),
                on_round=seen.append,
            )
    assert seen == []


def test_samples_of_ones_own_have_a_model_where_none_is_given() -> None:
    fleet = fc.fleet((X, Y), by=WHO)
    result = fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, rounds=1)
    assert [tuple(value.shape) for value in result.centers[0].values()] == [(64, 4), (64,), (3, 64), (3,)]
    other = fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, rounds=1, seed=1)
    assert not np.array_equal(result.start, other.start)
    targets = fc.fleet((X, np.stack([X, X], axis=1)), by=WHO)
    shaped = fc.simulate(fc.FedAvg(local_steps=1), fleet=targets, rounds=1)
    assert shaped.predict(X[:5], center=0).shape == (5, 2, 4)
    assert fc.choose_k(fc.FeSEM(local_steps=1), fleet=fleet, ks=[1, 2], rounds=1).clusters in (1, 2)


def test_a_run_without_a_folder_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = fc.simulate(fc.FedAvg(local_steps=1), fleet=digits(3), rounds=1)
    assert [path.name for path in tmp_path.iterdir()] == [result.temporary.path.name] if result.temporary else False
    del result
    assert list(tmp_path.iterdir()) == []


class WordCounts(nn.Module):
    """Five tokens a sample, of a vocabulary of seven."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.out(self.words(x.long()).mean(1)))


def test_a_token_beyond_the_embedding_is_told_in_training_and_in_predictions() -> None:
    x = np.random.default_rng(0).integers(0, 7, size=(90, 5))
    asked: dict[str, Any] = {"model": WordCounts, "rounds": 1}
    result = fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleet((x, x[:, 0] % 2), by=np.arange(90) // 15), **asked)
    x[77, 0], said = 7, r"(?s)WordCounts cannot read these samples: .*below the size of its embedding"
    for predict in (lambda: result.predict(x, center=0), lambda: result.nearest(x)):
        with pytest.raises(UsageError, match=said):
            predict()
    fleet = fc.fleet((x, x[:, 0] % 2), by=np.arange(90) // 15)
    for workers in (1, 2):  # of worker processes it was called a failure, with a traceback
        with pytest.raises(UsageError, match=said):
            fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, workers=workers, **asked)
