from __future__ import annotations

import pytest

from coordinator.rounds.metrics import ari
from coordinator.strategies.similarity.flhc import FLHC
from tests.support.methods import build, world
from tests.support.softmax_program import grouped_fleet, play

LOCAL = grouped_fleet(9, 3)
TRUTH = [i % 3 for i in range(9)]
METHOD = FLHC(warm_up=2, local_steps=10, batch_size=8)


def test_groups_are_found_once_and_nobody_moves_afterwards() -> None:
    before, found, last = (play(METHOD, LOCAL, rounds=r) for r in (2, 3, 6))
    assert len(before.centers) == 1
    assert ari(TRUTH, [found.assignment[c] for c in sorted(LOCAL)]) == 1.0
    assert last.assignment == found.assignment


@pytest.mark.parametrize(("metric", "linkage"), [("l1", "complete"), ("l2", "ward"), ("cosine", "single")])
def test_any_metric_finds_clear_groups_below_its_own_threshold(metric: str, linkage: str) -> None:
    threshold = {"l1": 10.0, "l2": 3.0, "cosine": 1.0}[metric]
    method = FLHC(warm_up=0, local_steps=10, batch_size=8, metric=metric, linkage=linkage, threshold=threshold)
    state = play(method, LOCAL, rounds=2)
    assert ari(TRUTH, [state.assignment[c] for c in sorted(LOCAL)]) == 1.0


def test_the_whole_fleet_is_asked_once_to_be_clustered() -> None:
    played = world(build("flhc", {"warm-up": 1, "fraction-train": 0.4}), LOCAL)
    asked = []
    for _ in range(4):
        played.round()
        asked.append(len(played.exchanges[-2]))  # the exchange before the evaluation
    assert asked == [4, 9, 4, 4]
