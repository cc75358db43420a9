from __future__ import annotations

from coordinator.rounds.metrics import ari
from coordinator.strategies.ifca import IFCA
from tests.support.softmax_program import grouped_fleet, play

LOCAL = grouped_fleet(9, 3)
TRUTH = [i % 3 for i in range(9)]


def test_known_groups_are_recovered_and_kept() -> None:
    method = IFCA(clusters=3, local_steps=10, batch_size=8)
    first, last = (play(method, LOCAL, rounds=r).assignment for r in (3, 6))
    assert ari(TRUTH, [last[c] for c in sorted(LOCAL)]) == 1.0
    assert first == last
