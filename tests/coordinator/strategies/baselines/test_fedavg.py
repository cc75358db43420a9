from __future__ import annotations

import numpy as np
import pytest

from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.baselines.fedprox import FedProx
from edge_client.errors import ConfigError
from edge_client.protocol.task import Fit
from edge_client.training.fit_probe import run_fit
from edge_client.training.learner import EngineLearner
from tests.support.softmax_program import SoftmaxEngine, grouped_fleet, play, program, schema, start_of

LOCAL = grouped_fleet(5, 2)


def test_one_device_alone_is_plain_sgd_on_its_data() -> None:
    alone = {"d00": LOCAL["d00"]}
    method = FedAvg(local_steps=4, batch_size=64, momentum=0.0)  # full batches: the seed does not matter
    task = Fit(start=start_of(), steps=12, lr=method.learning_rate, batch=64, seed=0)
    expected = run_fit(EngineLearner(SoftmaxEngine(), program()), task, alone["d00"].train).vector
    np.testing.assert_allclose(play(method, alone, rounds=3).centers[0], expected, rtol=1e-12)


def test_fedprox_refuses_a_pull_that_diverges() -> None:
    FedProx(mu=20.0, learning_rate=0.1)
    with pytest.raises(ConfigError, match="diverges"):
        FedProx(mu=20.1, learning_rate=0.1)


def test_a_fraction_asks_that_many_and_nobody_twice() -> None:
    fleet = {c: len(local.train) for c, local in LOCAL.items()}
    method = FedAvg(fraction_train=0.5)
    state = method.begin(start_of(), schema(), fleet, np.random.default_rng(0))
    cohorts = [frozenset(next(method.round(state, schema(), fleet, np.random.default_rng(s)))) for s in range(20)]
    assert {len(c) for c in cohorts} == {3}
    assert frozenset().union(*cohorts) == set(fleet)
