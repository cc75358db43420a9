"""Tries to overflow the size of a tensor: dimensions whose product wraps around, or is zero, or is a petabyte."""

from __future__ import annotations

import pytest

from edge_client.protocol.tensors import unpack_tensors
from tests.support.memory_limit import refused_within
from tests.support.tensor_files import tensor_file


@pytest.mark.parametrize(
    "shape",
    ["[4294967296,4294967296]", "[1099511627776,0]", "[9007199254740991,1024]", "[65536,65536,65536,65537]", "[1e3]"],
)
@pytest.mark.parametrize("span", [(0, 0), (0, 8), (0, 2**52)])
def test_a_product_of_dimensions_is_compared_before_it_is_used(shape: str, span: tuple[int, int]) -> None:
    header = f'"a":{{"dtype":"I8","shape":{shape},"data_offsets":[{span[0]},{span[1]}]}}'
    assert refused_within(100_000, lambda: unpack_tensors(tensor_file(header, bytes(8)))) == "bad_schema"
