"""Methods that leave something on the devices end over a real broker, with real processes, where a simulation ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.local_broker import start_broker
from coordinator.strategies.registry import make_method, method_settings
from emulator.options import SimulateArgs
from emulator.run.execute import SimulationResult, run_simulation
from emulator.run.load import make_fleet, open_devices
from emulator.run.settings import RunSettings
from tests.support import process_fleet
from tests.support.process_fleet import FleetScene

ROUNDS = 2
RUNS: Mapping[str, Mapping[str, Any]] = {
    "nonfed": {"local-steps": 5},  # models that never leave a device
    "fedem": {"local-steps": 5, "clusters": 2},  # responsibilities that never leave a device
    "fedsoft": {"local-steps": 5, "clusters": 2},  # models that a device resumes and the server sees
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> FleetScene:
    """All methods on one fleet, one after the other."""
    folder = tmp_path_factory.mktemp("kept")
    runs = [{**settings, "method": method, "num-rounds": ROUNDS} for method, settings in RUNS.items()]
    with start_broker(folder / "broker") as broker:
        return process_fleet.play_undisturbed(folder / "run", broker.url, runs=runs)


@pytest.fixture(scope="module")
def simulated() -> Mapping[str, SimulationResult]:
    """The same in one process, one compilation for all."""
    args, split = make_fleet(SimulateArgs(devices=process_fleet.DEVICES, seed=process_fleet.SEED))
    methods = {method: make_method(method, **settings) for method, settings in RUNS.items()}
    batch = int(method_settings(methods["nonfed"])["batch-size"])
    with open_devices(args.model, split, seed=process_fleet.SEED, batch=batch, engine="onnx") as (devices, start):
        return {
            method: run_simulation(
                strategy,
                start,
                replace(devices, own={}, posterior={}),
                RunSettings(rounds=ROUNDS, seed=process_fleet.SEED, batch=batch),
            )
            for method, strategy in methods.items()
        }


@pytest.mark.parametrize("method", RUNS)
def test_over_mqtt_every_round_ends_as_in_a_simulation(
    played: FleetScene, simulated: Mapping[str, SimulationResult], method: str
) -> None:
    expected = simulated[method]
    real = [event for event in played.of("round") if event["method"] == method]
    assert len(real) == len(expected.records) == ROUNDS
    for event, record in zip(real, expected.records, strict=True):
        assert event["per_device"] == record["per_device"]
        assert event["assignment"] == record["assignment"]
        assert len(event["per_device"]) == process_fleet.DEVICES
    for ours, theirs in zip(process_fleet.centers_in(played.folder, method), expected.state.centers, strict=True):
        for name, value in expected.schema.split(theirs).items():
            # Both sides train with ONNX Runtime in float32; only the order of a sum may differ.
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6)


def test_local_training_sends_up_no_model(played: FleetScene) -> None:
    """What six devices said in a round of NonFed weighs less than two of the six models that they trained."""
    model = sum(4 * value.size for value in process_fleet.centers_in(played.folder, "nonfed")[0].values())
    sent = [event["bytes"]["up"] for event in played.of("round") if event["method"] == "nonfed"]
    assert 0 < max(sent) < 2 * model
