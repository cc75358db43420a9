from __future__ import annotations

import numpy as np

from coordinator.rounds.metrics import ari
from coordinator.strategies.fedgroup import FedGroup
from edge_client.protocol.task import Fit
from tests.support.methods import world
from tests.support.softmax_program import grouped_fleet, play, start_of

LOCAL = grouped_fleet(9, 3)
TRUTH = [i % 3 for i in range(9)]
METHOD = FedGroup(clusters=3, local_steps=10, batch_size=8, first_steps=20)


def test_groups_are_found_by_the_first_updates_and_stay() -> None:
    first, last = (play(METHOD, LOCAL, rounds=r) for r in (1, 5))
    assert ari(TRUTH, [first.assignment[c] for c in sorted(LOCAL)]) == 1.0
    assert first.assignment == last.assignment


def test_the_cold_start_asks_so_many_devices_per_group_for_long_updates_of_the_common_model() -> None:
    played = world(FedGroup(clusters=3, per_group=2, first_steps=20, local_steps=4, batch_size=8), LOCAL)
    played.round()
    cold, late, cohort = played.exchanges[:3]
    assert (len(cold), len(late), len(cohort)) == (6, 3, 9)
    for task in [*cold.values(), *late.values()]:
        assert isinstance(task, Fit)
        assert task.steps == 20
        assert (np.asarray(task.start) == start_of()).all()
    played.round()
    assert [len(exchange) for exchange in played.exchanges[:-1]] == [9]
    assert ari(TRUTH, [played.state.assignment[c] for c in sorted(LOCAL)]) == 1.0


def test_groups_begin_at_the_common_model() -> None:
    played = world(METHOD, LOCAL)
    played.round()
    assert all((np.asarray(task.start) == start_of()).all() for task in played.exchanges[1].values())  # type: ignore[union-attr]


def test_a_device_that_missed_the_cold_start_joins_the_group_that_its_update_points_to() -> None:
    played = world(METHOD, LOCAL)
    for _ in range(2):
        played.round(silent=["d05"])
    assert "d05" not in played.state.assignment
    played.round()
    assert played.state.assignment["d05"] == played.state.assignment["d02"]


def test_a_cold_start_that_nobody_answers_is_tried_again() -> None:
    played = world(METHOD, LOCAL)
    played.round(silent=[*LOCAL])
    assert played.state.assignment == {}
    played.round()
    assert ari(TRUTH, [played.state.assignment[c] for c in sorted(LOCAL)]) == 1.0
