"""Methods that train one member of a sum after the other: a round without replies is no round of a phase."""

from __future__ import annotations

import pytest

from tests.support.methods import build, world
from tests.support.softmax_program import grouped_fleet

LOCAL = grouped_fleet(6, 2)


@pytest.mark.parametrize(("case", "key"), [("cam warm-up=1", "warm-up-rounds"), ("femam", "rounds-trained")])
def test_a_round_without_replies_takes_none_of_the_rounds_of_a_phase(case: str, key: str) -> None:
    fleet = world(build(case), LOCAL)
    begun = int(fleet.state.extra[key])
    fleet.round(silent=list(LOCAL))
    assert int(fleet.state.extra[key]) == begun
    fleet.round()
    assert abs(int(fleet.state.extra[key]) - begun) == 1
