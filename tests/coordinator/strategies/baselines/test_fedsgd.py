from __future__ import annotations

import numpy as np
import pytest

from coordinator.strategies.base import drive
from coordinator.strategies.baselines.fedsgd import FedSGD, gradient_updates
from edge_client.errors import ConfigError
from edge_client.protocol.task import Probe, Reply
from tests.support.softmax_gradient import gradient
from tests.support.softmax_program import grouped_fleet, play, schema, start_of

LOCAL = grouped_fleet(4, 2)
N = np.array([len(local.train) for local in LOCAL.values()], dtype=np.float64)


@pytest.mark.parametrize("batch_size", [7, 1_000])
def test_a_round_is_one_step_along_the_gradient_of_all_samples_of_all_devices(batch_size: int) -> None:
    expected = start_of()
    for _ in range(3):
        expected = expected - 0.3 * N / N.sum() @ [gradient(expected, local.train) for local in LOCAL.values()]
    ours = play(FedSGD(learning_rate=0.3, batch_size=batch_size), LOCAL, rounds=3).centers[0]
    np.testing.assert_allclose(ours, expected, rtol=1e-11)


def test_only_gradients_are_asked_for_and_those_who_are_silent_do_not_count() -> None:
    method, fleet = FedSGD(learning_rate=1.0), {"a": 10, "b": 30, "silent": 1_000}
    rows = np.random.default_rng(0).standard_normal((2, schema().n_params))
    state = method.begin(start_of(), schema(), fleet, np.random.default_rng(0))

    def answer(exchange: object) -> dict[str, Reply]:
        assert isinstance(exchange, dict)
        assert all(isinstance(t, Probe) and t.want == {"grad"} and t.limit is None for t in exchange.values())
        return {"b": Reply(n=30, grad=rows[1]), "a": Reply(n=10, grad=rows[0])}

    after = drive(method.round(state, schema(), fleet, np.random.default_rng(1)), answer)
    np.testing.assert_allclose(after.centers[0], start_of() - 0.25 * rows[0] - 0.75 * rows[1])


def test_a_fraction_asks_that_many() -> None:
    method, fleet = FedSGD(fraction_train=0.5), dict.fromkeys("abcde", 10)
    state = method.begin(start_of(), schema(), fleet, np.random.default_rng(0))
    assert len(next(method.round(state, schema(), fleet, np.random.default_rng(1)))) == 3


def test_a_gradient_has_no_force_on_buffers() -> None:
    found = gradient_updates({"a": Reply(n=2, grad=np.ones(24, np.float32)), "b": Reply(n=1)}, schema(buffered=True))
    assert found.clients == ("a",)
    assert [row.tolist() for row in found.rows] == [[1.0] * 24 + [0.0] * 5]
    assert found.rows[0].dtype == np.float32


def test_a_model_with_batch_norm_is_refused_since_nobody_would_train_its_statistics() -> None:
    with pytest.raises(ConfigError, match="buffers") as refused:
        FedSGD().begin(start_of(buffered=True), schema(buffered=True), {"a": 1}, np.random.default_rng(0))
    assert refused.value.hint
