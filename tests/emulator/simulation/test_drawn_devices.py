"""A fleet whose samples are drawn when they are used: the numbers of a listed one, at a cost without its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.round import EvaluationPlan
from coordinator.storage.state_codec import encode_state
from coordinator.strategies.numbered_fleet import NumberedAssignment, NumberedFleet
from coordinator.strategies.registry import make_method
from edge_client.data.dataset import DeviceData
from emulator.run.execute import SimulationResult, run_simulation
from emulator.run.settings import RunSettings
from emulator.simulation.checkpoint import Checkpoints
from emulator.simulation.drawn_devices import DrawnDevices
from emulator.simulation.emulated_devices import EmulatedDevices
from tests.emulator.simulation.test_resume import ProcessEnded, after
from tests.support.softmax_program import devices_of, samples, start_of

BATCH, MILLION = 8, 1_000_000
METHODS: dict[str, dict[str, Any]] = {"fedavg": {}, "fesem": {}, "ifca": {"start": "redraw"}, "ditto": {}}


def drawn(number: int) -> DeviceData:
    rng = np.random.default_rng([7, number])
    written = (np.arange(4) + number % 3) % 4
    return DeviceData(train=samples(rng, 10 + number % 3, written=written), test=samples(rng, 5, written=written))


def fleet_of(count: int, **more: Any) -> DrawnDevices:  # noqa: ANN401
    return DrawnDevices(10 + np.arange(count) % 3, drawn, **more)


def play(method: str, devices: EmulatedDevices, *, share: float, rounds: int = 3, **more: Any) -> SimulationResult:  # noqa: ANN401
    settings = {"local-steps": 2, "batch-size": BATCH, "fraction-train": share, **METHODS[method]}
    evaluation = EvaluationPlan(fraction=share, last=share)
    how = RunSettings(rounds=rounds, seed=0, batch=BATCH, evaluation=evaluation)
    return run_simulation(make_method(method, **settings), start_of(), devices, how, **more)


def of(local: Any) -> EmulatedDevices:  # noqa: ANN401
    return EmulatedDevices(learner=devices_of({}).learner, local=local, wire=devices_of({}).wire)


@pytest.mark.parametrize("method", METHODS)
def test_drawn_devices_give_the_records_and_the_centers_of_listed_ones(method: str) -> None:
    fleet = fleet_of(40, held=3)
    one, other = play(method, of(fleet), share=0.3), play(method, of(dict(fleet)), share=0.3)
    assert one.records == other.records
    assert dict(one.state.assignment) == dict(other.state.assignment)
    np.testing.assert_array_equal(one.state.centers, other.state.centers)


@pytest.mark.parametrize("method", ["fedavg", "fesem"])
def test_a_run_of_drawn_devices_goes_on_with_the_same_bits(method: str, tmp_path: Path) -> None:
    def run(folder: str, **more: Any) -> SimulationResult:  # noqa: ANN401
        kept = Checkpoints(folder=tmp_path / folder, every=1, resume=True, fingerprint={})
        return play(method, of(fleet_of(40)), share=0.3, checkpoints=kept, **more)

    whole = run("whole")
    with pytest.raises(ProcessEnded):
        run("cut", progress=after(2))
    found = run("cut")
    assert encode_state(found.state) == encode_state(whole.state)
    assert found.records == whole.records


def test_own_models_of_drawn_devices_last_until_the_first_evaluation() -> None:
    settings = {"local-steps": 2, "batch-size": BATCH}
    how = RunSettings(rounds=3, seed=0, batch=BATCH, evaluation=EvaluationPlan(every=3))
    fleet = fleet_of(6)
    one, other = (
        run_simulation(make_method("pfedme", **settings), start_of(), of(local), how) for local in (fleet, dict(fleet))
    )
    assert one.records == other.records


def small(listed: Callable[[Any], Iterator[str]]) -> Callable[[Any], Iterator[str]]:
    """Refuses to list a million."""

    def checked(devices: Any) -> Iterator[str]:  # noqa: ANN401
        assert len(devices) < MILLION, "the whole fleet is listed"
        return listed(devices)

    return checked


@pytest.mark.parametrize("method", ["fedavg", "fesem"])
def test_no_part_of_a_run_goes_through_a_million_devices(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (NumberedFleet, NumberedAssignment, DrawnDevices):
        monkeypatch.setattr(kind, "__iter__", small(kind.__iter__))
    seen: set[int] = set()

    def counted(number: int) -> DeviceData:
        seen.add(number)
        return drawn(number)

    devices = of(DrawnDevices(10 + np.arange(MILLION) % 3, counted))
    result = play(method, devices, share=20 / MILLION)
    assert len(seen) <= 3 * 2 * 20
    assert len(devices.own) <= 20
    assert max(len(record["assignment"]) for record in result.records) <= 60


def test_only_the_devices_that_were_used_last_stay_in_memory() -> None:
    count: list[int] = []

    def counted(number: int) -> DeviceData:
        count.append(number)
        return drawn(number)

    fleet = DrawnDevices(10 + np.arange(9) % 3, counted, held=2)
    assert fleet["device-1"] is fleet["device-1"]
    for who in ("device-2", "device-1", "device-3", "device-1", "device-2"):
        assert len(fleet[who].train) == fleet.fleet[who]
    assert count == [1, 2, 3, 2]
    with pytest.raises(KeyError):
        fleet["device-9"]
