"""Tries to make the reader allocate: a header length of exabytes, or a real header of two megabytes."""

from __future__ import annotations

import pytest

from edge_client.protocol.tensors import MAX_HEADER_BYTES, unpack_tensors
from tests.support.memory_limit import refused_within
from tests.support.tensor_files import tensor_file


@pytest.mark.parametrize("length", [2**64 - 1, 2**62, 2**32, MAX_HEADER_BYTES + 8])
def test_a_header_length_is_only_a_number(length: int) -> None:
    data = length.to_bytes(8, "little") + b"{}"
    assert refused_within(100_000, lambda: unpack_tensors(data)) == "bad_schema"


def test_a_real_header_of_two_megabytes_is_not_parsed() -> None:
    data = tensor_file(f'"{"a" * (2 << 20)}":{{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"\0")
    assert refused_within(100_000, lambda: unpack_tensors(data)) == "bad_schema"


def test_a_header_of_many_empty_objects_costs_a_few_times_its_size() -> None:
    entries = ",".join(f'"{i}":{{}}' for i in range(90_000))
    data = tensor_file(entries, b"")
    assert len(data) < MAX_HEADER_BYTES
    assert refused_within(64 << 20, lambda: unpack_tensors(data)) == "bad_schema"
