from __future__ import annotations

from collections import Counter

import numpy as np

from coordinator.strategies.base import Exchange, Replies, drive
from coordinator.strategies.common.assignment import centers_of_newcomers, choose_by_loss
from edge_client.protocol.task import Probe, Reply


def placed(new: list[str], centers: int, told: dict[str, np.ndarray]) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    """The centers of the newcomers, and of each exchange the centers that were asked about."""
    models, asked = [np.array([float(k)]) for k in range(centers)], []

    def probe(among: slice) -> Probe:
        return Probe(models=models[among], want=frozenset({"loss"}), seed=0, batch=8, buffers="sent")

    def answer(exchange: Exchange) -> Replies:
        numbers = {tuple(int(np.asarray(m)[0]) for m in task.models) for task in exchange.values()}  # type: ignore[union-attr]
        (of,) = numbers
        asked.append(of)
        return {c: Reply(n=1, losses=told[c][list(of)]) for c in exchange if c in told and len(told[c]) > of[-1]}

    return drive(centers_of_newcomers(new, centers, probe), answer), asked


def test_newcomers_are_placed_by_their_losses_at_all_centers_of_which_a_probe_carries_sixteen() -> None:
    losses = np.arange(40.0, 0.0, -1.0)
    found, asked = placed(["a", "b", "c"], 40, {"a": losses, "b": losses[::-1], "c": losses[:20]})
    assert found == {"a": 39, "b": 0}  # c told only a part
    assert asked == [tuple(range(16)), tuple(range(16, 32)), tuple(range(32, 40))]


def test_newcomers_are_asked_nothing_where_there_are_none_or_one_center() -> None:
    assert placed([], 3, {}) == ({}, [])
    assert placed(["a"], 1, {}) == ({"a": 0}, [])
    found, asked = placed(["a"], 40, {})
    assert (found, len(asked)) == ({}, 1)


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
