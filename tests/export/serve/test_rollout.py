"""A candidate is served to its share, stopped when its devices' reports are worse, and else becomes the stable one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.serve.rollout import (
    BET_SIZES,
    MAX_WAITING_REPORTS,
    SIGNIFICANCE,
    Rollout,
    RolloutEvidence,
    RolloutPlan,
    queue_position,
)

OLD, NEW, NEXT = "0" * 64, "1" * 64, "2" * 64
PLAN = RolloutPlan(share=0.3, pairs=200)
accuracies = st.floats(0, 1)


def offered(plan: RolloutPlan = PLAN) -> Rollout:
    return Rollout().offer(OLD, plan).offer(NEW, plan)


def simulated(
    rng: np.random.Generator, old: float, new: float, *, devices: int = 3_000, plan: RolloutPlan = PLAN
) -> Rollout:
    """Devices with accuracies around a mean report one after the other until it is decided."""
    rollout = offered(plan)
    for i in range(devices):
        device = f"d{i}"
        generation = rollout.generation_for(device, plan)
        assert generation is not None
        mean = new if generation == NEW else old
        rollout = rollout.add_report(device, generation, float(rng.beta(20 * mean, 20 * (1 - mean))), plan)
        if rollout.candidate is None:
            break
    return rollout


def test_every_device_gets_the_first_bundle() -> None:
    rollout = Rollout().offer(OLD, PLAN)
    assert {rollout.generation_for(f"d{i}", PLAN) for i in range(50)} == {OLD}


def test_a_new_bundle_is_for_its_share_and_the_same_devices_each_time() -> None:
    rollout = offered()
    canaries = {f"d{i}" for i in range(4_000) if rollout.generation_for(f"d{i}", PLAN) == NEW}
    # four standard deviations of a binomial share of 4,000 are 0.029
    assert len(canaries) / 4_000 == pytest.approx(PLAN.share, abs=0.03)
    assert canaries == {f"d{i}" for i in range(4_000) if rollout.generation_for(f"d{i}", PLAN) == NEW}
    assert rollout.generation_for(None, PLAN) == OLD


def test_the_stable_bundle_in_the_folder_again_ends_the_candidate_which_may_come_back_later() -> None:
    again = offered().offer(OLD, PLAN)
    assert again == Rollout(stable=OLD)
    assert again.offer(NEW, PLAN).candidate == NEW


def test_a_share_of_all_devices_ends_a_wait_for_reports_that_never_come() -> None:
    everywhere = RolloutPlan(share=1.0)
    assert offered().offer(NEW, everywhere) == Rollout(stable=NEW)


def test_a_larger_share_takes_more_devices_and_leaves_none_out() -> None:
    rollout = offered()
    for i in range(300):
        if rollout.generation_for(f"d{i}", RolloutPlan(share=0.1)) == NEW:
            assert rollout.generation_for(f"d{i}", RolloutPlan(share=0.5)) == NEW


def test_other_devices_come_first_with_the_next_bundle() -> None:
    first = {f"d{i}" for i in range(500) if queue_position(f"d{i}", NEW) < 0.1}
    second = {f"d{i}" for i in range(500) if queue_position(f"d{i}", NEXT) < 0.1}
    assert first != second


@pytest.mark.parametrize("seed", range(5))
def test_a_worse_bundle_is_stopped_and_not_offered_again(seed: int) -> None:
    rollout = simulated(np.random.default_rng(seed), 0.9, 0.6)
    assert (rollout.stable, rollout.candidate, rollout.withdrawn) == (OLD, None, (NEW,))
    assert rollout.offer(NEW, PLAN) == rollout
    assert rollout.offer(NEXT, PLAN).candidate == NEXT


@pytest.mark.parametrize(("old", "new"), [(0.8, 0.8), (0.7, 0.9)])
def test_a_bundle_that_is_as_good_becomes_everybodys(old: float, new: float) -> None:
    rollout = simulated(np.random.default_rng(0), old, new)
    assert (rollout.stable, rollout.candidate, rollout.withdrawn) == (NEW, None, ())


def test_an_equal_bundle_is_rarely_stopped_however_often_one_looks() -> None:
    rng = np.random.default_rng(1)
    stopped = sum(simulated(rng, 0.8, 0.8, devices=1_500).withdrawn != () for _ in range(100))
    # at most ALPHA of runs by Ville's inequality; 5 of 100 or more have a probability below 0.4 % even at that rate
    assert stopped < 5


@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.tuples(accuracies, accuracies), max_size=30))
def test_the_expected_evidence_never_grows_while_canaries_are_as_good(
    low: float, more: float, seen: list[tuple[float, float]]
) -> None:
    """After any history, over reports that are right or wrong with means a <= b: E's expectation is at most E."""
    a, b = min(low, more), max(low, more)
    evidence = RolloutEvidence()
    for y_a, y_b in seen:
        evidence = evidence.with_report(y_a, canary=False).with_report(y_b, canary=True)
    expected = 0.0
    for y_a in (0.0, 1.0):
        for y_b in (0.0, 1.0):
            chance = (a if y_a else 1 - a) * (b if y_b else 1 - b)
            expected += chance * evidence.with_report(y_a, canary=False).with_report(y_b, canary=True).e_value
    assert expected <= evidence.e_value * (1 + 1e-9)  # rounding of sums of logarithms


def test_a_device_counts_once_and_only_with_what_it_was_served() -> None:
    rollout = offered()
    device = next(f"d{i}" for i in range(99) if rollout.generation_for(f"d{i}", PLAN) == OLD)
    once = rollout.add_report(device, OLD, 0.5, PLAN)
    assert once != rollout
    assert once.add_report(device, OLD, 0.1, PLAN) is once
    assert rollout.add_report(device, NEW, 0.5, PLAN) is rollout
    assert rollout.add_report(device, NEXT, 0.5, PLAN) is rollout


def test_one_side_alone_fills_no_memory() -> None:
    rollout = offered()
    for i in range(2_000):
        rollout = rollout.add_report(f"d{i}", OLD, 0.5, PLAN)
    assert len(rollout.evidence.stable) == len(rollout.reporters) == MAX_WAITING_REPORTS


def test_with_a_share_of_one_no_device_waits() -> None:
    everybody = RolloutPlan(share=1.0)
    assert Rollout().offer(OLD, everybody).offer(NEW, everybody).stable == NEW


@given(st.lists(st.tuples(st.integers(0, 40), accuracies), max_size=40))
def test_a_rollout_survives_a_restart_at_any_moment(reports: list[tuple[int, float]]) -> None:
    rollout = offered()
    for i, accuracy in reports:
        served = rollout.generation_for(f"d{i}", PLAN)
        assert served is not None
        rollout = rollout.add_report(f"d{i}", served, accuracy, PLAN)
    assert Rollout.from_json(json.loads(json.dumps(rollout.to_json()))) == rollout


def test_no_bet_can_lose_everything() -> None:
    evidence = RolloutEvidence()
    for _ in range(200):
        evidence = evidence.with_report(0.0, canary=False).with_report(1.0, canary=True)
    assert 0 < evidence.e_value < 1
    assert max(BET_SIZES) < 1 < 1 / SIGNIFICANCE
