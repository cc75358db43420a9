"""Tries to outweigh a fleet with what no device measured: more votes than samples, negative ones, overflows."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.protocol import codecs, tensors
from edge_client.protocol.task import Array, Schema, TensorSpec
from tests.support.memory_limit import refused_within

SCHEMA = Schema((TensorSpec(name="w", role="p", shape=(2,)),))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("votes", np.array([11, 0])),
        ("votes", np.array([-5, 10])),
        ("votes", np.array([2**62, 2**62])),
        ("votes", np.array([10] * 16)),
        ("confusion", np.full((2, 2, 2), 10)),
        ("confusion", np.full((1, 2, 2), 2**62)),
        ("confusion", np.array([[[-1, 1], [1, 1]]])),
    ],
)
def test_no_statistic_counts_more_samples_than_there_are(name: str, value: Array) -> None:
    data = tensors.pack_tensors({name: value.astype(np.int64)}, kind="stats", codec="f32", schema=SCHEMA.sha256)
    assert refused_within(1 << 20, lambda: codecs.decode_stats(data, SCHEMA, 10)) == "bad_field"
