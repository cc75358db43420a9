from __future__ import annotations

import numpy as np
import pytest
import tomllib
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.round import first_state
from coordinator.strategies.common.representation import (
    REPRESENTATIONS,
    SKETCH_SIZE,
    annotate_representations,
    represent,
)
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.registry import make_method
from edge_client.errors import ConfigError
from edge_client.protocol.task import Schema, TensorSpec
from tests.support.softmax_program import schema, start_of

TENSORS = (
    TensorSpec(name="body", role="p", shape=(2,)),
    TensorSpec(name="head", role="p", shape=(3,)),
    TensorSpec(name="mean", role="b", shape=(2,)),
)
HEADED = Schema(TENSORS, ("head",))


def test_a_representation_never_holds_buffers() -> None:
    rows = np.arange(7.0)[None]
    moved = rows + np.array([0, 0, 0, 0, 0, 5.0, -3.0])
    for kind in REPRESENTATIONS:
        np.testing.assert_array_equal(represent(rows, HEADED, kind), represent(moved, HEADED, kind))
    assert represent(rows, HEADED, "classifier").tolist() == [[2.0, 3.0, 4.0]]
    assert represent(rows, HEADED, "all").tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]
    assert represent(rows, Schema(TENSORS), "classifier").shape == (1, 5)
    with pytest.raises(ConfigError, match="representation"):
        represent(rows, schema(), "x")


def test_a_pattern_takes_the_parameters_whose_names_fit() -> None:
    named = ("layers.0.lora_A.weight", "layers.0.lora_B.weight", "layers.1.lora_B.weight")
    adapters = Schema((*(TensorSpec(name=n, role="p", shape=(2,)) for n in named), *TENSORS[2:]))
    rows = np.arange(8.0)[None]
    assert represent(rows, adapters, "*lora_B*").tolist() == [[2.0, 3.0, 4.0, 5.0]]
    assert represent(rows, adapters, "layers.0.*").tolist() == [[0.0, 1.0, 2.0, 3.0]]
    with pytest.raises(ConfigError, match=r"fits no parameter") as refused:
        represent(rows, adapters, "*mean*")  # a buffer
    assert "layers.0.lora_A.weight" in str(refused.value.hint)


def test_a_method_takes_a_pattern_and_refuses_another_word() -> None:
    assert FeSEM(2, representation="*lora_B*").representation == "*lora_B*"
    with pytest.raises(ConfigError, match="representation is 'lora_B'"):
        FeSEM(2, representation="lora_B")


@pytest.mark.parametrize("method", ["cfl", "flhc", "fesem"])
def test_a_pattern_that_fits_no_parameter_is_refused_before_the_first_round(method: str) -> None:
    """`flhc` was the first to look after its warm-up, and `cfl` when it split a cluster."""
    strategy = make_method(method, representation="hed.*")
    with pytest.raises(ConfigError, match=r"'hed\.\*' fits no parameter"):
        first_state(strategy, start_of(), schema(), {"d00": 40}, 0)


@given(steps=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_a_direction_does_not_tell_how_far_a_device_went(steps: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pivot, way = rng.standard_normal(7), rng.standard_normal(7)
    for kind in ("delta", "projection"):
        near, far = represent(np.stack([pivot + way, pivot + steps * way]), HEADED, kind, pivot=pivot)
        np.testing.assert_allclose(near, far, atol=1e-9)
    still = represent(pivot[None], HEADED, "delta", pivot=pivot)
    assert not still.any()


def test_a_projection_keeps_cosines_in_a_thousand_numbers() -> None:
    wide = Schema((TensorSpec(name="w", role="p", shape=(30_000,)),))
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 30_000))[[0, 0, 1, 2]] + 0.5 * rng.standard_normal((4, 30_000))
    exact, short = (represent(rows, wide, kind) for kind in ("delta", "projection"))
    assert short.shape == (4, SKETCH_SIZE)
    # The deviation of one inner product of unit vectors is about 1 / sqrt(1024) = 0.03; four of them are 0.125.
    np.testing.assert_allclose(short @ short.T, exact @ exact.T, atol=0.125)
    np.testing.assert_array_equal(short, represent(rows, wide, "projection"))


def test_a_configuration_says_why_its_representation_is_taken_and_reads_the_same() -> None:
    said = 'seed = 1\n[[runs]]\nrepresentation = "all"\nmethod = "cfl"\n[[runs]]\nrepresentation = "classifier"\n'
    told = annotate_representations(said)
    assert [told.count(why) for why in REPRESENTATIONS.values()] == [1, 1, 0, 0]
    assert tomllib.loads(told) == tomllib.loads(said)
