from __future__ import annotations

import numpy as np
import pytest

from coordinator.clustering.neuron_matching import layer_chain, permute_units
from coordinator.strategies.base import State, drive
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.fesem_ma import FeSEMMA
from edge_client.errors import ConfigError
from edge_client.protocol.task import Flat, Reply, Schema, TensorSpec

MLP = Schema(
    (
        TensorSpec(name="0.weight", role="p", shape=(7, 5)),
        TensorSpec(name="0.bias", role="p", shape=(7,)),
        TensorSpec(name="2.weight", role="p", shape=(4, 7)),
        TensorSpec(name="2.bias", role="p", shape=(4,)),
    ),
    ("2.weight", "2.bias"),
)
RNG = np.random.default_rng(0)
START = RNG.standard_normal(MLP.size)


def one_round(method: FeSEM, models: dict[str, Flat]) -> State:
    fleet = dict.fromkeys(models, 10)
    state = method.begin(START, MLP, fleet, np.random.default_rng(0))
    replies = {c: Reply(n=10, update=model) for c, model in models.items()}
    return drive(method.round(state, MLP, fleet, np.random.default_rng(0)), lambda _: replies)


def shuffled(model: Flat) -> Flat:
    return permute_units(model, MLP, [RNG.permutation(7)], layer_chain(MLP))


def test_devices_that_shuffled_their_hidden_units_average_as_if_they_had_not() -> None:
    trained = [START + 0.01 * RNG.standard_normal(MLP.size) for _ in range(4)]
    plain = {f"d{i}": model for i, model in enumerate(trained)}
    mixed = {c: shuffled(model) for c, model in plain.items()}
    matched, mean, spoiled = (
        one_round(method, models).centers[0]
        for method, models in ((FeSEMMA(clusters=1), mixed), (FeSEM(clusters=1), plain), (FeSEM(clusters=1), mixed))
    )
    np.testing.assert_array_equal(matched, mean)
    assert np.abs(spoiled - mean).max() > 0.1


@pytest.mark.parametrize("representation", ["classifier", "all"])
def test_shuffled_hidden_units_hide_no_group(representation: str) -> None:
    groups = [START + 0.5 * RNG.standard_normal(MLP.size) for _ in range(2)]
    plain = {f"d{i}": groups[i % 2] + 0.01 * RNG.standard_normal(MLP.size) for i in range(8)}
    mixed = {c: shuffled(model) for c, model in plain.items()}
    method = FeSEMMA(clusters=2, representation=representation)
    expected, found = (one_round(method, models) for models in (plain, mixed))
    assert [expected.assignment[c] for c in sorted(plain)] == [0, 1] * 4
    assert found.assignment == expected.assignment
    np.testing.assert_allclose(found.centers, expected.centers, rtol=1e-12)


def test_identical_devices_have_their_plain_mean() -> None:
    model = START + 0.1 * RNG.standard_normal(MLP.size)
    models = {f"d{i}": model for i in range(4)}
    ours, theirs = (one_round(method, models).centers for method in (FeSEMMA(clusters=2), FeSEM(clusters=2)))
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours[0], model)


def test_a_model_that_is_no_chain_is_refused_before_anybody_trains() -> None:
    branched = Schema(tuple(TensorSpec(name=f"{n}.weight", role="p", shape=(3, 3)) for n in ("left", "right")))
    with pytest.raises(ConfigError, match="branch") as refused:
        FeSEMMA().begin(np.zeros(18), branched, {"a": 10}, np.random.default_rng(0))
    assert "fesem" in refused.value.hint
