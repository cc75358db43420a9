from __future__ import annotations

import numpy as np
import pytest

from coordinator.strategies.base import Exchange, drive
from coordinator.strategies.baselines.feddane import FedDANE
from edge_client.protocol.task import Reply
from tests.support.softmax_program import grouped_fleet, schema, start_of

LOCAL = grouped_fleet(4, 2)
FLEET = {c: len(local.train) for c, local in LOCAL.items()}


@pytest.mark.parametrize("silent", [{0: set(FLEET)}, {1: set(FLEET)}])
def test_without_gradients_or_without_fits_the_center_stays(silent: dict[int, set[str]]) -> None:
    method, place = FedDANE(), iter(range(2))
    state = method.begin(start_of(), schema(), FLEET, np.random.default_rng(0))
    replies = {c: Reply(n=10, grad=start_of(), update=start_of() + 1) for c in FLEET}

    def ask(exchange: Exchange) -> dict[str, Reply]:
        quiet = silent.get(next(place), set())
        return {c: replies[c] for c in exchange if c not in quiet}

    after = drive(method.round(state, schema(), FLEET, np.random.default_rng(0)), ask)
    np.testing.assert_array_equal(after.centers[0], start_of())
