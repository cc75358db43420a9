"""Several arrays of a sample as one row of numbers: nothing is lost, and what does not fit is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from edge_client.errors import Malformed
from edge_client.protocol.program import Program
from edge_client.protocol.samples.input_parts import (
    InputPart,
    describe_arrays,
    joined_parts,
    other_parts,
    pack_arrays,
    read_parts,
    row_size,
)
from edge_client.protocol.task import Array
from tests.support import softmax_program

KINDS = st.sampled_from([np.dtype(name) for name in ("float32", "int64", "int16", "uint8", "bool")])
NAMES = st.sampled_from(["ids", "mask", "meta", "image"])


@st.composite
def samples(draw: Any) -> dict[str, Array]:  # noqa: ANN401 - hypothesis's
    n, names = draw(st.integers(1, 4)), draw(st.sets(NAMES, min_size=1))
    found = {}
    for name in sorted(names):
        kind, rest = draw(KINDS), draw(st.lists(st.integers(1, 3), max_size=2))
        of: dict[str, Any] = {"elements": st.integers(-(1 << 24), 1 << 24)} if kind == np.int64 else {}
        found[name] = draw(arrays_of.arrays(kind, (n, *rest), **of))
    return found


@given(arrays=samples())
def test_a_row_holds_every_array_and_its_parts_say_where(arrays: dict[str, Array]) -> None:
    x, parts = pack_arrays(arrays), describe_arrays(arrays)
    assert x.dtype == np.float32
    assert x.shape == (len(next(iter(arrays.values()))), row_size(parts))
    at = 0
    for part in parts:
        back = x[:, at : at + part.size].reshape(-1, *part.shape).astype(arrays[part.name].dtype)
        np.testing.assert_array_equal(back, arrays[part.name])
        at += part.size
    assert read_parts([part.to_json() for part in parts], [row_size(parts)]) == parts
    assert joined_parts(parts, parts) == parts
    assert not other_parts(parts, parts)


IDS = np.array([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"ids": IDS, "mask": IDS[:1]}, "ids has 2, mask has 1"),
        ({"ids": IDS + (1 << 24)}, "above 16777216"),
        ({"ids": IDS.astype(str)}, "ids is <U"),
        ({"two words": IDS}, "name"),
        ({}, "0 arrays"),
    ],
)
def test_arrays_that_cannot_be_packed_are_named(arrays: dict[str, Array], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pack_arrays(arrays)


def test_arrays_of_another_model_are_refused_with_what_is_wrong() -> None:
    parts = describe_arrays({"ids": IDS, "meta": np.ones(2)})
    cases: list[tuple[dict[str, Array], str]] = [
        ({"ids": IDS}, "lack the array 'meta'"),
        ({"ids": IDS, "meta": np.ones(2), "mask": IDS}, "an array 'mask'"),
        ({"ids": IDS[:, :1], "meta": np.ones(2)}, r"ids is \[1\] in each sample"),
        ({"ids": IDS.astype(np.float32), "meta": np.ones(2)}, "ids holds floating point"),
    ]
    for arrays, says in cases:
        with pytest.raises(ValueError, match=says):
            pack_arrays(arrays, parts)
    assert pack_arrays({"ids": IDS, "meta": np.array([1, 0])}, parts).shape == (2, 3)  # whole numbers are numbers, too


ROWS: list[list[Any]] = [["ids", "int", [2], 5], ["meta", "float", [], 0]]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        ROWS[:1],
        ROWS[::-1],
        [ROWS[0], ROWS[0]],
        [["ids", "int", [3], 5]] * 300,
        [["ids", "text", [3], 0]],
        [["ids", "int", [3], -1]],
        [["ids", "int", [3], (1 << 24) + 1]],
        [["ids/0", "int", [3], 0]],
        [["ids", "int", [3, 0], 0]],
        [["ids", "int", [2**60, 2**60], 0]],
        [["ids", "int", 3, 0]],
        [["ids"]],
        "ids",
    ],
)
def test_program_json_with_other_parts_than_its_samples_is_refused(rows: Any) -> None:  # noqa: ANN401 - JSON
    made = replace(softmax_program.program(), input=(3,)).to_json() | {"parts": rows}
    with pytest.raises(Malformed):
        Program.from_json(made)


def test_program_json_keeps_the_parts() -> None:
    parts = (InputPart(name="ids", shape=(2,), kind="int", below=5), InputPart(name="meta", shape=()))
    program = replace(softmax_program.program(), input=(3,), parts=parts)
    assert Program.from_json(program.to_json()) == program


def test_parts_are_joined_as_far_as_either_goes_and_only_of_one_kind() -> None:
    few, many = (describe_arrays({"ids": np.array([[0, top]])}) for top in (4, 9))
    assert [part.below for part in joined_parts(few, many)] == [10]
    assert [part.below for part in joined_parts(many, few)] == [10]
    real = describe_arrays({"ids": np.array([[0.5, 1.0]])})
    for one, other in ((few, real), (real, few)):
        with pytest.raises(ValueError, match="ids holds floating point"):
            joined_parts(one, other)


def test_whole_numbers_beside_booleans_stay_whole_numbers_and_booleans_alone_stay_booleans() -> None:
    numbers, flags = describe_arrays({"mask": np.array([[0, 7]])}), describe_arrays({"mask": np.array([[True, False]])})
    for one, other in ((numbers, flags), (flags, numbers)):
        assert [(part.kind, part.below) for part in joined_parts(one, other)] == [("int", 8)]
    assert [part.kind for part in joined_parts(flags, flags)] == ["bool"]
