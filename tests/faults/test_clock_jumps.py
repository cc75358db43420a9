"""Clocks that jump: a machine that slept, or was set right, by an hour or by ten years, in the middle of a round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.virtual_federation import Anything, Federation, Spy
from tests.support.virtual_time import VirtualClock

HOUR_S, TEN_YEARS_S = 3_600.0, 10 * 365.25 * 86_400
COORDINATOR, DEVICE = "coordinator.0", "d01"
MOMENTS = (10, 20, 30, 40)  # messages at the broker; an undisturbed run has some fifty


@dataclass
class JumpingClock:
    """The world's clock, and what it is off by."""

    world: VirtualClock
    slept_s: float = 0.0  # of the clock that only runs forward
    set_s: float = 0.0  # of the time of day

    def now_s(self) -> float:
        return self.world.now_s() + self.slept_s

    def unix_ms(self) -> int:
        return self.world.unix_ms() + int(1000 * self.set_s)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation.of(tmp_path_factory.mktemp("calm"), devices=3).play(3)


def jumped(folder: Path, who: str, *, slept_s: float = 0.0, set_s: float = 0.0, **changes: Anything) -> Federation:
    """A training in which the clock of `who` jumps at each of MOMENTS."""
    fed = Federation.of(folder, devices=3, **changes)
    clock = JumpingClock(fed.world.clock)
    fed.clocks[who] = clock
    spy = Spy(fed.world.broker)
    fed.start(3)
    for moment in MOMENTS:
        fed.world.run(lambda: len(spy.heard()) >= moment)  # noqa: B023 - used at once
        assert fed.catalog is None
        clock.slept_s += slept_s
        clock.set_s += set_s
    return fed.complete()


@pytest.mark.parametrize("who", [COORDINATOR, DEVICE])
@pytest.mark.parametrize("set_s", [HOUR_S, -HOUR_S, TEN_YEARS_S, -TEN_YEARS_S])
def test_a_time_of_day_that_is_set_changes_no_bit(tmp_path: Path, calm: Federation, who: str, set_s: float) -> None:
    assert jumped(tmp_path, who, set_s=set_s).outcome() == calm.outcome()


@pytest.mark.parametrize("slept_s", [HOUR_S, TEN_YEARS_S])
def test_the_time_in_which_a_coordinator_slept_is_not_taken_from_its_devices(
    tmp_path: Path, calm: Federation, slept_s: float
) -> None:
    assert jumped(tmp_path, COORDINATOR, slept_s=slept_s).outcome() == calm.outcome()


@pytest.mark.parametrize("slept_s", [HOUR_S, TEN_YEARS_S])
def test_a_device_that_slept_costs_at_most_its_own_answers(tmp_path: Path, slept_s: float) -> None:
    fed = jumped(tmp_path, DEVICE, slept_s=slept_s, quorum=0.6, deadline_s=60.0)
    rounds = fed.rounds()
    assert [record["round"] for record in rounds] == [1, 2]
    assert all({"d00", "d02"} <= record["per_device"].keys() for record in rounds)
    assert DEVICE in rounds[-1]["per_device"]
