"""Networks are torch's, in float64: what a permuted model computes is what torch says it computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coordinator.clustering.neuron_matching import align_neurons, layer_chain, match_units, permute_units
from coordinator.models.zoo import GnCnn, celeba_cnn, cifar_lenet, digits_mlp, linear_regression, wecfl_cnn
from edge_client.errors import ConfigError
from edge_client.protocol.task import Flat, Schema, TensorSpec


def small() -> nn.Sequential:
    """Convolutions with batch norm, a flatten, two linear layers."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 5 * 5, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


def schema_of(module: nn.Module) -> Schema:
    parameters = [TensorSpec(name=n, role="p", shape=tuple(v.shape)) for n, v in module.named_parameters()]
    buffers = [TensorSpec(name=n, role="b", shape=tuple(v.shape)) for n, v in module.named_buffers() if v.dim()]
    return Schema((*parameters, *buffers))


def vector_of(module: nn.Module, schema: Schema) -> Flat:
    state = module.state_dict()
    return schema.join({t.name: state[t.name].double().numpy() for t in schema.tensors})


def load(module: nn.Module, schema: Schema, vector: Flat) -> None:
    module.load_state_dict({n: torch.tensor(v) for n, v in schema.split(vector).items()}, strict=False)


def drawn(seed: int) -> tuple[nn.Sequential, Schema, Flat, np.random.Generator]:
    torch.manual_seed(seed)
    module = small().double()
    schema, rng = schema_of(module), np.random.default_rng(seed)
    vector = vector_of(module, schema)
    vector[schema.n_params :] = 0.02 + 0.2 * rng.random(schema.size - schema.n_params)  # low means: few units are dead
    return module, schema, vector, rng


def shuffled(vector: Flat, schema: Schema, rng: np.random.Generator) -> Flat:
    layers = layer_chain(schema)
    return permute_units(vector, schema, [rng.permutation(layer.width) for layer in layers[:-1]], layers)


@settings(max_examples=20)
@given(seed=st.integers(0, 999))
def test_a_permuted_network_computes_the_same(seed: int) -> None:
    module, schema, vector, rng = drawn(seed)
    x = torch.tensor(rng.standard_normal((4, 2, 5, 5)))
    answers = []
    for weights in (vector, shuffled(vector, schema, rng)):
        load(module, schema, weights)
        answers.append(module.eval()(x).detach().numpy())
    assert answers[0].std(axis=0).max() > 0.01  # it does look at its input
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-12, atol=1e-12)  # sums in another order


@settings(max_examples=20)
@given(seed=st.integers(0, 999))
def test_matching_undoes_any_order_of_hidden_units_to_the_last_bit(seed: int) -> None:
    _, schema, vector, rng = drawn(seed)
    rows = np.stack([shuffled(vector, schema, rng) for _ in range(3)])
    assert not np.array_equal(rows[0], vector)
    np.testing.assert_array_equal(align_neurons(rows, vector, schema), np.tile(vector, (3, 1)))


def test_matching_undoes_an_order_that_some_training_followed() -> None:
    _, schema, vector, rng = drawn(1)
    moved = vector + 1e-3 * rng.standard_normal(vector.size)
    np.testing.assert_array_equal(align_neurons(shuffled(moved, schema, rng)[None], vector, schema)[0], moved)


def test_float32_models_stay_float32() -> None:
    _, schema, vector, _ = drawn(2)
    assert align_neurons(vector[None].astype(np.float32), vector.astype(np.float32), schema).dtype == np.float32


@pytest.mark.parametrize("make", [digits_mlp, wecfl_cnn, cifar_lenet, celeba_cnn, linear_regression])
def test_the_plain_networks_of_the_zoo_are_chains_and_like_themselves(make: object) -> None:
    module = make()  # type: ignore[operator]
    schema = schema_of(module)
    layers = layer_chain(schema)
    vector = vector_of(module, schema)
    for order in match_units(vector, vector, schema, layers):
        assert order.tolist() == list(range(len(order)))
    assert [layer.weight for layer in layers] == [t.name for t in schema.tensors if t.role == "p" and len(t.shape) > 1]


@pytest.mark.parametrize(
    "module",
    [
        GnCnn(),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4)),
        nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)),
        nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}),
        nn.Sequential(nn.GRU(3, 3), nn.Linear(3, 2)),
    ],
)
def test_what_is_no_plain_chain_is_refused_with_its_name(module: nn.Module) -> None:
    with pytest.raises(ConfigError) as refused:
        layer_chain(schema_of(module))
    assert "fesem" in refused.value.hint
