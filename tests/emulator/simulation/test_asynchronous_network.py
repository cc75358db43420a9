"""Runs in virtual time that wait for no device: beside rounds, interrupted, and with devices that are slow or away."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.asynchronous.options import Asynchronous
from coordinator.strategies.registry import Setting, make_method
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError, UsageError
from emulator.options import SimulateArgs
from emulator.run.execute import SimulationResult, run_simulation
from emulator.run.resolve import resolve_run
from emulator.run.settings import RunSettings
from emulator.simulation.attacks import AttackSpec
from emulator.simulation.checkpoint import Checkpoints
from emulator.simulation.codec_channel import channel_factory
from emulator.simulation.device_profiles import DeviceProfile, draw_profiles
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

GROUPED = grouped_fleet(12, 3)
EQUAL = {c: DeviceData(train=Dataset(d.train.x[:40], d.train.y[:40]), test=d.test) for c, d in GROUPED.items()}
USUAL = DeviceProfile(name="usual", step_s=0.1, evaluate_s=0.03, down_bytes_s=1e6, up_bytes_s=1e6, latency_s=0.1)
STRAGGLER = replace(USUAL, name="straggler", step_s=10.0, share=0.2)
AWAY = tuple(replace(kind, availability=0.7, cycle_s=60.0) for kind in (USUAL, STRAGGLER))
METHODS: Mapping[str, tuple[str, Mapping[str, Setting]]] = {
    "fedavg": ("fedavg", {}),
    "fedavg-momentum": ("fedavg", {"server-momentum": 0.5}),
    "fedprox": ("fedprox", {}),
    "fesem": ("fesem", {}),
    "fesem-by-loss": ("fesem", {"start": "loss", "least-members": 2}),
    "fesem-samples": ("fesem", {"weights": "samples", "hysteresis": 0.1}),
    "hypcluster": ("hypcluster", {}),
    "ifca": ("ifca", {}),
    "wecfl": ("wecfl", {"e-step": "nearest"}),
}


def run(method: str, local: Mapping[str, DeviceData] = EQUAL, **how: Any) -> SimulationResult:  # noqa: ANN401 - of RunSettings
    name, settings = METHODS[method]
    checkpoints, progress = how.pop("checkpoints", None), how.pop("progress", lambda _: None)
    given = {"rounds": 4, "seed": 0, "batch": 16, "profiles": (USUAL,), **how}
    strategy = make_method(name, **{"local-steps": 5, **settings})
    facts: dict[str, Any] = {"checkpoints": checkpoints, "progress": progress}
    return run_simulation(strategy, start_of(), devices_of(local), RunSettings(**given), **facts)


@pytest.mark.parametrize("method", METHODS)
def test_equal_devices_and_a_buffer_of_the_cohort_give_the_centers_of_rounds(method: str) -> None:
    """With one center to the last bit; with several up to the order in which a matrix product adds."""
    rounds, without = run(method), run(method, asynchronous=Asynchronous(concurrency=12, buffer=12))
    if len(rounds.state.centers) == 1:
        np.testing.assert_array_equal(rounds.state.centers, without.state.centers)
    else:
        np.testing.assert_allclose(rounds.state.centers, without.state.centers, rtol=1e-13, atol=1e-13)
    assert rounds.state.assignment == without.state.assignment
    assert [r["accuracy"] for r in rounds.records] == [r["accuracy"] for r in without.records]
    assert [r["bytes"] for r in rounds.records] == [r["bytes"] for r in without.records]
    assert [r["local_steps"] for r in rounds.records] == [r["local_steps"] for r in without.records]
    assert without.records[-1]["asynchronous"]["staleness"] == {"mean": 0.0, "most": 0}


@pytest.mark.parametrize("method", ["fedavg-momentum", "fesem", "ifca"])
@pytest.mark.parametrize("codec", ["f32", "i8"])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(method: str, codec: str, tmp_path: Path) -> None:
    def play(folder: Path, *, rounds: int, resume: bool = False) -> SimulationResult:
        return run(
            method,
            rounds=rounds,
            profiles=AWAY,
            channel=channel_factory(codec),
            asynchronous=Asynchronous(concurrency=6, buffer=4),
            checkpoints=Checkpoints(folder=folder, every=3, resume=resume, fingerprint={}),
        )

    whole = play(tmp_path / "whole", rounds=9)
    play(tmp_path / "parts", rounds=6)
    found = json.loads((tmp_path / "parts" / "checkpoint" / "run.json").read_text(encoding="utf-8"))
    assert found["network"]["asynchronous"]["at_work"]  # devices are at work while it is interrupted
    resumed = play(tmp_path / "parts", rounds=9, resume=True)
    np.testing.assert_array_equal(whole.state.centers, resumed.state.centers)
    assert whole.state.assignment == resumed.state.assignment
    assert list(whole.records)[6:] == list(resumed.records)[6:]
    assert whole.virtual_seconds == resumed.virtual_seconds


def test_a_run_that_was_interrupted_refuses_the_updates_that_it_would_have_refused(tmp_path: Path) -> None:
    """What is usual in a small buffer is known by the moves of the updates before it."""

    def play(folder: Path, *, rounds: int, resume: bool = False) -> SimulationResult:
        return run(
            "fedavg",
            rounds=rounds,
            profiles=AWAY,
            asynchronous=Asynchronous(concurrency=6, buffer=2),
            max_update_ratio=1.05,
            checkpoints=Checkpoints(folder=folder, every=1, resume=resume, fingerprint={}),
        )

    whole = play(tmp_path / "whole", rounds=12)
    play(tmp_path / "parts", rounds=2)
    resumed = play(tmp_path / "parts", rounds=12, resume=True)
    told = [record.get("refused", {}) for record in whole.records]
    assert any(told[2:])
    assert told == [record.get("refused", {}) for record in resumed.records]
    np.testing.assert_array_equal(whole.state.centers, resumed.state.centers)


@pytest.mark.parametrize("codec", ["f32", "i8"])
def test_when_checkpoints_are_written_changes_no_number(codec: str, tmp_path: Path) -> None:
    """What is under way is computed for a checkpoint; by default this machine's speed says when one is written."""
    spec = AttackSpec(attack="nan", share=0.25)
    lie = spec.make_attack(spec.attackers(EQUAL, 0), 0)
    never, always = (
        run(
            "fedavg",
            rounds=9,
            profiles=AWAY,
            attack=lie,
            channel=channel_factory(codec),
            asynchronous=Asynchronous(concurrency=6, buffer=4),
            checkpoints=Checkpoints(folder=tmp_path / str(every), every=every, resume=False, fingerprint={}),
        )
        for every in (0, 1)
    )
    assert list(never.records) == list(always.records)
    np.testing.assert_array_equal(never.state.centers, always.state.centers)


def test_when_checkpoints_are_written_changes_no_score_of_devices_with_their_own_statistics(tmp_path: Path) -> None:
    """A device at work is evaluated with the statistics of its task, whether a checkpoint computed them or not."""
    own: Mapping[str, Setting] = {"local-steps": 5, "batch-norm": "local"}
    strategy = make_method("fedavg", **own)
    kinds = (USUAL, replace(USUAL, name="slow", step_s=0.7), replace(USUAL, name="away", availability=0.7, cycle_s=9.0))
    plan = Asynchronous(concurrency=6, buffer=2)
    settings = RunSettings(rounds=8, seed=0, batch=16, profiles=kinds, asynchronous=plan)
    never, always = (
        run_simulation(
            strategy,
            start_of(buffered=True),
            devices_of(GROUPED, buffered=True),
            settings,
            checkpoints=Checkpoints(folder=tmp_path / str(every), every=every, resume=False, fingerprint={}),
        )
        for every in (0, 1)
    )
    assert list(never.records) == list(always.records)
    np.testing.assert_array_equal(never.state.centers, always.state.centers)


def test_a_straggler_holds_up_rounds_and_nobody_where_there_are_none() -> None:
    kinds = (USUAL, replace(STRAGGLER, share=0.3))
    rounds = run("fedavg", profiles=kinds)
    without = run("fedavg", profiles=kinds, rounds=8, asynchronous=Asynchronous(concurrency=6, buffer=3))
    assert rounds.virtual_seconds > 4 * 5 * STRAGGLER.step_s
    assert without.virtual_seconds < 5 * STRAGGLER.step_s
    assert without.records[-1]["asynchronous"]["versions"] == [8]


@pytest.mark.parametrize("buffer", [2, 4, 5])
@pytest.mark.parametrize("method", ["fesem", "ifca"])
def test_a_quick_device_that_is_alone_in_its_center_does_not_use_up_the_run(method: str, buffer: int) -> None:
    """It sends half of a round's updates, then waits for those that are at work; d01 is the quick one of seed 1."""
    kinds, rounds = (replace(USUAL, share=0.1), replace(STRAGGLER, step_s=100.0, share=0.9)), 12
    one, other = (list(grouped_fleet(24, 2).values())[group::2] for group in range(2))
    local = {f"d{i:02d}": other[0] if i == 1 else one[i] for i in range(12)}
    assert [who for who, kind in draw_profiles(local, 1, kinds).items() if kind.name == "usual"] == ["d01"]
    found = run(
        method, local, seed=1, rounds=rounds, profiles=kinds, asynchronous=Asynchronous(concurrency=12, buffer=buffer)
    )
    own = found.state.assignment["d01"]
    assert list(found.state.assignment.values()).count(own) == 1
    assert found.records[-1]["asynchronous"]["versions"][own] <= rounds * (buffer // 2)
    counted = sum(record["asynchronous"]["counted"] for record in found.records if "asynchronous" in record)
    assert counted >= (rounds - 1) * buffer


def test_devices_that_are_away_get_no_task_and_come_back() -> None:
    counted = run("fesem", profiles=AWAY, rounds=12, asynchronous=Asynchronous(concurrency=6, buffer=4))
    assert all(record["asynchronous"]["counted"] == 4 for record in list(counted.records)[1:])
    assert (counted.records[-1]["accuracy"]["micro"] or 0) > 0.9


def test_a_device_that_never_answers_is_given_up_after_the_deadline_and_the_run_ends() -> None:
    mute = (replace(USUAL, dropout=1.0),)
    quiet = run("fedavg", profiles=mute, rounds=2, deadline_s=30.0, asynchronous=Asynchronous(concurrency=6, buffer=4))
    assert [record["asynchronous"]["expired"] for record in quiet.records] == [12, 12]
    assert quiet.records[-1]["asynchronous"]["versions"] == [0]
    some = (replace(USUAL, dropout=0.3),)
    found = run("fedavg", profiles=some, rounds=6, deadline_s=30.0, asynchronous=Asynchronous(concurrency=6, buffer=4))
    assert found.records[-1]["asynchronous"]["versions"] == [6]


def test_an_update_that_is_refused_takes_no_place_in_a_buffer() -> None:
    spec = AttackSpec(attack="nan", share=0.25)
    liars = spec.attackers(EQUAL, 0)
    found = run("fedavg", attack=spec.make_attack(liars, 0), asynchronous=Asynchronous(concurrency=12, buffer=4))
    assert np.isfinite(found.state.centers).all()
    assert {who for record in found.records for who in record.get("refused", {})} == liars


def test_a_test_takes_none_of_the_time_of_the_training() -> None:
    slow = (replace(USUAL, evaluate_s=100.0),)
    found = run("fedavg", profiles=slow, asynchronous=Asynchronous(concurrency=12, buffer=12))
    assert found.virtual_seconds == run("fedavg", asynchronous=Asynchronous(concurrency=12, buffer=12)).virtual_seconds


def test_over_selection_closes_a_round_with_the_first_replies_that_it_wants() -> None:
    kinds = (USUAL, STRAGGLER)
    strategy = make_method("fedavg", **{"local-steps": 5, "fraction-train": 0.5})
    facts: dict[str, Any] = {"rounds": 3, "seed": 0, "batch": 16, "profiles": kinds}
    slow, quick = (
        run_simulation(strategy, start_of(), devices_of(EQUAL), RunSettings(**facts, over_select=share))
        for share in (1.0, 2.0)
    )
    assert quick.virtual_seconds < 5 * STRAGGLER.step_s < slow.virtual_seconds


def test_over_selection_loses_no_fits_to_the_losses_of_newcomers() -> None:
    """Newcomers tell losses, which are quick. They filled the goal, and rounds trained little or nothing."""
    strategy = make_method("fesem", **{"local-steps": 50, "fraction-train": 0.25, "clusters": 2})
    facts: dict[str, Any] = {"seed": 0, "batch": 16, "profiles": (USUAL,), "over_select": 2.0}
    one, two = (
        run_simulation(strategy, start_of(), devices_of(EQUAL), RunSettings(rounds=rounds, **facts)).state
        for rounds in (1, 2)
    )
    assert len(two.assignment) > len(one.assignment) == 3  # there were newcomers
    assert (two.centers != one.centers).any()


def test_options_that_need_each_other_are_asked_for_by_name() -> None:
    with pytest.raises(UsageError, match="buffer without concurrency"):
        resolve_run(SimulateArgs(buffer=5))
    with pytest.raises(ConfigError, match="concurrency with reduce median"):
        resolve_run(SimulateArgs(method="fedavg", concurrency=5, settings={"reduce": "median"}))
    chosen = resolve_run(SimulateArgs(method="fedavg", concurrency=5)).settings.asynchronous
    assert chosen == Asynchronous(concurrency=5, buffer=10, max_staleness=20)
