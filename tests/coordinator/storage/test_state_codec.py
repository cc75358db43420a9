from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from coordinator.storage import state_codec
from coordinator.strategies.base import State
from edge_client.errors import Malformed
from edge_client.protocol.task import Array

DTYPES = st.sampled_from([np.float32, np.float64, np.int64])
ANY = DTYPES.flatmap(lambda d: arrays.arrays(d, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
CIDS = st.text("abc-_9", min_size=1, max_size=8)


@given(ANY, st.dictionaries(CIDS, st.integers(0, 9)), st.dictionaries(CIDS, ANY, max_size=3))
def test_a_state_comes_back_with_the_same_bits(
    centers: Array, assignment: dict[str, int], extra: dict[str, Array]
) -> None:
    state = State(centers=centers, assignment=assignment, extra=extra)
    back = state_codec.decode_state(state_codec.encode_state(state))
    assert back.centers.dtype == centers.dtype
    assert back.centers.tobytes() == centers.tobytes()
    assert back.centers.shape == centers.shape
    assert dict(back.assignment) == assignment
    assert {k: (v.dtype, v.tobytes()) for k, v in back.extra.items()} == {
        k: (v.dtype, v.tobytes()) for k, v in extra.items()
    }
    assert state_codec.encode_state(back) == state_codec.encode_state(state)


@pytest.mark.parametrize("data", [b"", b"nonsense", state_codec.encode_array(np.zeros(3))])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed, match="stored state"):
        state_codec.decode_state(data)
