"""Several arrays of a sample in one row of numbers: how a model with several inputs has the one port x.

    x [n, numbers]: every array of a sample flat, one after another in the order of their names

Whole numbers and booleans become floating point numbers, which hold them exactly up to 2^24. The compiled graph cuts
the row apart again and gives each array its kind and shape (export/compiler/signatures/packed_inputs.py), so engines,
devices and codecs see one array, as of any other model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.task import MAX_DIMS, Array

MAX_PARTS = 256
FROM_PARTS = "x."  # before a part's name in a file of arrays: "x.ids"
WHOLE_MAX = 1 << 24  # whole numbers up to here are exact in float32
KINDS = {"f": "float", "i": "int", "u": "int", "b": "bool"}  # of numpy -> of a part

_NAME = validators.matching("[A-Za-z_][A-Za-z0-9_]{0,63}")
_KIND = validators.one_of("float", "int", "bool")
_SHAPE = validators.list_of(validators.integer(1), 0, MAX_DIMS)
_BELOW = validators.integer(0, WHOLE_MAX)


@dataclass(frozen=True, kw_only=True)
class InputPart:
    """One array of a sample: the name of forward's parameter, its shape without the batch, and its kind.

    `kind`: "float" (the program's dtype), "int" (int64) or "bool". `below`: whole numbers of drawn examples are from 0
    to below this; 0 for other kinds.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "float"
    below: int = 0

    def __post_init__(self) -> None:
        """Raise Malformed for what program.json could not hold."""
        _NAME(self.name, "a part's name")
        _KIND(self.kind, "a part's kind")
        _SHAPE(list(self.shape), "a part's shape")
        _BELOW(self.below, "a part's whole numbers")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.kind} {list(self.shape)}"

    def to_json(self) -> list[Any]:
        return [self.name, self.kind, list(self.shape), self.below]

    @staticmethod
    def from_json(row: Any) -> InputPart:  # noqa: ANN401 - JSON
        """Read what `to_json` wrote. Raises Malformed, TypeError or ValueError."""
        name, kind, shape, below = row
        return InputPart(name=name, kind=kind, shape=tuple(_SHAPE(shape, "a part's shape")), below=below)


Parts = tuple[InputPart, ...]


def row_size(parts: Sequence[InputPart]) -> int:
    """Numbers of one packed sample."""
    return sum(part.size for part in parts)


def read_parts(rows: Any, shape: Sequence[int]) -> Parts:  # noqa: ANN401 - JSON
    """The parts of a program whose samples are [*shape]; () for None. Raises Malformed or ValueError."""
    if rows is None:
        return ()
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_PARTS:
        raise ValueError(f"expected 1 to {MAX_PARTS} parts of a sample")
    parts = tuple(InputPart.from_json(row) for row in rows)
    names = [part.name for part in parts]
    if names != sorted(set(names)) or tuple(shape) != (row_size(parts),):
        raise ValueError(f"parts {', '.join(names)} of {row_size(parts)} numbers for samples of shape {list(shape)}")
    return parts


def describe_arrays(arrays: Mapping[str, Array]) -> Parts:
    """The parts that named arrays [n, ...] are. Raises ValueError for arrays that cannot be packed."""
    if not arrays or len(arrays) > MAX_PARTS:
        raise ValueError(f"{len(arrays)} arrays, expected 1 to {MAX_PARTS}")
    found = []
    for name, values in sorted(arrays.items()):
        if values.dtype.kind not in KINDS or values.ndim < 1:
            raise ValueError(f"{name} is {values.dtype} {list(values.shape)}; give numbers or booleans [n, ...]")
        kind = KINDS[values.dtype.kind]
        below = min(int(values.max(initial=0)) + 1, WHOLE_MAX) if kind == "int" else {"float": 0, "bool": 2}[kind]
        _check_range(name, values)
        try:
            found.append(InputPart(name=name, shape=tuple(values.shape[1:]), kind=kind, below=below))
        except Malformed as wrong:
            raise ValueError(wrong.message) from None
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {n}" for name, n in sorted(lengths.items()))
        raise ValueError(f"arrays of different lengths: {told}")
    return tuple(found)


def pack_arrays(arrays: Mapping[str, Array], parts: Parts | None = None) -> Array:
    """Named arrays [n, ...] -> x [n, numbers], float32, or float64 where one of them is.

    `parts`: those that are expected. Raises ValueError for arrays that cannot be packed or are not these.
    """
    found = describe_arrays(arrays)
    if parts is not None and (wrong := other_parts(parts, found)):
        raise ValueError(wrong)
    wide = any(values.dtype == np.float64 for values in arrays.values())
    rows = [arrays[part.name].reshape(len(arrays[part.name]), -1) for part in found]
    return np.concatenate([row.astype(np.float64 if wide else np.float32) for row in rows], axis=1)


def other_parts(wanted: Sequence[InputPart], found: Sequence[InputPart]) -> str:
    """Why arrays `found` are not those of a program, and what to correct; "" if they are.

    Whole numbers and booleans are numbers where numbers are wanted, and whole numbers and booleans are one.
    """
    mine, theirs = ({part.name: part for part in parts} for parts in (wanted, found))
    if missing := sorted(mine.keys() - theirs.keys()):
        return f"samples lack the array {missing[0]!r}: the model takes {', '.join(map(str, wanted))}"
    if more := sorted(theirs.keys() - mine.keys()):
        return f"samples have an array {more[0]!r}: the model takes {', '.join(map(str, wanted))}"
    for name, part in mine.items():
        if theirs[name].shape != part.shape:
            return f"{name} is {list(theirs[name].shape)} in each sample, the model takes {list(part.shape)}"
        if theirs[name].kind == "float" != part.kind:
            return f"{name} holds floating point numbers, the model takes whole ones: save it as integers"
    return ""


def joined_parts(one: Parts, other: Parts) -> Parts:
    """The parts of both: whole numbers go as far as any, and beside booleans they stay whole numbers.

    Raises ValueError for other arrays or kinds.
    """
    if wrong := other_parts(one, other) or other_parts(other, one):
        raise ValueError(wrong)
    return tuple(
        replace(a, below=max(a.below, b.below), kind=a.kind if a.kind == b.kind else "int")
        for a, b in zip(one, other, strict=True)
    )


def read_arrays(arrays: Mapping[str, Array]) -> tuple[Array, Parts]:
    """X of a file of arrays, and its parts where it holds them as `x.name`. Raises ValueError, KeyError without any."""
    if "x" in arrays:
        return arrays["x"], ()
    named = {name.removeprefix(FROM_PARTS): arrays[name] for name in arrays if name.startswith(FROM_PARTS)}
    if not named:
        raise KeyError("the array 'x'")
    return pack_arrays(named), describe_arrays(named)


def _check_range(name: str, values: Array) -> None:
    if values.dtype.kind in "iu" and values.size and max(abs(int(values.min())), abs(int(values.max()))) > WHOLE_MAX:
        raise ValueError(f"{name} holds whole numbers above {WHOLE_MAX}, which float32 rounds")
