"""Sketches in a `near` question, which any device may send."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.nearest.answer import decode_sketch
from edge_client.errors import Malformed
from edge_client.protocol import tensors
from edge_client.protocol.nearest.sketch import MAX_SKETCH_SIZE, UPDATE_SKETCH_SIZE
from tests.support import softmax_program

SCHEMA = softmax_program.schema()


def packed(*values: float, **changes: object) -> bytes:
    """A sketch as a tensor file, but for the changes."""
    said = {"kind": "sketch", "codec": "f32", "schema": SCHEMA.sha256, **changes}
    arrays = said.pop("arrays", {"sketch": np.array(values, np.float32)})
    return tensors.pack_tensors(arrays, **said)  # type: ignore[arg-type]


def test_a_sketch_is_read_as_it_was_written() -> None:
    assert decode_sketch(packed(0.5, -1.0), SCHEMA).tolist() == [0.5, -1.0]


def test_the_longest_sketch_is_read() -> None:
    assert len(decode_sketch(packed(*[1.0] * MAX_SKETCH_SIZE), SCHEMA)) == MAX_SKETCH_SIZE


def test_the_sketch_of_an_update_is_a_message_of_its_own() -> None:
    assert len(packed(*[1.0] * UPDATE_SKETCH_SIZE)) < 2_048


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_sketch_of_numbers_that_are_not_finite_is_refused(value: float) -> None:
    with pytest.raises(Malformed) as refused:
        decode_sketch(packed(1.0, value), SCHEMA)
    assert refused.value.code == "not_finite"


def test_a_cut_file_is_no_sketch() -> None:
    with pytest.raises(Malformed):
        decode_sketch(packed(0.5, 1.0)[:-1], SCHEMA)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "model"},
        {"codec": "i8"},
        {"schema": "0" * 64},
        {"arrays": {"other": np.zeros(4, np.float32)}},
        {"arrays": {"sketch": np.zeros(4, np.float32), "more": np.zeros(4, np.float32)}},
        {"arrays": {"sketch": np.zeros(4, np.float16)}},
        {"arrays": {"sketch": np.zeros((2, 2), np.float32)}},
        {"arrays": {"sketch": np.zeros(MAX_SKETCH_SIZE + 1, np.float32)}},
    ],
    ids=[
        "another kind",
        "another codec",
        "another schema",
        "another name",
        "a second tensor",
        "halves",
        "a matrix",
        "too long",
    ],
)
def test_each_way_to_be_no_sketch_is_refused_alone(changes: dict[str, object]) -> None:
    with pytest.raises(Malformed, match="bad_schema"):
        decode_sketch(packed(**changes), SCHEMA)
