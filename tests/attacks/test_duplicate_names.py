"""Tries to show two readers two files: a tensor or a metadata key written twice (the library takes the last)."""

from __future__ import annotations

import pytest

from edge_client.protocol.tensors import unpack_tensors
from tests.support.memory_limit import refused_within
from tests.support.tensor_files import FC, tensor_file

ONE = '"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}'
ESCAPED = ONE.replace('"a"', r'"\u0061"')  # the same name


@pytest.mark.parametrize(
    "header",
    [f"{ONE},{ONE}", f"{ONE},{FC}", ONE.replace('"shape":[4]', '"shape":[9],"shape":[4]'), f"{ONE},{ESCAPED}"],
)
def test_a_name_written_twice_is_refused(header: str) -> None:
    assert refused_within(100_000, lambda: unpack_tensors(tensor_file(header, bytes(4)))) == "bad_schema"
