"""Tries to poison an average: NaN and infinity in values, in scales, or by a scale that overflows in decoding."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.protocol import codecs, tensors
from edge_client.protocol.task import Array, Schema, TensorSpec
from tests.support.memory_limit import refused_within

SCHEMA = Schema((TensorSpec(name="w", role="p", shape=(2, 2)),))
ONES = np.ones((2, 2))
F16, F32, I8 = np.float16, np.float32, np.int8


@pytest.mark.parametrize(
    ("codec", "stored"),
    [
        ("f32", {"w": np.array([[1, np.nan], [1, 1]], F32)}),
        ("f32", {"w": np.array([[1, np.inf], [1, 1]], F32)}),
        ("f16", {"w": np.array([[1, np.inf], [1, 1]], F16), "w#s": np.ones(1, F32)}),
        ("f16", {"w": np.array([[0, np.nan], [0, 0]], F16), "w#s": np.zeros(1, F32)}),
        ("f16", {"w": ONES.astype(F16), "w#s": np.full(1, np.inf, F32)}),
        ("f16", {"w": (ONES * 60_000).astype(F16), "w#s": np.full(1, 1e38, F32)}),
        ("i8", {"w": ONES.astype(I8), "w#s": np.array([1, np.nan], F32)}),
        ("i8", {"w": np.zeros((2, 2), I8), "w#s": np.array([1, np.inf], F32)}),
        ("i8", {"w": (ONES * 127).astype(I8), "w#s": np.array([1, 1e38], F32)}),
    ],
)
def test_every_decoded_value_is_finite_or_the_file_is_refused(codec: str, stored: dict[str, Array]) -> None:
    data = tensors.pack_tensors(stored, kind="delta", codec=codec, schema=SCHEMA.sha256, base="zero")
    attempt = lambda: codecs.decode_vector(data, SCHEMA, kind="delta")  # noqa: E731 - read once, below
    assert refused_within(1 << 20, attempt) == "not_finite"
