"""The numbers of a training step are a function of the task's seed and the step, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_client.protocol.program import Function, Port, Program
from edge_client.training.noise import step_noise
from tests.support.softmax_program import program as without_noise

STEP = Function(inputs=(Port(name="noise", dtype="float32", shape=("batch", 5)),), outputs=())
PROGRAM: Program = replace(without_noise(), dtype="float32", functions={"step": STEP})


def test_a_number_is_the_upper_24_bits_of_half_an_output_the_lower_half_first() -> None:
    raw = np.random.PCG64(np.random.SeedSequence(7, spawn_key=(3,))).random_raw(10)
    halves = np.stack([raw & np.uint64(0xFFFFFFFF), raw >> np.uint64(32)], axis=1).reshape(-1)
    expected = (halves >> np.uint64(8)).astype(np.float64) / 2**24
    drawn = step_noise(PROGRAM, seed=7, step=3, samples=4)["noise"]
    assert drawn.dtype == np.float32
    assert np.array_equal(drawn.astype(np.float64), expected.reshape(4, 5))


def test_the_numbers_of_the_document() -> None:
    """PROTOCOL.md, section 8: another implementation compares with these."""
    assert step_noise(PROGRAM, seed=7, step=0, samples=1)["noise"].tolist() == [
        [k / 2**24 for k in [5123243, 13385855, 3420834, 890767, 13664407]]
    ]


@pytest.mark.parametrize(("seed", "step"), [(8, 0), (7, 1), (7 + 2**32, 0)])
def test_another_seed_or_step_draws_other_numbers(seed: int, step: int) -> None:
    first, other = (step_noise(PROGRAM, *at, samples=8)["noise"] for at in ((7, 0), (seed, step)))
    assert not np.isin(other, first).any()


def test_float64_is_fed_the_same_numbers() -> None:
    single, double = (step_noise(replace(PROGRAM, dtype=d), 1, 2, 3)["noise"] for d in ("float32", "float64"))
    assert double.dtype == np.float64
    assert np.array_equal(single, double)


def test_a_program_that_draws_nothing_is_fed_nothing() -> None:
    assert step_noise(without_noise(), seed=1, step=0, samples=4) == {}
