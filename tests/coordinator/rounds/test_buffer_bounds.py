"""Bounds of buffers: what stands exactly at a bound passes, what is beyond it does not."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.rounds.buffer_bounds import (
    VARIANCE_SUFFIX,
    bounded_buffers,
)
from edge_client.errors import Malformed
from edge_client.protocol.task import Flat, Schema, TensorSpec

SCHEMA = Schema(
    tensors=(
        TensorSpec(name="w", shape=(2,), role="p"),
        TensorSpec(name="norm.running_mean", shape=(2,), role="b"),
        TensorSpec(name=f"norm.{VARIANCE_SUFFIX}", shape=(2,), role="b"),
    )
)


def vector(mean: list[float], variance: list[float]) -> Flat:
    return np.array([1e20, -1e20, *mean, *variance], np.float32)  # parameters have no bound here


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("center", "bound"),
    [(None, 1e12), (0.0, 1e6), (50.0, 1e6), (-1_000.0, 1e7), (1e9, 1e12)],
)
def test_a_buffer_may_be_as_large_as_its_bound_and_no_larger(center: float | None, bound: float, sign: int) -> None:
    old = None if center is None else vector([0.0, center], [1.0, 1.0])
    greatest = np.float32(bound)
    assert greatest <= bound
    at = vector([sign * float(greatest), 0.0], [1.0, 1.0])
    assert bounded_buffers(at, old, SCHEMA) is at
    beyond = vector([sign * float(np.nextafter(greatest, np.float32(np.inf))), 0.0], [1.0, 1.0])
    with pytest.raises(Malformed, match="running_mean"):
        bounded_buffers(beyond, old, SCHEMA)


def test_a_variance_that_the_codec_rounded_below_zero_becomes_zero_and_a_lower_one_is_refused() -> None:
    old, moved = vector([0.0, 0.0], [8.0, 8.0]), 1024.0
    at = vector([-5.0, 0.0], [8.0 + moved, -(2.0**-10) * moved])
    kept = at.copy()
    found = bounded_buffers(at, old, SCHEMA)
    np.testing.assert_array_equal(found, vector([-5.0, 0.0], [8.0 + moved, 0.0]))
    np.testing.assert_array_equal(at, kept)
    with pytest.raises(Malformed, match="at least 0"):
        bounded_buffers(vector([0.0, 0.0], [8.0 + moved, -1.01 * 2.0**-10 * moved]), old, SCHEMA)


def test_without_a_center_a_variance_is_measured_by_itself() -> None:
    found = bounded_buffers(vector([0.0, 0.0], [1024.0, -(2.0**-10) * 1024]), None, SCHEMA)
    assert found[-1] == 0
    with pytest.raises(Malformed, match="at least 0"):
        bounded_buffers(vector([0.0, 0.0], [1.0, -0.1]), None, SCHEMA)


@pytest.mark.parametrize("center", [None, vector([0.0, 0.0], [1.0, 1.0])])
def test_an_update_whose_variances_are_not_negative_is_returned_as_it_is(center: Flat | None) -> None:
    update = vector([-1.0, 0.0], [0.0, 0.5])
    assert bounded_buffers(update, center, SCHEMA) is update
