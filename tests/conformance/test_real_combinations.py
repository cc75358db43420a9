"""Random combinations over a broker end as in one process, or are refused by name. `make combinations` tries many."""

from __future__ import annotations

from functools import partial

import pytest

from coordinator.local_broker import Broker
from tests.support.real_cases import draw_real
from tests.support.real_promises import judge_real
from tests.support.run_promises import GOOD, one_that_runs, verdict_of


@pytest.mark.broker
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [10, 38, 40, 56])
def test_a_random_combination_over_a_broker_ends_as_in_one_process_or_is_refused_by_name(
    seed: int, mosquitto: Broker
) -> None:
    judged = partial(verdict_of, partial(judge_real, mosquitto.url))
    for case, verdict, said in one_that_runs(draw_real(seed, most=2), seed, judged):
        assert verdict in GOOD, f"{case}: {said}"
