from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coordinator.rounds.metrics import ari
from coordinator.strategies.base import Replies
from coordinator.strategies.clove import CLoVE
from coordinator.strategies.common.assignment import choose_by_loss
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.ifca import IFCA
from edge_client.protocol.task import ClientId, Probe
from tests.support.softmax_program import grouped_fleet, play

LOCAL = grouped_fleet(9, 3)
TRUTH = [i % 3 for i in range(9)]


class ChoosesItself(IFCA):
    def choose(self, replies: Replies, rng: np.random.Generator) -> dict[ClientId, int]:
        return choose_by_loss(replies, rng)


def test_known_groups_are_recovered_and_kept() -> None:
    method = IFCA(clusters=3, local_steps=10, batch_size=8)
    first, last = (play(method, LOCAL, rounds=r).assignment for r in (3, 6))
    assert ari(TRUTH, [last[c] for c in sorted(LOCAL)]) == 1.0
    assert first == last


@pytest.mark.parametrize(("method", "least"), [(IFCA, True), (CLoVE, False), (ChoosesItself, False)])
def test_a_class_that_chooses_in_another_way_is_told_all_losses(
    method: type[IFCA],
    least: bool,  # noqa: FBT001 - pytest's
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[bool] = set()

    def listening(self: LocalSgd, *given: Any, **settings: Any) -> Probe:  # noqa: ANN401 - passed on
        probe = plain(self, *given, **settings)
        asked.add(probe.least)
        return probe

    plain = LocalSgd.probe_centers
    monkeypatch.setattr(LocalSgd, "probe_centers", listening)
    play(method(clusters=3, local_steps=2, batch_size=8), LOCAL, rounds=2)
    assert asked == {least}
