from __future__ import annotations

import numpy as np

from coordinator.strategies.base import drive
from coordinator.strategies.baselines.feddist import FedDist, FedDWS
from edge_client.protocol.task import Array, Reply
from tests.support.softmax_program import schema, start_of

ROWS = np.random.default_rng(0).standard_normal((2, schema(buffered=True).size))


def after_a_round(method: FedDist, *, buffered: bool = False) -> Array:
    """Device a (10 samples) and b (30) answer the two rows."""
    layout, fleet = schema(buffered=buffered), {"a": 10, "b": 30}
    answers = {"b": Reply(n=30, update=ROWS[1, : layout.size]), "a": Reply(n=10, update=ROWS[0, : layout.size])}
    state = method.begin(start_of(buffered=buffered), layout, fleet, np.random.default_rng(0))
    centers = drive(method.round(state, layout, fleet, np.random.default_rng(1)), lambda _: answers).centers
    return np.asarray(centers[0])


def test_buffers_are_counted_by_samples_whoever_weighs_the_parameters() -> None:
    layout = schema(buffered=True)
    tail = slice(layout.n_params, layout.size)
    equal, by_samples = (after_a_round(method, buffered=True) for method in (FedDist(), FedDWS()))
    np.testing.assert_allclose(equal[tail], by_samples[tail])
    assert not np.allclose(equal[: layout.n_params], by_samples[: layout.n_params])
