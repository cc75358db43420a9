"""A run that is interrupted goes on from its checkpoint, and ends with the same bits as one that was not."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.models.members import summed_name
from coordinator.rounds.round import EvaluationPlan
from coordinator.storage import state_codec
from coordinator.strategies.base import Fleet, Round, ServedModels, State
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.registry import METHODS, make_method, summed_members
from edge_client.errors import ConfigError
from edge_client.protocol.task import ClientId, Flat, OwnModel, Schema
from emulator.data.fleet_split import FleetData
from emulator.options import SimulateArgs
from emulator.run.execute import SimulationResult, run_simulation
from emulator.run.load import make_fleet, open_devices
from emulator.run.settings import RunSettings
from emulator.simulate import simulate_json
from emulator.simulation import checkpoint
from emulator.simulation.checkpoint import Checkpoints, read_checkpoint
from emulator.simulation.codec_channel import channel_factory
from emulator.simulation.emulated_devices import EmulatedDevices
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

BATCH, ROUNDS = 8, 4
OPEN: dict[str, Any] = {"seed": 0, "batch": BATCH, "engine": "lean"}
PHASES: dict[str, dict[str, Any]] = {  # what a method does in later rounds comes within four
    "cam": {"warm-up": 1},
    "cam-wecfl": {"warm-up": 1},
    "cfl": {"warm-up": 1, "eps-1": 1, "eps-2": 0, "gamma": 0},
    "fedcenters": {"trial-rounds": 3},
    "femam": {"level-rounds": 1},
    "flhc": {"warm-up": 2},
}
ASKED = SimulateArgs(engine="lean", devices=6, rounds=ROUNDS, checkpoint_every=2, settings={"local-steps": 2})


class ProcessEnded(Exception):
    """The process ends here."""


def after(number: int) -> Callable[[Mapping[str, Any]], None]:
    def tell(record: Mapping[str, Any]) -> None:
        if record["round"] == number:
            raise ProcessEnded

    return tell


@dataclass(frozen=True)
class Bench:
    """Six devices that are made anew for each run, around one learner."""

    devices: EmulatedDevices
    start: Flat
    split: FleetData

    def run(self, method: str, place: Path, *, rounds: int = ROUNDS, every: int = 2, **more: Any) -> SimulationResult:  # noqa: ANN401
        resume = more.pop("resume", False)
        settings = PHASES.get(method, {}) | ({} if method == "fedsgd" else {"local-steps": 2})
        fresh = EmulatedDevices(learner=self.devices.learner, local=self.devices.local)
        return run_simulation(
            make_method(method, **{"batch-size": BATCH, **settings}),
            self.start,
            fresh,
            RunSettings(rounds=rounds, seed=0, batch=BATCH, channel=channel_factory("i8")),
            checkpoints=Checkpoints(folder=place, every=every, resume=resume, fingerprint={"method": method}),
            **more,
        )


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    _, split = make_fleet(ASKED)
    with open_devices("digits-mlp", split, **OPEN) as (devices, start):
        yield Bench(devices, start, split)


def same(one: SimulationResult, other: SimulationResult) -> bool:
    points = [[(m.round, m.who, m.points.tobytes()) for m in result.kept.moments] for result in (one, other)]
    return (
        state_codec.encode_state(one.state) == state_codec.encode_state(other.state)
        and one.records == other.records
        and one.virtual_seconds == other.virtual_seconds
        and points[0] == points[1]
    )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_an_interrupted_run_ends_with_the_same_bits(method: str, bench: Bench, tmp_path: Path) -> None:
    with open_devices(summed_name("digits-mlp", summed_members(method)), bench.split, **OPEN) as (devices, start):
        there = Bench(devices, start, bench.split)
        expected = there.run(method, tmp_path / "whole")
        with pytest.raises(ProcessEnded):
            there.run(method, tmp_path / "cut", progress=after(3))
        heard: list[int] = []
        found = there.run(method, tmp_path / "cut", resume=True, progress=lambda record: heard.append(record["round"]))
    assert heard == [3, 4]
    assert same(found, expected)


@dataclass(frozen=True, kw_only=True, repr=False)
class OwnModelsLate(FedAvg):
    """From its third round on, a device is served the model that it trained before."""

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        late = int(state.extra.get("round", np.array(0))) > 2
        return ((1.0, OwnModel(init=state.centers[0]) if late else state.centers[0]),)

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        after = yield from super().round(state, schema, fleet, rng)
        return replace(after, extra={"round": np.array(int(state.extra.get("round", np.array(0))) + 1)})


def test_own_models_that_no_checkpoint_had_are_missed_and_not_replaced(bench: Bench, tmp_path: Path) -> None:
    """A device would else be served the first model, and the run would end with other numbers than without a stop."""
    method = OwnModelsLate(local_steps=2)

    def play(**more: Any) -> SimulationResult:  # noqa: ANN401
        checkpoints = Checkpoints(folder=tmp_path, every=1, resume=True, fingerprint={})
        devices = EmulatedDevices(learner=bench.devices.learner, local=bench.devices.local)
        return run_simulation(
            method, bench.start, devices, RunSettings(rounds=4, seed=0, batch=BATCH), checkpoints=checkpoints, **more
        )

    with pytest.raises(ProcessEnded):
        play(progress=after(2))
    with pytest.raises(ConfigError, match="own models 'main' are gone"):
        play()


@pytest.mark.parametrize("method", ["fedavg", "nonfed"])
def test_running_statistics_that_stay_on_devices_come_back(method: str, tmp_path: Path) -> None:
    local = grouped_fleet(4, 2)
    settings: dict[str, Any] = {"batch-size": BATCH, "local-steps": 2, "batch-norm": "local"}
    strategy = make_method(method, **settings)

    def play(place: Path, **more: Any) -> SimulationResult:  # noqa: ANN401
        checkpoints = Checkpoints(folder=place, every=2, resume=True, fingerprint={})
        settings = RunSettings(rounds=ROUNDS, seed=0, batch=BATCH)
        start, devices = start_of(buffered=True), devices_of(local, buffered=True)
        return run_simulation(strategy, start, devices, settings, checkpoints=checkpoints, **more)

    expected = play(tmp_path / "whole")
    with pytest.raises(ProcessEnded):
        play(tmp_path / "cut", progress=after(3))
    assert same(play(tmp_path / "cut"), expected)


@pytest.mark.parametrize(("method", "own"), [("pfedme", {}), ("fedsoft", {"local-start": "centers"})])
def test_own_models_that_a_later_evaluation_is_the_first_to_name_come_back(
    method: str, own: dict[str, Any], tmp_path: Path
) -> None:
    strategy = make_method(method, **{"batch-size": BATCH, "local-steps": 2, **own})
    settings = RunSettings(rounds=ROUNDS, seed=0, batch=BATCH, evaluation=EvaluationPlan(every=ROUNDS))

    def play(place: Path, **more: Any) -> SimulationResult:  # noqa: ANN401
        checkpoints = Checkpoints(folder=place, every=1, resume=True, fingerprint={})
        return run_simulation(
            strategy, start_of(), devices_of(grouped_fleet(4, 2)), settings, checkpoints=checkpoints, **more
        )

    expected = play(tmp_path / "whole")
    with pytest.raises(ProcessEnded):
        play(tmp_path / "cut", progress=after(3))
    assert same(play(tmp_path / "cut"), expected)


@dataclass(frozen=True, kw_only=True, repr=False)
class KnownDevicesOnly(FeSEM):
    """A user's: its first round asks the last devices alone, and it serves no device without a center."""

    def predictor(self, state: State, who: ClientId | None) -> ServedModels:
        return super().predictor(state, None) if who is None else ((1.0, state.centers[state.assignment[who]]),)

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        some = fleet if state.assignment else {who: fleet[who] for who in sorted(fleet)[-2:]}
        return (yield from super().round(state, schema, some, rng))


def test_a_device_without_a_center_is_served_by_no_method_before_an_evaluation_asks_it() -> None:
    settings = RunSettings(rounds=3, seed=0, batch=BATCH, evaluation=EvaluationPlan(every=3))
    devices = devices_of(grouped_fleet(4, 2))
    result = run_simulation(KnownDevicesOnly(2, local_steps=2), start_of(), devices, settings)
    assert len(result.records[-1]["per_device"]) == 4


def test_a_finished_run_goes_on_to_more_rounds(bench: Bench, tmp_path: Path) -> None:
    longer = bench.run("fesem", tmp_path / "whole", rounds=6)
    bench.run("fesem", tmp_path / "cut")
    found = bench.run("fesem", tmp_path / "cut", rounds=6, resume=True)
    assert np.array_equal(found.state.centers, longer.state.centers)
    assert [{**r, "of": 6} for r in found.records] == list(longer.records)


def test_without_resume_a_run_begins_anew_and_without_a_checkpoint_too(bench: Bench, tmp_path: Path) -> None:
    heard: list[int] = []
    for resume in (True, False):
        bench.run("fedavg", tmp_path, rounds=2, resume=resume, progress=lambda record: heard.append(record["round"]))
    assert heard == [1, 2, 1, 2]


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(bench: Bench, tmp_path: Path) -> None:
    bench.run("fedavg", tmp_path, rounds=2)
    with pytest.raises(ConfigError, match="made with method = 'fedavg', not 'fesem'"):
        bench.run("fesem", tmp_path, rounds=2, resume=True)


def test_a_broken_checkpoint_says_so(bench: Bench, tmp_path: Path) -> None:
    bench.run("fedavg", tmp_path, rounds=2)
    (tmp_path / "checkpoint" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        bench.run("fedavg", tmp_path, rounds=2, resume=True)


@pytest.mark.parametrize("kind", ["empty", "cut", "zeros"])
def test_a_damaged_file_of_a_checkpoint_is_told_and_never_resumed_from(bench: Bench, tmp_path: Path, kind: str) -> None:
    """An empty file of records lost the earlier rounds without a word; other files ended in what is told as a bug."""
    whole = tmp_path / "whole"
    bench.run("ditto", whole, rounds=2)
    files = [path.relative_to(whole) for path in sorted((whole / "checkpoint").rglob("*")) if path.is_file()]
    assert {"records.jsonl", "run.json", "state.safetensors", "own.npz"} <= {path.name for path in files}
    for file in files:
        shutil.copytree(whole, tmp_path / "cut", dirs_exist_ok=True)
        data = (whole / file).read_bytes()
        (tmp_path / "cut" / file).write_bytes(
            {"empty": b"", "cut": data[: len(data) // 2], "zeros": bytes(len(data))}[kind]
        )
        with pytest.raises(ConfigError, match=r"checkpoint cannot be read: .+[\s\S]*hint: delete that folder"):
            bench.run("ditto", tmp_path / "cut", rounds=3, resume=True)


def test_models_that_lived_with_workers_come_back_wherever_their_devices_live_now(tmp_path: Path) -> None:
    whole = replace(ASKED, method="ditto", out=tmp_path / "whole")
    cut = replace(whole, workers=2, out=tmp_path / "cut")
    expected = simulate_json(whole)
    with pytest.raises(ProcessEnded):
        simulate_json(cut, after(3))
    found = simulate_json(replace(cut, workers=1), resume=True)
    told = ("accuracy", "f1_of_devices", "ari", "virtual_seconds")
    assert [found[key] for key in told] == [expected[key] for key in told]


def test_a_killed_process_goes_on_from_its_own_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "emulator", "simulate"]
    options = ["-c", "checkpoint-every=1", "-c", "local-steps=2", "--engine", "lean", "--devices", "6"]
    more = ["--rounds", "2000", "--out", str(tmp_path)]
    with subprocess.Popen([*command, *options, *more], stderr=subprocess.PIPE, text=True) as running:
        for line in running.stderr or ():
            if "round 3/" in line:
                os.kill(running.pid, signal.SIGKILL)
                break
    (folder,) = tmp_path.iterdir()
    again = [*command, str(folder / "config.toml"), "--resume", "--rounds", "4"]
    done = subprocess.run(again, capture_output=True, text=True, check=True)
    assert re.search("going on after round [23]\n", done.stderr)  # the kill comes before or after the checkpoint of 3
    assert "round 4/4" in done.stderr
    assert "round 2/" not in done.stderr
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4


def test_other_settings_are_refused_before_the_devices_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(ASKED, out=tmp_path, rounds=2)
    simulate_json(asked)

    def opened(*_: object, **__: object) -> None:
        raise ProcessEnded

    monkeypatch.setattr("emulator.api.play.open_devices", opened)
    with pytest.raises(ConfigError, match="local-steps"):
        simulate_json(replace(asked, settings={"local-steps": 3}), resume=True)


def test_a_file_of_profiles_that_was_changed_is_another_run(tmp_path: Path) -> None:
    """Its options name the file, and half of the rounds would have other seconds and dropouts than the rest."""
    text = 'name = "a"\nstep-ms = 8\nevaluate-ms = 3\ndown-mbit = 40\nup-mbit = 12\nlatency-ms = 80\n'
    file = tmp_path / "profiles.toml"
    file.write_text(f"[[profiles]]\n{text}")
    asked = replace(ASKED, out=tmp_path, rounds=2, profiles=file)
    simulate_json(asked)
    file.write_text(f"[[profiles]]\n{text}dropout = 0.5\n")
    with pytest.raises(ConfigError, match="is of devices with other profiles"):
        simulate_json(replace(asked, rounds=3), resume=True)
    file.write_text(f"# a note\n[[profiles]]\n{text}")
    assert simulate_json(replace(asked, rounds=3), resume=True)["rounds"] == 3


def test_a_process_that_ends_twice_in_a_checkpoint_leaves_one(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two names the last one is called `.old`; the next process may end there, too."""
    bench.run("fedavg", tmp_path, rounds=2)
    rename = Path.rename

    def end(path: Path, target: Path) -> Path:
        if path.name == "checkpoint.new":
            raise ProcessEnded
        return rename(path, target)

    for _ in range(2):
        with monkeypatch.context() as broken:
            broken.setattr(Path, "rename", end)
            with pytest.raises(ProcessEnded):
                bench.run("fedavg", tmp_path, rounds=4, every=1, resume=True)
        assert not (tmp_path / "checkpoint").exists()
        assert (found := read_checkpoint(tmp_path)) is not None
        assert found[1].round == 2
    assert same(bench.run("fedavg", tmp_path, resume=True), bench.run("fedavg", tmp_path / "whole"))


def test_a_checkpoint_is_on_the_disk_before_the_last_one_is_gone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut would leave empty files under its name."""
    synced: list[tuple[set[str], bool]] = []

    def note(folder: Path) -> None:
        synced.append(({path.name for path in folder.iterdir()}, (tmp_path / "checkpoint").is_dir()))

    monkeypatch.setattr(checkpoint, "sync_files", note)
    bench.run("fedavg", tmp_path, rounds=2, every=1)
    assert [last for _, last in synced] == [False, True]
    assert all({"state.safetensors", "run.json", "records.jsonl", "heard", "lost"} <= names for names, _ in synced)
