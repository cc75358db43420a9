"""Over-selection: a larger cohort, of which the wanted number counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from coordinator.rounds.over_selection import beside_fits, goal_of, has_updates, is_test, needs_all, with_over_selection
from coordinator.strategies.base import RequireAll
from coordinator.strategies.baselines.fedavg import FedAvg
from edge_client.protocol.task import Fit, Probe


@pytest.mark.parametrize(
    ("share", "fraction", "fleet", "asked", "wanted"),
    [(1.5, 0.1, 40, 0.15, 4), (1.3, 0.25, 10, 0.325, 3), (2.0, 0.75, 8, 1.0, 6)],
)
def test_more_are_asked_than_count_and_never_more_than_all(
    share: float, fraction: float, fleet: int, asked: float, wanted: int
) -> None:
    strategy, goal = with_over_selection(FedAvg(fraction_train=fraction), share, fleet)
    assert isinstance(strategy, FedAvg)
    assert strategy.fraction_train == pytest.approx(asked)
    assert goal == wanted


def test_without_over_selection_the_method_stays_as_it_is_and_all_replies_count() -> None:
    method = FedAvg(fraction_train=0.5)
    assert with_over_selection(method, 1.0, 10) == (method, None)


@dataclass(frozen=True, kw_only=True)
class Unsampled:
    """A method of a user's own that asks the whole fleet."""

    steps: int = 3


def test_a_method_without_a_fraction_asks_as_it_says_and_all_replies_count() -> None:
    method = cast("Any", Unsampled())
    assert with_over_selection(method, 1.3, 10) == (method, None)


def test_a_test_and_an_exchange_that_says_so_need_all_and_others_do_not() -> None:
    want = frozenset({"labels"})  # the probe that needs no model
    train, test = ({"a": Probe(models=(), want=want, batch=1, seed=0, split=part)} for part in ("train", "test"))
    assert (is_test(test), is_test(train), is_test({**train, "b": test["a"]}), is_test({})) == (
        True,
        False,
        True,
        False,
    )
    assert (needs_all(test), needs_all(train), needs_all(RequireAll(train))) == (True, False, True)


@pytest.mark.parametrize(
    ("fits", "probes", "wanted", "goal"),
    [(13, 0, 10, 10), (10, 3, 10, 8), (1, 12, 10, 1), (0, 13, 10, 10), (0, 0, 10, 10), (10, 3, None, None)],
)
def test_losses_beside_fits_do_not_count_for_the_goal(fits: int, probes: int, wanted: int | None, goal: int) -> None:
    """As many fits as their part of the cohort: quick losses of newcomers took the places of fits."""
    told = {f"new-{i}": Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0) for i in range(probes)}
    trained = {f"old-{i}": Fit(start=np.zeros(2), steps=1, lr=0.1, batch=1, seed=0) for i in range(fits)}
    asked: dict[str, Any] = {**told, **trained}
    assert goal_of(asked, wanted) == goal
    assert beside_fits(asked) == (told.keys() if fits else set())
    assert goal_of(RequireAll(asked), wanted) is None


def test_an_exchange_has_updates_where_a_fit_is_uploaded() -> None:
    fit = Fit(start=np.zeros(2), steps=1, lr=0.1, batch=1, seed=0)
    probe = Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0)
    kept = replace(fit, upload=False)
    asked: list[Any] = [{"a": probe, "b": fit}, {"a": probe, "b": kept}, {}]
    assert [has_updates(tasks) for tasks in asked] == [True, False, False]
