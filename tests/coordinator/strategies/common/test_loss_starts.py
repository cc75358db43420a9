from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coordinator.strategies.base import Exchange, Replies, State, drive
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.ifca import IFCA
from coordinator.strategies.wecfl import WeCFL
from tests.support.softmax_program import schema, start_of

FLEET = {f"d{i:02}": 40 for i in range(20)}


@pytest.mark.parametrize("method", [FeSEM, WeCFL, IFCA], ids=lambda kind: kind.__name__.lower())
def test_a_start_that_no_device_answered_is_made_in_the_next_round(method: Any) -> None:  # noqa: ANN401 - a class
    strategy = method(3, start="loss")
    first = strategy.begin(start_of(), schema(), FLEET, np.random.default_rng(0))
    after, asked = _silent_round(strategy, first)
    assert after.assignment == {}
    assert after.extra.keys() == first.extra.keys()
    _, again = _silent_round(strategy, after)
    assert (asked[0], again[0]) == (["start"] * 20, ["start"] * 20)


def _silent_round(strategy: Any, state: State) -> tuple[State, list[list[str]]]:  # noqa: ANN401 - any method
    """A round without answers, and the slots of the fits in each of its exchanges."""
    asked: list[list[str]] = []

    def silent(exchange: Exchange) -> Replies:
        asked.append([getattr(task, "slot", "") for task in exchange.values()])
        return {}

    return drive(strategy.round(state, schema(), FLEET, np.random.default_rng(1)), silent), asked
