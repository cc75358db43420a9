"""A coordinator that is killed continues, and a simulation ends where the network ends."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from coordinator.local_broker import start_broker
from coordinator.rounds.metrics import ari
from emulator.options import SimulateArgs
from emulator.simulate import simulate_json
from emulator.testbed.processes import ChildProcesses, DeferredSignals
from tests.support import process_fleet
from tests.support.process_fleet import FleetScene


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> FleetScene:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("calm")
    with start_broker(folder / "broker") as broker:
        return process_fleet.play_undisturbed(folder / "run", broker.url)


def test_the_undisturbed_run_finds_the_groups(undisturbed: FleetScene) -> None:
    assert len(undisturbed.assignments()) == process_fleet.ROUNDS
    last = sorted(undisturbed.assignments()[-1].items())
    assert ari([int(device[-2:]) % 3 for device, _ in last], [center for _, center in last]) == 1.0


def test_a_coordinator_killed_in_the_middle_of_a_round_ends_with_the_same_centers(
    undisturbed: FleetScene, tmp_path: Path
) -> None:
    with (
        start_broker(tmp_path / "broker") as broker,
        DeferredSignals() as signals,
        ChildProcesses(tmp_path / "logs", signals) as children,
    ):
        disturbed = FleetScene(tmp_path / "run", broker.url, children)
        coordinator = disturbed.start_coordinator()
        _, slow = disturbed.start_devices(2)
        disturbed.wait_for("round")
        slow.process.send_signal(
            signal.SIGSTOP
        )  # its three devices fall silent: soon an exchange cannot close any more
        process_fleet.until(
            lambda: disturbed.replies_of_the_open_exchange() >= process_fleet.DEVICES // 2,
            children,
            "half of the replies",
        )
        children.kill(coordinator)
        assert len(disturbed.of("round")) < process_fleet.ROUNDS
        disturbed.start_coordinator()
        slow.process.send_signal(signal.SIGCONT)
        disturbed.wait_for("bundle")
        children.wait_for_exit(children.running)
    assert [event["epoch"] for event in disturbed.of("start")] == [1, 2]
    assert [event["round"] for event in disturbed.of("round")] == list(range(1, process_fleet.ROUNDS + 1))
    assert disturbed.assignments() == undisturbed.assignments()
    for found, expected in zip(disturbed.centers(), undisturbed.centers(), strict=True):
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])


def test_a_simulation_with_the_same_seed_ends_with_the_same_assignments_and_centers(
    undisturbed: FleetScene, tmp_path: Path
) -> None:
    asked = SimulateArgs(
        method="fesem",
        devices=process_fleet.DEVICES,
        rounds=process_fleet.ROUNDS,
        seed=process_fleet.SEED,
        engine="onnx",
        settings=dict(process_fleet.SETTINGS),
        out=tmp_path,
    )
    folder = Path(simulate_json(asked)["run"])
    rounds = [event for event in process_fleet.jsonl(folder / "metrics.jsonl") if event["event"] == "round"]
    assert [event["assignment"] for event in rounds] == undisturbed.assignments()
    for found, expected in zip(process_fleet.centers_in(folder), undisturbed.centers(), strict=True):
        for name in expected:
            # Both sides train with ONNX Runtime in float32; only the order of a sum may differ.
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
