"""Data frames, as of pandas, as columns of arrays. Pandas is not imported."""

# ruff: noqa: ANN401 - the objects of other libraries have no types here

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np

from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.task import Array
from emulator.api.data.columns import LABEL_COLUMNS, Column, Columns, as_array, find_column, is_missing
from emulator.api.data.unread import MAKE_NUMBERS, no_samples

ARRAYS = "arrays"  # a kind of column


def names_of(frame: Any) -> list[str]:
    """The names of a data frame's columns; none where they are its numbers, or not all different."""
    names = [str(name) for name in frame.columns]
    return [] if len({*names}) < len(names) or names == [*map(str, range(len(names)))] else names


def read_frame(data: Any, x: Any, y: Column, by: Column) -> Columns:
    """The columns `x`, `y` and `by`; without `x` all others that are numbers. Raises UsageError, ConfigError."""
    data = _by_text(data)
    if not len(data):
        raise no_samples()
    names = list(data.columns)
    label = find_column("y", y, names, LABEL_COLUMNS)
    mine = None if by is None else find_column("by", by, names, ())
    left_out: dict[str, str] = {}
    if x is None:
        x = frame_columns(data, label, mine)
        left_out = {name: _kind(data[name]) for name in names if name not in {*x, label, mine}}
    listed = [find_column("x", name, names, ()) for name in ([x] if isinstance(x, str) else x)]
    if not listed:
        told = "".join(f", {name} ({kind})" for name, kind in left_out.items())
        arrays = next((name for name, kind in left_out.items() if kind == ARRAYS), None)
        hint = MAKE_NUMBERS if arrays is None else f"name the one of arrays: x={arrays!r}"
        raise UsageError(f"no column of numbers is left for x{told}", hint=hint)
    return Columns(
        x=frame_inputs(data, listed),
        y=as_array(data[label]),
        by=None if mine is None else as_array(data[mine]),
        kind="data frame",
        by_name=str(mine or ""),
        names=listed,
        left_out=left_out,
    )


def frame_columns(data: Any, y: Column, by: Column = None) -> list[str]:
    """The columns of numbers of a data frame, apart from those of labels and devices."""
    data = _by_text(data)
    label = find_column("y", y, list(data.columns), LABEL_COLUMNS)
    return [name for name in data.columns if name not in (label, by) and data[name].dtype.kind in "biuf"]


def _kind(column: Any) -> str:
    """What a column of a data frame has that is no number."""
    known = {"M": "dates", "m": "durations"}
    if column.dtype.kind in known:
        return known[column.dtype.kind]
    if column.dtype.name == "category":
        return "categories"
    if any(isinstance(value, str) for value in column):
        return "text"
    if column.dtype == object and any(np.ndim(value) for value in column):
        return ARRAYS
    if column.dtype == object and all(isinstance(value, Number) or is_missing(value) for value in column):
        return "numbers as objects"
    return str(column.dtype)


def _by_text(data: Any) -> Any:
    """The data frame with texts as the names of its columns. Raises UsageError where two have one name."""
    names = [str(name) for name in data.columns]
    if twice := sorted(name for name, n in Counter(names).items() if n > 1):
        raise UsageError(f"{Counter(names)[twice[0]]} columns are called {twice[0]!r}", hint="rename or drop them")
    return data.set_axis(names, axis=1)


def frame_inputs(data: Any, names: Sequence[str]) -> Array:
    """X [n, columns] of a data frame, or [n, ...] of one column of arrays. Raises ConfigError for no numbers."""
    data = _by_text(data)
    cells = [data[name] for name in names]
    if len(cells) == 1 and cells[0].dtype == object:
        return as_array([as_array(cell) for cell in cells[0]])
    for name, cell in zip(names, cells, strict=True):
        if cell.dtype.kind not in "biuf":
            hint = f"leave it out, x=[...], or make it numbers: {MAKE_NUMBERS}"
            raise ConfigError(f"column {name!r} of x is {_kind(cell)}", hint=hint)
        # of a column of floats alone: True of pyarrow counts as infinity
        if missing := int((cell.isna() | (cell.isin([np.inf, -np.inf]) if cell.dtype.kind == "f" else False)).sum()):
            told = f"column {name!r} of x holds NaN or infinity in {missing} of {len(cell)} samples"
            raise ConfigError(
                told, hint="fill these values in, drop the samples, or name what x is without it: x=[...]"
            )
    return np.stack([as_array(cell) for cell in cells], axis=1)
