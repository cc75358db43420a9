from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.benches.fit import exponent
from tests.benches.turns import Turn, interleaved, timed


def contestants(took: dict[str, list[float]], order: list[str]) -> dict[str, Callable[[], Turn]]:
    """Each gives its next time and says that it was its turn."""

    def turn_of(name: str) -> Callable[[], Turn]:
        def turn() -> Turn:
            order.append(name)
            seconds = took[name].pop(0)
            return Turn(cpu_s=seconds, wall_s=2 * seconds)

        return turn

    return {name: turn_of(name) for name in took}


def test_contestants_take_turns_and_no_one_is_always_first() -> None:
    order: list[str] = []
    interleaved(contestants({"a": [1.0] * 3, "b": [1.0] * 3}, order), 2)
    assert order == ["a", "b", "a", "b", "b", "a"]


def test_the_median_counts_and_the_first_turn_does_not() -> None:
    took = interleaved(contestants({"a": [100.0, 1.0, 50.0, 2.0]}, []), 3)
    assert took["a"] == Turn(cpu_s=2.0, wall_s=4.0)


def test_a_timed_contestant_does_its_work_once_per_turn() -> None:
    done: list[int] = []
    turn = timed(lambda: done.append(1))
    assert turn().cpu_s >= 0
    assert done == [1]


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    points = tuple((size, 3 * size**power) for size in (10.0, 100.0, 1000.0))
    assert exponent(points) == pytest.approx(power, abs=1e-9)  # a straight line through exact points: rounding only
