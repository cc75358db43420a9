"""Sketches: what a device says of its inputs and of its update in a few numbers."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.errors import Malformed
from edge_client.protocol import tensors
from edge_client.protocol.nearest import sketch
from tests.support import softmax_program

SCHEMA = softmax_program.schema()


def test_the_distance_of_two_sketches_is_that_of_the_distributions_under_a_gaussian_kernel() -> None:
    """Two single samples: the squared distance is 2 - 2 exp(-|x - y|^2 / (2 width^2)) (Rahimi and Recht 2007)."""
    x, y, width, size = np.zeros((1, 3)), np.full((1, 3), 0.7), 1.5, 4_096
    first, second = (sketch.random_features(each, seed=1, size=size, width=width) for each in (x, y))
    expected = 2 - 2 * np.exp(-np.square(x - y).sum() / (2 * width**2))
    assert np.square(first - second).mean() == pytest.approx(expected, rel=0.1)  # the error is about 1 / sqrt(size)


def packed(**changes: object) -> bytes:
    """A tensor file that is a sketch but for the changes."""
    said = {"kind": "sketch", "codec": "f32", "schema": SCHEMA.sha256, **changes}
    arrays = said.pop("arrays", {"sketch": np.zeros(4, np.float32)})
    return tensors.pack_tensors(arrays, **said)  # type: ignore[arg-type]


def test_a_sketch_is_read_as_it_was_written() -> None:
    values = np.linspace(-1, 1, 8)
    np.testing.assert_array_equal(
        sketch.decode_sketch(sketch.encode_sketch(values, SCHEMA), SCHEMA), np.float32(values)
    )


@pytest.mark.parametrize(
    "data",
    [
        packed(kind="model"),
        packed(schema="0" * 64),
        packed(arrays={"other": np.zeros(4, np.float32)}),
        packed(arrays={"sketch": np.zeros(4, np.float32), "more": np.zeros(4, np.float32)}),
        packed(arrays={"sketch": np.zeros((2, 2), np.float32)}),
        packed(arrays={"sketch": np.zeros(sketch.MAX_SKETCH_SIZE + 1, np.float32)}),
    ],
    ids=["another kind", "another schema", "another name", "a second tensor", "a matrix", "too long"],
)
def test_each_way_to_be_no_sketch_is_refused_alone(data: bytes) -> None:
    with pytest.raises(Malformed, match="bad_schema"):
        sketch.decode_sketch(data, SCHEMA)
