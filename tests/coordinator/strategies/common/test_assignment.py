from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from coordinator.strategies.base import State
from coordinator.strategies.common.assignment import centers_of_newcomers, choose_by_loss, newcomers
from edge_client.protocol.task import Reply


@pytest.mark.parametrize(
    ("known", "centers", "new"),
    [({}, 3, []), ({"a": 0}, 3, ["b", "c"]), ({"a": 0}, 1, []), ({"a": 0}, 16, ["b", "c"]), ({"a": 0}, 17, [])],
)
def test_newcomers_are_asked_where_others_have_one_of_as_many_centers_as_a_probe_carries(
    known: dict[str, int], centers: int, new: list[str]
) -> None:
    assert newcomers(["a", "b", "c"], State(centers=np.zeros((centers, 2)), assignment=known)) == new


def test_a_newcomer_gets_the_center_of_its_least_loss_and_none_where_it_told_none() -> None:
    told = {"a": [2.0, np.nan, 1.0], "b": None, "c": [0.0, 1.0, 1.0]}
    replies = {c: Reply(n=1, losses=None if row is None else np.array(row)) for c, row in told.items()}
    assert centers_of_newcomers(["a", "b"], replies) == {"a": 2}


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
