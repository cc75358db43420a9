from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coordinator.rounds.metrics import ari
from coordinator.strategies.base import Exchange, State, drive
from coordinator.strategies.clove import CLoVE
from coordinator.strategies.ifca import IFCA
from edge_client.protocol.task import Array, Probe, Reply
from tests.support.softmax_program import grouped_fleet, play, schema

NINE = [f"d{i}" for i in range(9)]
FAR = np.repeat([[0.0], [10.0], [20.0]], schema().size, axis=1)


def chosen(losses: dict[str, Array], *, method: CLoVE | IFCA | None = None) -> dict[str, int]:
    return (method or CLoVE(clusters=3)).choose(
        {c: Reply(n=10, losses=v) for c, v in losses.items()}, np.random.default_rng(0)
    )


def three_groups(*, best: int | None = None) -> dict[str, Array]:
    """Losses of three groups of three devices at three centers; center `best` is the best of all for each group."""
    patterns = np.array([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0], [2.0, 3.0, 1.0]])
    if best is not None:
        patterns[:, best] = [0.5, 0.6, 0.7]
    noise = np.random.default_rng(1).normal(scale=0.02, size=(9, 3))
    return {c: patterns[i % 3] + noise[i] for i, c in enumerate(NINE)}


def test_groups_come_apart_though_one_center_is_best_for_all_where_ifca_gives_it_all_of_them() -> None:
    losses = three_groups(best=1)
    assert set(chosen(losses, method=IFCA(clusters=3)).values()) == {1}
    found = chosen(losses)
    assert ari([found[c] for c in NINE], [i % 3 for i in range(9)]) == 1.0
    assert set(found.values()) == {0, 1, 2}


def test_the_centers_of_the_groups_are_those_of_the_least_total_loss_one_to_one() -> None:
    losses = {"a": np.array([1.0, 2.0, 9.0]), "b": np.array([1.1, 9.0, 9.0]), "c": np.array([9.0, 9.0, 9.0])}
    # a and b both fit center 0 best; a loses 1.0 by giving way, b 7.9
    assert chosen(losses, method=CLoVE(clusters=3, cap=1.0)) == {"a": 1, "b": 0, "c": 2}


def test_one_lie_takes_no_center_from_the_groups_unless_nothing_is_capped() -> None:
    fleet = {f"{c}{copy}": v for copy in range(4) for c, v in three_groups().items()}
    honest = [(who, int(who[1]) % 3) for who in fleet]
    for lie in ([1e30, 1e30, 1e30], [np.nan, np.inf, 0.0], [-1e30, 1e30, 0.0]):
        told = chosen({**fleet, "liar": np.array(lie)})
        assert ari([told[who] for who, _ in honest], [group for _, group in honest]) == 1.0, lie
    torn = chosen({**fleet, "liar": np.full(3, 1e3)}, method=CLoVE(clusters=3, cap=1.0))
    assert len({torn[who] for who, _ in honest}) == 2


def many_groups(k: int, *, each: int = 3) -> dict[str, Array]:
    """Each group fits one center, and all others alike badly; device i is of group i mod k."""
    rng = np.random.default_rng(0)
    patterns = np.where(np.eye(k, dtype=np.bool_), 0.3, 3.0)
    return {f"d{i:02d}": patterns[i % k] + 0.05 * rng.standard_normal(k) for i in range(each * k)}


LIES: dict[str, Callable[[int], Array]] = {
    "great": lambda k: np.full(k, 1.7e308),
    "none finite": lambda k: np.full(k, np.nan),
    "fits all": lambda k: np.full(k, 0.0),
    "fits all too well": lambda k: np.full(k, -1.7e308),
    "fits one too well": lambda k: np.array([-1.7e308] + [0.0] * (k - 1)),
}


@pytest.mark.parametrize("k", [2, 3, 10, 12, 16])
@pytest.mark.parametrize("lie", ["", *LIES])
def test_each_of_many_centers_has_its_group_though_one_device_lies(k: int, lie: str) -> None:
    """Of all losses a k-th are those at a device's own center: above ten centers fewer than a tenth."""
    honest = many_groups(k)
    told = chosen({**honest, **({"liar": LIES[lie](k)} if lie else {})}, method=CLoVE(clusters=k))
    assert [told[who] for who in honest] == [i % k for i in range(len(honest))]


def test_a_group_of_one_device_in_thirty_has_its_center() -> None:
    own = np.array([0.3, 3.0])
    noise = np.random.default_rng(0).normal(scale=0.05, size=(30, 2))
    told = chosen(
        {f"d{i:02d}": (own[::-1] if i == 29 else own) + noise[i] for i in range(30)}, method=CLoVE(clusters=2)
    )
    assert [told[who] for who in sorted(told)] == [0] * 29 + [1]


def test_fewer_devices_than_centers_and_losses_that_are_not_numbers_are_taken() -> None:
    assert chosen({}) == {}
    assert chosen({"a": np.array([3.0, 1.0, 2.0])}) == {"a": 1}
    assert len(chosen({c: np.full(3, np.nan) for c in "abcd"})) == 4


def test_a_round_averages_by_samples_and_moves_nobody_who_told_no_losses() -> None:
    losses = {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([1.0, 2.0, 3.0]), "c": np.array([3.0, 1.0, 2.0])}
    models = {"a": FAR[0] + 1, "b": FAR[0] + 2, "c": FAR[1] + 3}

    def ask(exchange: Exchange) -> dict[str, Reply]:
        if all(isinstance(task, Probe) for task in exchange.values()):
            return {c: Reply(n=10, losses=v) for c, v in losses.items()}
        return {c: Reply(n=10 + 20 * (c == "b"), update=v) for c, v in models.items()}

    state = State(centers=FAR, assignment={"away": 2})
    round_ = CLoVE(clusters=3).round(state, schema(), dict.fromkeys("abcd", 10), np.random.default_rng(0))
    after = drive(round_, ask)
    np.testing.assert_allclose(after.centers[:, 0], [1.75, 13.0, 20.0])
    assert after.assignment == {"a": 0, "b": 0, "c": 1, "away": 2}


@pytest.mark.parametrize("start", ["redraw", "groups"])
def test_it_finds_the_groups_of_a_fleet(start: str) -> None:
    local = grouped_fleet(9, 3)
    method = CLoVE(clusters=3, start=start, batch_size=8)
    after = play(method, local, rounds=6)
    assert ari([after.assignment[c] for c in sorted(local)], [i % 3 for i in range(9)]) == 1.0
