from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from emulator.data.loaders import idx
from tests.support.raw_data_files import idx_bytes

ARRAYS = hnp.arrays(st.sampled_from([np.uint8, np.int32]), hnp.array_shapes(max_dims=3, max_side=5))


@given(ARRAYS)
def test_what_was_written_is_read(array: np.ndarray[Any, Any]) -> None:
    found = idx.parse_idx(idx_bytes(array))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@given(ARRAYS, st.integers(1, 20))
def test_a_file_that_was_cut_off_or_has_more_is_refused(array: np.ndarray[Any, Any], more: int) -> None:
    whole = idx_bytes(array)
    for wrong in (whole[:-more], whole + b"\0" * more):
        with pytest.raises(ValueError, match=r"bytes|IDX"):
            idx.parse_idx(wrong)


@given(st.binary(max_size=64))
def test_no_bytes_do_anything_but_parse_or_raise_value_error(data: bytes) -> None:
    try:
        found = idx.parse_idx(data)
    except ValueError:
        return
    assert found.nbytes <= len(data)


def test_a_header_that_promises_more_than_any_memory_allocates_nothing() -> None:
    huge = bytes([0, 0, 14, 4]) + struct.pack(">4I", *[2**32 - 1] * 4)
    with pytest.raises(ValueError, match="needs"):
        idx.parse_idx(huge)
