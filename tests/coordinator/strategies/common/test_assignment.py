from __future__ import annotations

from collections import Counter

import numpy as np

from coordinator.strategies.common.assignment import choose_by_loss
from edge_client.protocol.task import Reply


def test_the_least_loss_chooses_equals_are_decided_by_lot_and_no_number_is_the_worst() -> None:
    tied = {f"d{i}": Reply(n=1, losses=np.array([1.0, 3.0, 1.0, np.nan])) for i in range(200)}
    counts = Counter(choose_by_loss(tied, np.random.default_rng(0)).values())
    assert set(counts) == {0, 2}
    assert min(counts.values()) > 60  # of 200: a fair coin falls below with probability 1e-8
    assert choose_by_loss(tied, np.random.default_rng(5)) == choose_by_loss(
        dict(reversed(tied.items())), np.random.default_rng(5)
    )
    mixed = {"b": Reply(n=1, losses=np.array([2.0, 1.0])), "c": Reply(n=1)}
    assert choose_by_loss(mixed, np.random.default_rng(0)) == {"b": 1}
