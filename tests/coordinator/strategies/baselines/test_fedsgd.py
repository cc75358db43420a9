from __future__ import annotations

import numpy as np
import pytest

from coordinator.strategies.baselines.fedsgd import FedSGD, gradient_updates
from edge_client.errors import ConfigError
from edge_client.protocol.task import Reply
from tests.support.softmax_program import schema, start_of


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
