from __future__ import annotations

from coordinator.rounds.metrics import ari
from coordinator.strategies.similarity.fedgroup import FedGroup
from tests.support.methods import world
from tests.support.softmax_program import grouped_fleet, play

LOCAL = grouped_fleet(9, 3)
TRUTH = [i % 3 for i in range(9)]
METHOD = FedGroup(clusters=3, local_steps=10, batch_size=8, first_steps=20)


def test_groups_are_found_by_the_first_updates_and_stay() -> None:
    first, last = (play(METHOD, LOCAL, rounds=r) for r in (1, 5))
    assert ari(TRUTH, [first.assignment[c] for c in sorted(LOCAL)]) == 1.0
    assert first.assignment == last.assignment


def test_a_cold_start_that_nobody_answers_is_tried_again() -> None:
    played = world(METHOD, LOCAL)
    played.round(silent=[*LOCAL])
    assert played.state.assignment == {}
    played.round()
    assert ari(TRUTH, [played.state.assignment[c] for c in sorted(LOCAL)]) == 1.0
