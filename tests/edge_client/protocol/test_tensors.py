"""Tensor files: what is packed is unpacked, and a file out of order is refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_client.errors import Malformed
from edge_client.protocol.tensors import TensorFileMeta, pack_tensors, unpack_tensors, view_tensors

SCHEMA = "0" * 64
FC: dict[str, Any] = {"kind": "model", "codec": "f32", "schema": SCHEMA, "v": 1}
DTYPES = ["float64", "float32", "float16", "int64", "int32", "int8", "uint8"]
TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=8, min_side=1, max_side=2))
    ),
    min_size=1,
    max_size=4,
)


def file_of(header: dict[str, Any] | str, body: bytes = b"\0" * 8, fc: object = FC) -> bytes:
    """A file by hand; a dict of tensors gets the metadata and is padded as the format wants."""
    if isinstance(header, dict):
        text = fc if isinstance(fc, str) else json.dumps(fc, sort_keys=True, separators=(",", ":"))
        header = json.dumps({"__metadata__": {"fc": text}} | header)
    raw = header.encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + body


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(data: bytes) -> str:
    """The code with which both readers refuse a file; of the views no library checks the layout once more."""
    codes = []
    for read in (unpack_tensors, view_tensors):
        with pytest.raises(Malformed) as refused:
            read(data)
        codes.append(refused.value.code)
    assert codes[0] == codes[1]
    return codes[0]


@given(TENSORS)
def test_tensors_are_unpacked_bit_by_bit(tensors: dict[str, Any]) -> None:
    data = pack_tensors(tensors, kind="delta", codec="f32", schema=SCHEMA, base="zero")
    back, meta = unpack_tensors(data)
    assert meta == TensorFileMeta(kind="delta", codec="f32", schema=SCHEMA, base="zero")
    assert set(back) == set(tensors)
    for name, array in tensors.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        assert back[name].tobytes() == array.tobytes()


@given(TENSORS)
def test_views_have_the_values_of_the_copies_and_lie_in_the_file(tensors: dict[str, Any]) -> None:
    data = pack_tensors(tensors, kind="model", codec="f32", schema=SCHEMA)
    (views, meta), (copies, same) = view_tensors(data), unpack_tensors(data)
    assert meta == same
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in views.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in copies.items()
    }
    whole = np.frombuffer(data, np.uint8)
    assert all(np.shares_memory(view, whole) for view in views.values())


@given(TENSORS)
def test_the_order_of_the_tensors_given_changes_no_byte(tensors: dict[str, Any]) -> None:
    backwards = dict(reversed(tensors.items()))
    given_, again = (pack_tensors(t, kind="model", codec="f32", schema=SCHEMA) for t in (tensors, backwards))
    assert given_ == again


GOOD = file_of({"a": entry()})


def test_a_file_by_hand_is_read() -> None:
    tensors, meta = unpack_tensors(GOOD)
    assert tensors["a"].tolist() == [0, 0]
    assert meta.base is None


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": entry("BF16", (4,))},
        {"a": entry("F4")},
        {"a": entry(shape=(0,), offsets=(0, 0))},
        {"a": entry(shape=(0,), offsets=(0, 0)), "b": entry()},
        {"a": entry(shape=(-2,))},
        {"a": entry(shape=(True, 2))},
        {"a": entry(shape=(2.0,))},
        {"a": entry(shape=[1] * 8 + [2])},
        {"a": entry(shape=2)},
        {"a": entry(shape=(3,))},
        {"a": entry(offsets=(0, 16))},
        {"a": entry(offsets=(-8, 0))},
        {"a": entry(offsets=(8, 0))},
        {"a": entry(offsets=(0, 8, 8))},
        {"a": entry(offsets=8)},
        {"a": entry(offsets=(0, 8.0))},
        {"a": entry(offsets=(0.0, 8))},
        {"a": entry(shape=(1,), offsets=(0, 4)), "b": entry(shape=(1,), offsets=(0, 4))},
        {"a": entry(shape=(1,), offsets=(4, 8))},
        {"a": entry(shape=(1,), offsets=(0, 4))},
        {"a": entry("I8", (1,), (0, 1)), "b": entry("F32", (1,), (1, 5)), "c": entry("I8", (3,), (5, 8))},
        {"a": entry() | {"extra": 1}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": []},
        {"a": entry(dtype=["F32"])},  # type: ignore[arg-type]
        {},
    ],
)
def test_a_layout_out_of_order_is_a_bad_schema(tensors: dict[str, Any]) -> None:
    assert refusal(file_of(tensors)) == "bad_schema"


@pytest.mark.parametrize(
    ("fc", "code"),
    [
        (FC | {"kind": "pickle"}, "bad_schema"),
        (FC | {"kind": 1}, "bad_schema"),
        (FC | {"codec": 1}, "bad_schema"),
        (FC | {"schema": 1}, "bad_schema"),
        (FC | {"codec": "zip"}, "bad_codec"),
        (FC | {"v": 2}, "bad_version"),
        (FC | {"v": True}, "bad_version"),
        (FC | {"base": "zero"}, "bad_codec"),
        (FC | {"kind": "delta"}, "bad_codec"),
        (FC | {"kind": "delta", "base": "start"}, "bad_codec"),
        (FC | {"schema": "0"}, "bad_schema"),
        (FC | {"colour": "red"}, "bad_schema"),
        ({"v": 1}, "bad_schema"),
        ([], "bad_schema"),
        ("not json", "bad_schema"),
        (json.dumps(FC), "bad_schema"),
    ],
)
def test_a_file_that_does_not_say_what_it_is_is_refused(fc: object, code: str) -> None:
    assert refusal(file_of({"a": entry()}, fc=fc)) == code


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 8,
        GOOD[:-1],
        GOOD + b"\0",
        file_of('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        file_of('{"__metadata__":{"fc":"{}","other":""},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        file_of('{"__metadata__":{"fc":5}}'),
        file_of('{"__metadata__":[]}'),
        file_of("[]"),
        file_of('{"a":1,"a":2}'),
        (len(GOOD) - 15).to_bytes(8, "little") + GOOD[8:-8] + b" " + GOOD[-8:],
        file_of("   {}"),
    ],
)
def test_a_file_without_its_frame_is_a_bad_schema(data: bytes) -> None:
    assert refusal(data) == "bad_schema"


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"a": np.zeros(0, np.float32)},
        {"a": np.zeros(1, np.complex64)},
        {"a": np.zeros((1,) * 9, np.float32)},
        {"a": np.zeros(1, np.uint16)},
        {str(i): np.zeros(1, np.int8) for i in range(4097)},
    ],
)
def test_nothing_is_packed_that_would_be_refused(tensors: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        pack_tensors(tensors, kind="model", codec="f32", schema=SCHEMA)


def test_a_file_has_4096_tensors_at_most() -> None:
    most = {str(i): np.full(1, i % 100, np.int8) for i in range(4_096)}
    back, _ = unpack_tensors(pack_tensors(most, kind="model", codec="f32", schema=SCHEMA))
    assert back == most
    assert refusal(file_of({str(i): entry("I8", (1,), (i, i + 1)) for i in range(4_097)}, bytes(4_097))) == "bad_schema"


def test_a_header_has_1_mib_at_most() -> None:
    text = GOOD[8:-8].decode()
    assert unpack_tensors(file_of(text.ljust(1 << 20)))[0]["a"].tolist() == [0, 0]
    assert refusal(file_of(text.ljust((1 << 20) + 8))) == "bad_schema"


def test_a_transposed_array_is_packed_in_its_own_order() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    back, _ = unpack_tensors(pack_tensors({"a": array}, kind="model", codec="f32", schema=SCHEMA))
    assert np.array_equal(back["a"], array)
