"""Measures of centers and devices made by hand: a center is one number, which it says of every sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from coordinator.models.registry import build_model
from coordinator.strategies.base import State
from coordinator.strategies.registry import make_method
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import Array, Flat, Probe, Reply
from emulator.data.fleet_split import FleetData
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.experiments.measures import MEASURES, FinishedRun
from emulator.run.execute import run_simulation
from emulator.run.load import open_devices
from emulator.run.settings import RunSettings
from emulator.simulation.emulated_devices import EmulatedDevices
from export.compiler.program import vector_of

LETTERS = {"lower": [0, 0, 0, 1], "upper": [1, 1, 0, 2]}
# Of the centers 0, 1 and 2 these are right for 75, 25 and 0 % of the lower case, and for 25, 50 and 25 % of the upper.
TARGETS = {"first": [[0.0], [0.0]], "second": [[3.0], [3.0]]}
# The centers 0 and 1 have errors of 0 and 1 on the first, and of 9 and 4 on the second.


class Saying:
    """A learner whose models say their own number."""

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[Array, Array]:
        said = np.array([model[0] for model in models])[:, None]
        logits = np.eye(3)[said.astype(int)] * np.ones((1, len(data), 1))
        return (said - data.y.reshape(1, -1)) ** 2, logits


def over(centers: Sequence[float], pure: Mapping[str, Any], devices: object = None) -> FinishedRun:
    """A finished run of FedAvg with these centers and pure distributions."""
    holdouts = {name: Dataset(np.zeros((len(y), 1)), np.array(y)) for name, y in pure.items()}
    result = SimpleNamespace(state=State(centers=np.array(centers, dtype=float)[:, None]))
    devices = devices or SimpleNamespace(learner=Saying())
    found = {"result": result, "devices": devices, "split": SimpleNamespace(holdouts=holdouts)}
    return FinishedRun(strategy=make_method("fedavg"), **cast("Any", found))


@pytest.mark.parametrize(("name", "percent"), [("best-lower", 75.0), ("best-upper", 50.0)])
def test_the_best_center_of_a_case_is_the_one_that_is_right_most_often(name: str, percent: float) -> None:
    assert MEASURES[name].values(over([0, 1, 2], LETTERS)) == [percent]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("own-error", (0 + 4) / 2),
        ("other-error", (1 + 9) / 2),
        ("least-error", 0),
        ("greatest-error", 9),
        ("spread-error", 100 * (1 / 0.5 + 5 / 6.5) / 2),  # greatest less least, as a share of the mean
    ],
)
def test_errors_of_centers_are_told_for_each_distribution(name: str, error: float) -> None:
    assert MEASURES[name].values(over([0, 1], TARGETS)) == [pytest.approx(error)]


def test_a_regression_has_no_accuracy() -> None:
    assert np.isnan(over([0, 1], TARGETS).holdouts[1]).all()


def test_local_accuracy_is_that_of_training_samples_and_counts_every_device_alike() -> None:
    def answers(tasks: Mapping[str, Probe]) -> Mapping[str, Reply | str]:
        assert {task.split for task in tasks.values()} == {"train"}
        right = {"a": np.diag([9, 0, 0]) + np.eye(3, k=1, dtype=int), "b": np.array([[0, 1, 0], [0, 1, 0], [0, 0, 0]])}
        return {who: Reply(n=1, confusion=right[who][None]) if who in right else "no_data" for who in tasks}

    devices = SimpleNamespace(fleet={"a": 11, "b": 2, "silent": 1}, answers=answers)
    # 9 of 11 and 1 of 2; who refuses counts for nothing.
    assert MEASURES["local-training"].values(over([0], {}, devices)) == [pytest.approx(100 * (9 / 11 + 1 / 2) / 2)]


def test_the_test_batchs_statistics_are_those_of_training_mode() -> None:
    model = build_model("wecfl-cnn", seed=3)
    rng = np.random.default_rng(0)
    local = {
        who: DeviceData(
            train=Dataset(rng.normal(size=(8, *model.input)).astype(np.float32), rng.integers(0, 10, 8)),
            test=Dataset(3 + 2 * rng.normal(size=(n, *model.input)).astype(np.float32), rng.integers(0, 10, n)),
        )
        for who, n in (("a", 40), ("b", 23))
    }
    devices = EmulatedDevices(learner=cpu_recipe(model).open(), local=local)
    vector = vector_of(model.module, devices.program.schema)
    result = SimpleNamespace(state=State(centers=vector[None]))
    found = {"result": result, "devices": devices, "split": SimpleNamespace(devices=local)}
    over = FinishedRun(strategy=make_method("fedavg"), **cast("Any", found))
    right, every = 0, 0
    for data in (local["a"].test, local["b"].test):
        assert data is not None
        with torch.no_grad():
            said = model.module.train()(torch.from_numpy(data.x)).argmax(1).numpy()
        right, every = right + int((said == data.y).sum()), every + len(data)
    assert MEASURES["accuracy-test-batch"].values(over) == [pytest.approx(100 * right / every)]
    assert 0 <= MEASURES["f1-test-batch"].values(over)[0] <= 100

    corrected = replace(over, strategy=make_method("fedavg", **{"label-prior": "device"}))
    assert MEASURES["accuracy-test-batch"].values(corrected) == []  # it would learn the labels that are judged


def test_the_figures_of_models_that_devices_keep_are_those_of_one_process_in_two() -> None:
    rng = np.random.default_rng(0)

    def drawn(n: int) -> Dataset:
        return Dataset(rng.normal(size=(n, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, n))

    split = FleetData(devices={who: DeviceData(train=drawn(8), test=drawn(40)) for who in "abc"})
    method = make_method("nonfed", **{"local-steps": 3, "batch-size": 4})
    found = []
    for workers in (1, 2):
        with open_devices("wecfl-cnn", split, seed=0, batch=4, engine="lean", workers=workers) as (devices, start):
            result = run_simulation(method, start, devices, RunSettings(rounds=1, seed=0, batch=4))
            over = FinishedRun(strategy=method, result=result, devices=devices, split=split)
            found.append([MEASURES[name].values(over) for name in ("accuracy-test-batch", "f1-test-batch")])
    assert found[0] == found[1]
    assert found[0][0][0] > 0


def test_a_model_without_batch_norm_has_no_figure_of_the_test_batchs_statistics() -> None:
    schema = SimpleNamespace(n_params=4, size=4)
    devices = SimpleNamespace(program=SimpleNamespace(schema=schema))
    assert MEASURES["accuracy-test-batch"].values(over([0], {}, devices)) == []
