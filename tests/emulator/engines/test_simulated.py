"""A whole run with torch itself ends as one with a device's runtime, and as one in several processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from coordinator.strategies.fesem import FeSEM
from edge_client.errors import UsageError
from emulator.options import SimulateArgs
from emulator.run.execute import SimulationResult, run_simulation
from emulator.run.load import make_fleet, open_devices
from emulator.run.settings import RunSettings
from emulator.simulate import simulate_json


def assignments(engine: str, out: Path) -> tuple[list[dict[str, int]], list[float]]:
    args = SimulateArgs(method="fesem", devices=12, rounds=2, engine=engine, out=out, name=engine)
    simulate_json(args)
    lines = [json.loads(line) for line in (out / engine / "metrics.jsonl").read_text().splitlines()]
    assert f'engine = "{engine}"' in (out / engine / "config.toml").read_text()
    return [line["assignment"] for line in lines], [line["accuracy"]["micro"] for line in lines]


def test_the_groups_and_the_accuracy_are_those_of_a_devices_runtime(tmp_path: Path) -> None:
    assert assignments("lean", tmp_path) == assignments("onnx", tmp_path)


def simulated(model: str, workers: int) -> SimulationResult:
    args, split = make_fleet(SimulateArgs(devices=4, data_set="digits", model=model))
    method = FeSEM(clusters=2, local_steps=3, batch_size=16)
    with open_devices(args.model, split, seed=0, batch=16, workers=workers) as (devices, start):
        return run_simulation(method, start, devices, RunSettings(rounds=2, seed=0, batch=16))


@pytest.mark.parametrize("model", ["digits-mlp", "tests.emulator.engines.test_simulated:small_cnn"])
def test_two_workers_give_the_same_bits_as_one_process(model: str) -> None:
    one, other = simulated(model, 1), simulated(model, 2)
    np.testing.assert_array_equal(one.state.centers, other.state.centers)
    assert one.records == other.records


def small_cnn() -> object:
    """For 8 x 8 digits, with what makes bits depend on a state: batch norm's statistics, and dropout."""
    from torch import nn

    from coordinator.models.registry import ModelEntry

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    return ModelEntry(make=make, input=(1, 8, 8), classes=10)


def test_an_engine_that_there_is_not_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown engine 'caffe'"):
        simulate_json(SimulateArgs(engine="caffe", out=tmp_path))
    assert list(tmp_path.iterdir()) == []
