"""Tries to read bytes twice, or to smuggle some that no tensor covers: overlaps, holes, trailing bytes."""

from __future__ import annotations

import pytest

from edge_client.protocol.tensors import unpack_tensors
from tests.support.memory_limit import refused_within
from tests.support.tensor_files import tensor_file


def two(first: tuple[int, int], second: tuple[int, int]) -> str:
    spans = {"a": first, "b": second}
    return ",".join(
        f'"{name}":{{"dtype":"I8","shape":[{e - b}],"data_offsets":[{b},{e}]}}' for name, (b, e) in spans.items()
    )


@pytest.mark.parametrize(
    ("first", "second", "body_bytes"),
    [((0, 4), (2, 6), 6), ((0, 4), (0, 4), 4), ((0, 2), (4, 6), 6), ((1, 4), (4, 8), 8), ((0, 4), (4, 8), 9)],
)
def test_tensors_must_tile_the_body(first: tuple[int, int], second: tuple[int, int], body_bytes: int) -> None:
    data = tensor_file(two(first, second), bytes(body_bytes))
    assert refused_within(100_000, lambda: unpack_tensors(data)) == "bad_schema"


def test_the_same_file_without_overlap_is_read() -> None:
    tensors, _ = unpack_tensors(tensor_file(two((0, 4), (4, 8)), bytes(8)))
    assert set(tensors) == {"a", "b"}
