from __future__ import annotations

import numpy as np
import pytest

from coordinator.strategies.base import Exchange, drive
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.baselines.fedavg_plus import FedAvgPlus, FedProxPlus
from coordinator.strategies.baselines.fedprox import FedProx
from edge_client.protocol.task import Fit, Reply
from tests.support.softmax_program import devices_of, grouped_fleet, schema, start_of

LOCAL = grouped_fleet(4, 2)
FLEET = {c: len(local.train) for c, local in LOCAL.items()}


def test_the_runs_have_different_starts_of_which_the_first_is_the_common_one() -> None:
    centers = FedAvgPlus(runs=4).begin(start_of(), schema(), FLEET, np.random.default_rng(0)).centers
    np.testing.assert_array_equal(centers[0], start_of())
    assert len(np.unique(centers, axis=0)) == 4


@pytest.mark.parametrize(("plus", "base"), [(FedAvgPlus, FedAvg), (FedProxPlus, FedProx)])
def test_every_run_is_the_base_method_from_its_own_start(plus: type[FedAvgPlus], base: type[FedAvg]) -> None:
    method, alone = (cls(local_steps=3, batch_size=1_000) for cls in (plus, base))  # full batches: no seed matters
    devices = devices_of(LOCAL)
    state = method.begin(start_of(), schema(), FLEET, np.random.default_rng(0))

    def ask(exchange: Exchange) -> dict[str, Reply]:
        assert all(isinstance(task, Fit) and (task.mu > 0) == (base is FedProx) for task in exchange.values())
        return {c: devices.answer(c, task) for c, task in exchange.items()}

    after = drive(method.round(state, schema(), FLEET, np.random.default_rng(1)), ask)
    for start, end in zip(state.centers, after.centers, strict=True):
        own = alone.begin(start, schema(), FLEET, np.random.default_rng(0))
        own = drive(alone.round(own, schema(), FLEET, np.random.default_rng(2)), ask)
        np.testing.assert_allclose(end, own.centers[0], rtol=1e-12)


def test_each_run_draws_its_own_cohort_in_its_own_exchange() -> None:
    method = FedAvgPlus(runs=6, fraction_train=0.5)
    cohorts = []

    def ask(exchange: Exchange) -> dict[str, Reply]:
        cohorts.append(frozenset(exchange))
        return {}

    state = method.begin(start_of(), schema(), FLEET, np.random.default_rng(0))
    drive(method.round(state, schema(), FLEET, np.random.default_rng(0)), ask)
    assert [len(c) for c in cohorts] == [2] * 6
    assert len(set(cohorts)) > 1


def test_everybody_is_served_the_soft_vote_of_all_runs() -> None:
    method = FedAvgPlus(runs=4)
    state = method.begin(start_of(), schema(), FLEET, np.random.default_rng(0))
    mixture = method.predictor(state, None)
    assert [weight for weight, _ in mixture] == [0.25] * 4
    assert np.array_equal([model for _, model in mixture], state.centers)
    assert state.assignment == {}  # nobody belongs to one of them
