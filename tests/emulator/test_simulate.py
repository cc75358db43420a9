from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from coordinator.rounds.metrics import ari, last_rounds
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.fesem import FeSEM
from edge_client.errors import UsageError
from emulator.options import SimulateArgs
from emulator.run.execute import SimulationResult, run_simulation
from emulator.run.load import load_fleet, make_fleet, open_devices
from emulator.run.resolve import resolve_run
from emulator.run.settings import RunSettings
from emulator.run.summary import Record
from emulator.simulate import simulate_json
from emulator.simulation.device_profiles import DEVICE_PROFILES
from tests.support.softmax_program import devices_of, grouped_fleet, play, start_of

LOCAL = grouped_fleet(6, 3)
GROUPS = {c: i % 3 for i, c in enumerate(sorted(LOCAL))}


def simulated(method: FedAvg | FeSEM, rounds: int = 4) -> SimulationResult:
    return run_simulation(method, start_of(), devices_of(LOCAL), RunSettings(rounds=rounds, seed=0, batch=8))


def test_virtual_time_changes_nothing_about_the_models() -> None:
    method = FeSEM(clusters=3, local_steps=4, batch_size=8)
    np.testing.assert_array_equal(simulated(method).state.centers, play(method, LOCAL, rounds=4).centers)


def test_centers_serve_groups_that_one_model_cannot() -> None:
    many, one = simulated(FeSEM(clusters=3, batch_size=8)), simulated(FedAvg(batch_size=8))
    assert [run.scores(GROUPS)["ari"] for run in (many, one)] == [1.0, 0.0]
    accuracies = [last_rounds(run.records, "accuracy", "micro")[-1] for run in (many, one)]
    assert accuracies[0] > accuracies[1] + 0.15


def test_each_round_is_recorded_with_its_bytes_and_seconds() -> None:
    result = simulated(FedAvg(local_steps=2, batch_size=8), rounds=3)
    assert [r["round"] for r in result.records] == [1, 2, 3]
    assert all(r["of"] == 3 and r["method"] == "fedavg" and r["bytes"]["up"] > 0 for r in result.records)
    assert sum(r["seconds"] for r in result.records) == pytest.approx(result.virtual_seconds)
    assert [r["local_steps"] for r in result.records] == [2 * 6] * 3


def test_real_seconds_stand_beside_the_simulated_ones_and_are_no_part_of_the_record() -> None:
    shown: list[Record] = []
    result = run_simulation(
        FedAvg(local_steps=2, batch_size=8), start_of(), devices_of(LOCAL), RunSettings(rounds=2, seed=0, batch=8),
        progress=shown.append,
    )  # fmt: skip
    assert len(result.real_seconds) == 2
    assert all("real_seconds" not in record for record in result.records)
    assert [{**r, "real_seconds": s} for r, s in zip(result.records, result.real_seconds, strict=True)] == shown
    assert [r["answered"] for r in shown] == [1.0, 1.0]


def test_the_same_seed_gives_the_same_records_of_a_fleet_that_comes_and_goes() -> None:
    kinds = tuple(replace(kind, availability=0.7, cycle_s=60.0, dropout=0.3) for kind in DEVICE_PROFILES)
    method = FedAvg(local_steps=2, batch_size=8)
    one, other, steady = (
        run_simulation(method, start_of(), devices_of(LOCAL), RunSettings(rounds=4, seed=3, batch=8, profiles=k))
        for k in (kinds, kinds, DEVICE_PROFILES)
    )
    assert one.records == other.records
    shares = [share for r in one.records if (share := r["answered"]) is not None]
    assert len(shares) == 4
    assert min(shares) < 1
    assert not np.array_equal(one.state.centers, steady.state.centers)


def test_a_file_of_profiles_and_seldom_tests_are_what_a_run_then_has(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    keys = {"step-ms": 20, "evaluate-ms": 8, "down-mbit": 16, "up-mbit": 8, "latency-ms": 50, "dropout": 1.0}
    path.write_text(tomli_w.dumps({"profiles": [{"name": "gone", **keys}]}))
    said = simulate_json(SimulateArgs(method="fedavg", rounds=2, profiles=path, evaluate_every=2, out=tmp_path))
    lines = [json.loads(line) for line in (Path(str(said["run"])) / "metrics.jsonl").read_text().splitlines()]
    assert [line["answered"] for line in lines] == [0.0, 0.0]
    assert [line["seconds"] for line in lines] == [600.0, 1200.0]  # a deadline for training, and one for the test
    assert all(line["real_seconds"] < line["seconds"] for line in lines)
    assert 'profiles = "' in (Path(str(said["run"])) / "config.toml").read_text()


def test_a_fleet_without_true_groups_has_no_score() -> None:
    result = run_simulation(FedAvg(batch_size=8), start_of(), devices_of(LOCAL), RunSettings(rounds=1, seed=0, batch=8))
    assert result.scores({}) == {"ari": None, "nmi": None, "purity": None}


def test_the_command_finds_the_groups_of_the_digits_and_leaves_a_readable_run(tmp_path: Path) -> None:
    seen: list[int] = []
    args = SimulateArgs(method="fesem", rounds=5, seed=1, settings={"clusters": "3"}, out=tmp_path, name="r")
    said = simulate_json(args, lambda record: seen.append(record["round"]))
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert (said["ari"], said["purity"], said["clusters"]) == (1.0, 1.0, 3)
    assert said["partition"] == "label-permutations:groups=3"
    assert said["accuracy"]["micro"] > 0.8
    assert seen == [1, 2, 3, 4, 5]
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    truth = {c: i % 3 for i, c in enumerate(sorted(lines[-1]["assignment"]))}
    assert ari(list(truth.values()), [lines[-1]["assignment"][c] for c in truth]) == 1.0
    config = (tmp_path / "r" / "config.toml").read_text()
    assert 'data-set = "digits"' in config
    assert "clusters = 3" in config
    fleet = json.loads((tmp_path / "r" / "fleet.json").read_text())["devices"]
    assert {who: held["group"] for who, held in fleet.items()} == truth
    assert sum(sum(held["labels"]) for held in fleet.values()) == 1139  # four fifths of 12 devices' samples
    centers = sorted((tmp_path / "r" / "centers" / "fesem").iterdir())
    assert [c.name for c in centers] == ["center-0.safetensors", "center-1.safetensors", "center-2.safetensors"]
    assert load_file(centers[0])["1.weight"].shape == (64, 64)
    assert Path(str(said["run"])) == tmp_path / "r"


def test_what_cannot_be_simulated_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for args in (
        SimulateArgs(method="nothing", out=tmp_path),
        SimulateArgs(data_set="letters", out=tmp_path),
        SimulateArgs(rounds=0, out=tmp_path),
        SimulateArgs(workers=0, out=tmp_path),
        SimulateArgs(workers=2, ray="auto", out=tmp_path),
        SimulateArgs(partition="rings", out=tmp_path),
        SimulateArgs(data_set="wisdm", out=tmp_path),
    ):
        with pytest.raises(UsageError):
            simulate_json(args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # compiles a model of its own; a table of regressions is in experiments/test_cells.py
def test_a_regression_runs_and_has_no_accuracy() -> None:
    asked, split = make_fleet(SimulateArgs(data_set="regression", devices=4))
    with open_devices(asked.model, split, seed=0, batch=10) as (devices, start):
        result = run_simulation(
            FedAvg(local_steps=20, batch_size=10), start, devices, RunSettings(rounds=2, seed=0, batch=10)
        )
        centers = [start, result.state.centers[0]]
        losses, _ = devices.learner.evaluate(centers, split.holdouts["domain 0"], batch=100)
    assert result.records[-1]["accuracy"] == {"micro": None, "macro": None}
    assert losses[1].mean() < 0.8 * losses[0].mean()


@pytest.mark.parametrize(
    ("devices", "told"), [(3, ["clusters is 4, with 3 devices: at least 1 center will have no device"]), (4, [])]
)
def test_more_centers_than_devices_are_told_on_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, devices: int, told: list[str]
) -> None:
    asked = SimulateArgs(
        engine="lean", devices=devices, rounds=1, out=tmp_path, settings={"clusters": 4, "local-steps": 1}
    )
    simulate_json(asked)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == told


@pytest.mark.parametrize(
    ("devices", "buffer", "told"),
    [(2, None, "as buffer = 1"), (10, None, "as buffer = 5"), (11, None, ""), (2, 2, "as buffer = 1"), (1, None, "")],
)
def test_a_buffer_that_waits_for_the_whole_fleet_is_told(
    caplog: pytest.LogCaptureFixture, devices: int, buffer: int | None, told: str
) -> None:
    """A run without rounds of a small fleet waited for its slowest device, without a word."""
    asked = SimulateArgs(method="fedavg", devices=devices, partition="iid", concurrency=1, buffer=buffer)
    load_fleet(resolve_run(asked))
    said = [message.partition("Give a smaller one, ")[2].partition(";")[0] for message in caplog.messages]
    assert said == ([told] if told else [])


class InterruptedBetweenRounds:
    """Hears what a run is busy with; raises KeyboardInterrupt before the nth line of `simulate_json` after round 1."""

    def __init__(self, nth: int) -> None:
        self._left, self.told, self.raised = nth, list[str](), False

    def hear(self, what: str) -> None:
        if what.startswith("round 1/"):
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame.f_code is not simulate_json.__code__:
                frame = frame.f_back
            assert frame is not None
            frame.f_trace = self._trace
            sys.settrace(lambda *_: None)

    def _trace(self, frame: FrameType, event: str, _value: Any) -> Any:  # noqa: ANN401 - see sys.settrace
        if event == "line" and "so_far" in frame.f_locals and len(frame.f_locals["so_far"].run.records) == 1:
            self._left -= 1
            if self._left == 0:
                self.raised = True
                raise KeyboardInterrupt
        return self._trace


def test_an_interrupt_between_two_rounds_is_told_with_what_is_kept(tmp_path: Path) -> None:
    """Between some lines nothing was told, and the folder of the unfinished run was written."""
    before = sys.gettrace()
    for nth in itertools.count(1):
        interrupt = InterruptedBetweenRounds(nth)
        asked = SimulateArgs(devices=3, rounds=2, out=tmp_path, name=f"run{nth}", settings={"local-steps": "1"})
        try:
            simulate_json(asked, say=interrupt.told.append, busy=interrupt.hear)
        except KeyboardInterrupt:
            assert interrupt.told[-1].startswith("interrupted; ")
        finally:
            sys.settrace(before)
        if not interrupt.raised:
            break
    assert nth > 2
