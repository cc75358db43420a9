"""What users have, as columns of arrays: torch, numpy, pandas, Hugging Face, files. No library of these is imported."""

# ruff: noqa: ANN401 - the objects of other libraries have no types here

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import numpy as np

from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.samples.input_parts import Parts, describe_arrays, pack_arrays
from edge_client.protocol.task import Array
from emulator.api.data.unread import (
    MAKE_NUMBERS,
    NO_STREAM,
    STREAM,
    check_by,
    check_column,
    check_no_pixels_among_others,
    check_order,
    check_pair,
    holds_samples,
    is_frame,
    is_hugging_face,
    no_data_set,
    no_samples,
)
from export.plugins import nearest_name_hint

INPUT_COLUMNS = ("x", "image", "img", "pixel_values", "features", "data", "inputs")
LABEL_COLUMNS = ("y", "label", "labels", "target", "targets", "class", "fine_label")
SHOWN = 5  # columns that an error names
BATCH = 1_000  # rows of a Hugging Face data set that are decoded at once
LONG = 5_000  # samples that take long enough to show how far the reading is
Column = str | int | None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """`x` [n, ...] raw, `y` [n, ...] raw, `by` [n]: to whom each sample belongs; `kind` is what they came from.

    `classes` are the names of the labels, where the source has them; `by_name` is the name of the column. `names` are
    those of the columns of x, in order, where x is a table. `parts`: the arrays that x was packed of, if it was.
    `left_out`: other columns of the table that are no numbers, and what they are.
    """

    x: Array
    y: Array
    by: Array | None = None
    kind: str = "arrays"
    by_name: str = ""
    classes: Sequence[str] = ()
    names: Sequence[str] = ()
    parts: Parts = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


def read_columns(data: Any, *, x: Any = None, y: Column = None, by: Any = None) -> Columns:
    """Read what a user has. `x`, `y`, `by` name columns; `by` may be an array [n]. Raises UsageError, ConfigError."""
    named = by if isinstance(by, (str, int)) else None
    found = _reader(data)(data, x, y, named)
    if named is None and by is not None:
        check_by(by, getattr(data, "columns", getattr(data, "column_names", ())))
        check_order("by", data[0] if isinstance(data, (tuple, list)) and data else data, by)
        found = replace(found, by=as_array(by))
        if found.by is not None and found.by.ndim != 1:
            raise ConfigError(f"by is {found.by.dtype} {list(found.by.shape)}", hint="give one value for each sample")
    found = replace(found, y=as_numbers(found.y))
    if not (found.x.ndim and found.y.ndim):
        raise ConfigError("x or y is a single value, no array", hint="write fc.fleet((x, y), ...): two arrays")
    lengths = {"x": len(found.x), "y": len(found.y), **({} if found.by is None else {"by": len(found.by)})}
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ConfigError(f"columns of different lengths: {told}", hint="give one value for each sample")
    if not len(found.x):
        raise no_samples()
    return found


def as_array(value: Any) -> Array:
    """A tensor, an image, a column or a list as an array; an image has its channels first."""
    if hasattr(value, "toarray") or getattr(value, "is_sparse", False):
        raise ConfigError("a sparse matrix", hint="make it dense: x.toarray(), or x.to_dense() of a tensor")
    if hasattr(value, "detach"):
        held = value.detach().cpu().resolve_conj().resolve_neg()
        return np.asarray((held.float() if str(held.dtype) == "torch.bfloat16" else held).numpy())
    if hasattr(value, "getbands"):
        return channels_first(np.asarray(value))
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        raise ConfigError("masked values", hint="fill these values in, or drop the samples")
    try:
        return np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except ValueError:
        hint = "give all samples one shape: resize or pad them"
        raise ConfigError("a list of values of different shapes", hint=hint) from None


def is_missing(label: Any) -> bool:
    """Whether a label is None, NaN, NaT or NA of pandas."""
    if label is None:
        return True
    try:
        return bool(label != label)  # noqa: PLR0124 - only what is no value differs from itself
    except TypeError:  # NA is neither equal nor different
        return True
    except (ValueError, RuntimeError):  # an array or a tensor of several
        return False


def _labels(value: Any) -> Array:
    """Labels as an array. NumPy would make the text 'nan' of NaN in a list of texts."""
    found = as_array(value)
    return np.asarray(value, dtype=object) if found.dtype.kind in "US" and isinstance(value, (list, tuple)) else found


def as_numbers(y: Array) -> Array:
    """What are all numbers in an array of objects, as an array of numbers; other arrays as they are."""
    if y.dtype != object or not all(isinstance(value, Number) for value in y.flat):
        return y
    found = np.array(y.tolist())
    return y.astype(np.float64) if found.dtype == object else found  # numbers of decimals and fractions


def read_inputs(x: Any, wanted: Parts | None = None) -> tuple[Array, Parts]:
    """Samples as one array, packed where they are a dict of arrays by name. -> (x, its parts).

    `wanted`: the parts that are expected. Raises UsageError for arrays that cannot be packed, or are others.
    """
    if not isinstance(x, Mapping):
        return as_array(x), ()
    arrays = {str(name): as_array(values) for name, values in x.items()}
    try:
        return pack_arrays(arrays, wanted), describe_arrays(arrays)
    except ValueError as wrong:
        raise UsageError(str(wrong), hint="give a dict with an array [n, ...] for each input of the model") from None


def channels_first(pixels: Array) -> Array:
    """[..., height, width] or [..., height, width, channels] -> [..., channels, height, width]."""
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)  # noqa: PLR2004 - a grey image


def _reader(data: Any) -> Callable[[Any, Any, Column, Column], Columns]:
    if is_frame(data):
        return _frame
    if is_hugging_face(data) and hasattr(data, "__len__"):
        return _hugging_face
    if hasattr(data, "dataset") and hasattr(data, "collate_fn"):
        return _loader
    if isinstance(data, (tuple, list)):
        return _items if holds_samples(data) else _pair
    if isinstance(data, (Mapping, np.ndarray)) or hasattr(data, "detach") or hasattr(data, "get_group"):
        raise no_data_set(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _items
    raise no_data_set(data)


def _pair(data: Any, x: Any, y: Column, by: Column) -> Columns:
    check_pair(data)
    names = _names_of(data[0]) if len(data) == 2 and is_frame(data[0]) else []  # noqa: PLR2004 - x and y
    if len(data) != 2 or (x is not None and not names) or y is not None:  # noqa: PLR2004
        hint = "write fc.fleet((x, y), ...): two arrays, and no names of columns"
        if isinstance(x, list):
            hint = "give x a data frame with these columns everywhere, or an array everywhere: x.to_numpy()"
            raise UsageError(f"{len(data)} arrays, and the columns {', '.join(map(str, x[:SHOWN]))}", hint=hint)
        raise UsageError(f"{len(data)} arrays", hint=hint)
    if by is not None:
        raise UsageError(f"arrays have no column {by!r}", hint="write by=array, with one value for each sample")
    check_order("y", data[0], data[1])
    if not names:
        samples, parts = read_inputs(data[0])
        return Columns(x=samples, y=_labels(data[1]), parts=parts)
    listed = [_column("x", name, names, ()) for name in ([x] if isinstance(x, str) else x or names)]
    if more := [name for name in names if name not in listed]:
        hint = "give all devices, and the test data, the same columns"
        raise ConfigError(f"there is a column {more[0]!r} beside {', '.join(listed[:SHOWN])}", hint=hint)
    return Columns(x=frame_inputs(data[0], listed), y=_labels(data[1]), names=listed)


def _names_of(frame: Any) -> list[str]:
    """The names of a data frame's columns; none where they are its numbers, or not all different."""
    names = [str(name) for name in frame.columns]
    return [] if len({*names}) < len(names) or names == [*map(str, range(len(names)))] else names


def _frame(data: Any, x: Any, y: Column, by: Column) -> Columns:
    data = _by_text(data)
    if not len(data):
        raise no_samples()
    names = list(data.columns)
    label = _column("y", y, names, LABEL_COLUMNS)
    mine = None if by is None else _column("by", by, names, ())
    left_out: dict[str, str] = {}
    if x is None:
        x = frame_columns(data, label, mine)
        left_out = {name: _kind(data[name]) for name in names if name not in {*x, label, mine}}
    listed = [_column("x", name, names, ()) for name in ([x] if isinstance(x, str) else x)]
    if not listed:
        told = "".join(f", {name} ({kind})" for name, kind in left_out.items())
        raise UsageError(f"no column of numbers is left for x{told}", hint=MAKE_NUMBERS)
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
    label = _column("y", y, list(data.columns), LABEL_COLUMNS)
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


def _hugging_face(data: Any, x: Any, y: Column, by: Column) -> Columns:
    if isinstance(data, Mapping):
        raise UsageError(
            f"these are {len(data)} data sets", hint="write fc.fleet(data['train'], test=data['test'], ...)"
        )
    names = list(data.column_names)
    label = _column("y", y, names, LABEL_COLUMNS)
    mine = None if by is None else _column("by", by, names, ())
    if x is None or isinstance(x, str):
        column = _column("x", x, names, INPUT_COLUMNS)
        inputs, listed = data.select_columns([column]).with_format("numpy"), [column]
    else:
        listed = [_column("x", name, names, ()) for name in x]
        inputs = data.select_columns(listed).with_format("numpy")
    image = type(data.features[listed[0]]).__name__ == "Image"

    def rows() -> Iterable[Array]:
        for batch in inputs.iter(BATCH):
            table = batch[listed[0]] if len(listed) == 1 else np.stack([batch[name] for name in listed], axis=1)
            yield from (channels_first(np.asarray(row)) for row in table) if image else table

    return Columns(
        x=_filled(rows(), len(data)),
        y=as_array(data.with_format("numpy")[label][:]),
        by=None if mine is None else np.asarray(data.with_format(None)[mine][:]),
        kind=getattr(data.info, "dataset_name", None) or "Hugging Face data set",
        by_name=str(mine or ""),
        classes=tuple(getattr(data.features[label], "names", ()) or ()),
        names=listed if len(listed) > 1 else (),
    )


def _loader(data: Any, x: Any, y: Column, by: Column) -> Columns:
    """The samples of a DataLoader as it collates them, in the order of its data set."""
    if not (hasattr(data.dataset, "__getitem__") and hasattr(data.dataset, "__len__")):
        raise UsageError(STREAM, hint=NO_STREAM)
    sampler = getattr(getattr(data, "batch_sampler", None), "sampler", data.sampler)
    index = getattr(sampler, "indices", None)
    places = range(len(data.dataset)) if index is None else sorted(int(i) for i in index)
    if getattr(data.collate_fn, "__name__", "") == "default_collate":
        return _rows(data.dataset, places, x, y, by)
    return _rows(_Collated(data), places, x, y, by)


@dataclass(frozen=True)
class _Collated:
    """A DataLoader's data set, each sample as the loader's own `collate_fn` makes it."""

    loader: Any

    def __getitem__(self, place: int) -> Any:
        batch = self.loader.collate_fn([self.loader.dataset[place]])
        return {name: v[0] for name, v in batch.items()} if isinstance(batch, Mapping) else tuple(v[0] for v in batch)


def _items(data: Any, x: Any, y: Column, by: Column) -> Columns:
    tensors = getattr(data, "tensors", None)  # a torch TensorDataset: no copy
    if tensors is not None and len(tensors) == 2 and (x, y, by) == (None, None, None):  # noqa: PLR2004 - x and y
        return Columns(x=as_array(tensors[0]), y=as_array(tensors[1]), kind="tensors")
    return _rows(data, range(len(data)), x, y, by)


def _rows(data: Any, places: Sequence[int], x: Any, y: Column, by: Column) -> Columns:
    """A data set sample by sample: each a tuple (x, y, ...) or a mapping."""
    if not len(places):
        raise no_samples()
    first = data[places[0]]
    keys: list[str | int]
    if isinstance(first, Mapping):
        names = [str(name) for name in first]
        keys = [_column("x", x, names, INPUT_COLUMNS), _column("y", y, names, LABEL_COLUMNS)]
        keys += [] if by is None else [_column("by", by, names, ())]
    elif isinstance(first, (tuple, list)) and len(first) > 1:
        keys = [0 if x is None else x, 1 if y is None else y, *([] if by is None else [by])]
        if wrong := [key for key in keys if not isinstance(key, int) or not 0 <= key < len(first)]:
            hint = f"use a number from 0 to {len(first) - 1}, or by=array with one value for each sample"
            raise UsageError(f"a sample is a tuple of {len(first)} and has no {wrong[0]!r}", hint=hint)
    elif hasattr(data, "to_pandas"):
        raise no_data_set(data)
    else:
        raise UsageError(f"a sample is {type(first).__name__}", hint="the data set gives (x, y), or a dict with both")
    labels: list[Array] = []
    owners: list[object] = []

    def rows() -> Iterable[Array]:
        for place in places:
            sample = data[place]
            if is_missing(sample[keys[1]]):
                raise ConfigError(f"sample {place} has no label", hint="drop the samples whose y is None or NaN")
            labels.append(as_array(sample[keys[1]]))
            if labels[-1].shape != labels[0].shape:
                told = f"the label of sample {place} has shape {list(labels[-1].shape)}, not {list(labels[0].shape)}"
                raise ConfigError(told, hint="give each sample one class, or targets of one shape")
            owners.extend(sample[key] for key in keys[2:])
            yield as_array(sample[keys[0]])

    values = _filled(rows(), len(places))
    owner = np.stack([as_array(v) for v in owners]) if owners else None
    name = keys[2] if len(keys) > 2 and isinstance(keys[2], str) else ""  # noqa: PLR2004 - the third names the device
    return Columns(x=values, y=np.stack(labels), by=owner, kind=type(data).__name__, by_name=name)


def _filled(rows: Iterable[Array], n: int) -> Array:
    """[n, ...] of rows that come one by one; shows how far it is where there are many."""
    from rich.progress import track

    out: Array = np.empty(0)
    shown = track(rows, description="reading samples", total=n, transient=True, disable=n < LONG)
    for i, row in enumerate(shown):
        if i == 0:
            out = np.empty((n, *row.shape), row.dtype)
        if row.shape != out.shape[1:]:
            told = f"sample {i} has shape {list(row.shape)}, the first has {list(out.shape[1:])}"
            raise ConfigError(told, hint="give all samples one shape: resize or pad them")
        if row.dtype != out.dtype:
            check_no_pixels_among_others(i, row.dtype, out.dtype)
            out = out if np.can_cast(row.dtype, out.dtype) else out.astype(np.promote_types(row.dtype, out.dtype))
        out[i] = row
    return out


def _column(what: str, asked: Column, names: Sequence[str], usual: Sequence[str]) -> str:
    """The column that was asked for, or the one with a usual name. Raises UsageError."""
    check_column(what, asked)
    if asked is None:
        axes = {"x", "y", "z"} <= {*names}
        found = [name for name in usual if name in names and not (axes and name == "y")]
        if what == "y" and len(found) > 1:
            raise UsageError(f"{' and '.join(map(repr, found[:2]))} may both be y", hint="name it: y=...")
        if not found:
            raise UsageError(f"no column of {list(names)} is surely {what}", hint=f"name it: {what}=...")
        return found[0]
    if str(asked) not in names:
        raise UsageError(f"there is no column {asked!r} for {what}", hint=nearest_name_hint(str(asked), names))
    return str(asked)
