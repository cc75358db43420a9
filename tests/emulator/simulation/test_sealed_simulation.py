"""A simulated run on sums: what its record says the server sees, its bytes, and options that cannot be combined."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import fedcenters as fc
from coordinator.rounds.round import EvaluationPlan
from coordinator.strategies.registry import Setting, make_method
from edge_client.errors import ConfigError, UsageError
from emulator.options import SimulateArgs
from emulator.run.execute import run_simulation
from emulator.run.resolve import resolve_run
from emulator.run.settings import RunSettings
from emulator.simulation.checkpoint import Checkpoints
from emulator.simulation.device_profiles import DEVICE_PROFILES
from emulator.testbed.monitor import format_milestone
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

SETTINGS = {"local-steps": 3, "secure-clip": 10.0, "clusters": 2}
LOCAL = grouped_fleet(12, 2)


@pytest.mark.parametrize(("secure", "blocks"), [("updates", 1), ("updates+membership", 2)])
def test_the_record_says_what_the_server_sees_and_bytes_are_those_of_the_words(secure: str, blocks: int) -> None:
    method = make_method("ifca", **SETTINGS, secure=secure, **{"secure-bits": 16})
    plan = RunSettings(rounds=3, seed=0, batch=16)
    record = run_simulation(method, start_of(), devices_of(LOCAL), plan).records[-1]
    assert record["secure"]["sees"].startswith("sums of 5 or more devices, and of each device its number of samples")
    assert ("which center it chose" in record["secure"]["sees"]) == (secure == "updates")
    assert record["per_device"] == {}
    # The choice: 2 words. The sums: parameters, weight and count for each block. The evaluation: 5 of 32 bits.
    words = 2 * 2 + 2 * blocks * (len(start_of()) + 2) + 4 * 5
    assert record["bytes"]["up"] == len(LOCAL) * words


@pytest.mark.parametrize("method", ["fedavg", "fesem", "ditto", "pfedme", "fedem"])
def test_the_scores_of_personal_models_and_mixtures_are_not_told_as_those_of_the_centers(method: str) -> None:
    settings: dict[str, Setting] = {"local-steps": 2, "secure": "updates", "secure-clip": 10.0}
    settings |= {"clusters": 2} if method in {"fesem", "fedem"} else {}
    made = make_method(method, **settings)
    found = fc.simulate(made, fleet=fc.fleets.digits(devices=6), rounds=2).summary()
    assert found["accuracy"]["micro"] is not None
    assert found["centers_accuracy"] == (
        found["accuracy"] if method in {"fedavg", "fesem"} else {"micro": None, "macro": None}
    )


def test_with_a_frozen_base_one_block_of_words_is_what_is_trained() -> None:
    """So K blocks that hide a device's center are short where only a head, or adapters, are trained."""

    def make() -> nn.Module:  # by the run's seed: with other weights a center may close
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32).requires_grad_(False), nn.ReLU(), nn.Linear(32, 10))  # noqa: FBT003 - torch's own

    method = make_method("fedem", **SETTINGS, secure="updates+membership")
    fleet = fc.fleets.digits(devices=10, groups=2)
    found = fc.simulate(method, fleet=fleet, model=make, rounds=2)
    trained = 32 * 10 + 10
    assert found.run.records[-1]["bytes"]["up"] == 10 * 4 * (2 + 2 * (trained + 2) + 5)  # counts, the evaluation's five


def test_a_resumed_run_ends_with_the_same_centers(tmp_path: Path) -> None:
    method = make_method("fesem", **SETTINGS, secure="updates+membership")
    whole = run_simulation(method, start_of(), devices_of(LOCAL), RunSettings(rounds=3, seed=0, batch=16))
    for rounds in (2, 3):
        kept = Checkpoints(folder=tmp_path, every=1, resume=rounds == 3, fingerprint={})
        plan = RunSettings(rounds=rounds, seed=0, batch=16)
        resumed = run_simulation(method, start_of(), devices_of(LOCAL), plan, checkpoints=kept)
    assert resumed.state.centers.tobytes() == whole.state.centers.tobytes()


@pytest.mark.parametrize(("method", "steps"), [("fedavg", 3), ("ifca", 3), ("fedem", 6), ("fesem", 3)])
def test_steps_and_seconds_are_those_of_the_same_run_in_the_clear(method: str, steps: int) -> None:
    """A device trains once for all sums of a round; before it chooses by loss it evaluates each center."""
    made: dict[str, Setting] = {"local-steps": 3} if method == "fedavg" else {"local-steps": 3, "clusters": 2}
    profile = replace(DEVICE_PROFILES[0], latency_s=0.0, down_bytes_s=1e30, up_bytes_s=1e30)
    plan = RunSettings(rounds=3, seed=0, batch=16, profiles=(profile,))
    hidden, clear = (
        run_simulation(make_method(method, **made, secure=secure), start_of(), devices_of(LOCAL), plan).records[1]
        for secure in ("updates", "off")
    )
    assert hidden["local_steps"] == clear["local_steps"] == steps * len(LOCAL)
    if method != "fesem":  # which in the clear chooses by the models, and after a start by loss by the losses
        assert hidden["seconds"] == pytest.approx(clear["seconds"])


def test_a_sum_of_too_few_devices_is_told_in_the_record_and_in_the_line_of_its_round() -> None:
    flaky = (replace(DEVICE_PROFILES[0], dropout=0.9),)
    plan = RunSettings(rounds=1, seed=0, batch=16, profiles=flaky)
    record = run_simulation(make_method("fedavg", secure="updates"), start_of(), devices_of(LOCAL), plan).records[-1]
    assert record["secure"]["failed"]
    line = format_milestone(record)
    assert re.search(r"not evaluated; no sum: \d devices? answered; at least 5 must$", line), line


@pytest.mark.parametrize(("option", "value"), [("codec", "i8"), ("hostile", "sign-flip:0.2")])
def test_options_that_work_on_single_updates_are_refused(option: str, value: str) -> None:
    args = SimulateArgs(method="fedavg", settings={"secure": "updates"}, **{option: value})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"secure with {option}") as refused:
        resolve_run(args)
    assert refused.value.hint


def test_a_fleet_below_least_members_is_refused_before_its_first_round() -> None:
    method = make_method("fedavg", secure="updates", **{"least-members": 13})
    with pytest.raises(ConfigError, match="the fleet has 12"):
        run_simulation(method, start_of(), devices_of(LOCAL), RunSettings(rounds=1, seed=0, batch=16))


@pytest.mark.parametrize(("method", "more"), [("fedavg", {}), ("fesem", {"clusters": 2})])
def test_a_cohort_below_least_members_is_refused_before_its_first_round(method: str, more: dict[str, int]) -> None:
    """Every sum of a center would be of too few devices, so no round would change a center."""
    few = make_method(method, **more, secure="updates", **{"fraction-train": 0.3})
    plan = RunSettings(rounds=1, seed=0, batch=16)
    with pytest.raises(ConfigError, match=r"a round asks 4 of 12 devices") as refused:
        run_simulation(few, start_of(), devices_of(LOCAL), plan)
    assert "set fraction-train to 0.417 or more" in (refused.value.hint or "")
    run_simulation(few, start_of(), devices_of(LOCAL), replace(plan, over_select=1.3))  # which asks five


def test_a_test_below_least_members_is_refused_where_one_comes_before_the_last() -> None:
    """Every test but the last told no accuracy, without a word."""
    method, plan = make_method("fedavg", secure="updates"), RunSettings(rounds=2, seed=0, batch=16)
    few = EvaluationPlan(fraction=0.3)
    with pytest.raises(ConfigError, match=r"a test asks 4 of 12 devices") as refused:
        run_simulation(method, start_of(), devices_of(LOCAL), replace(plan, evaluation=few))
    assert refused.value.hint == "set fraction-evaluate to 0.417 or more; or lower least-members"
    for evaluation in (replace(few, every=2), replace(few, fraction=0.417)):
        found = run_simulation(method, start_of(), devices_of(LOCAL), replace(plan, evaluation=evaluation))
        assert found.records[-1]["accuracy"]["micro"] is not None


def test_a_round_in_which_no_center_has_enough_devices_says_why_nothing_changed() -> None:
    method = make_method("ifca", **SETTINGS, secure="updates", **{"fraction-train": 0.42})
    found = run_simulation(method, start_of(), devices_of(LOCAL), RunSettings(rounds=6, seed=0, batch=16))
    told = [record["secure"].get("failed") for record in found.records[1:]]
    assert ["no center was chosen by 5 devices"] in told
    line = format_milestone(found.records[1 + told.index(["no center was chosen by 5 devices"])])
    assert "; no sum: no center was chosen by 5 devices" in line, line
