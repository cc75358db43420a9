"""What users have, as columns of arrays: torch, numpy, pandas, Hugging Face, files. No library of these is imported."""

# ruff: noqa: ANN401 - the objects of other libraries have no types here

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.samples.input_parts import Parts, describe_arrays, pack_arrays
from edge_client.protocol.task import Array
from emulator.api.data.columns import (
    LABEL_COLUMNS,
    Column,
    Columns,
    as_array,
    as_numbers,
    channels_first,
    find_column,
    is_missing,
)
from emulator.api.data.frames import frame_inputs, names_of, read_frame
from emulator.api.data.unread import (
    NO_STREAM,
    STREAM,
    check_by,
    check_no_pixels_among_others,
    check_order,
    check_pair,
    holds_samples,
    is_frame,
    is_hugging_face,
    no_data_set,
    no_samples,
)

INPUT_COLUMNS = ("x", "image", "img", "pixel_values", "features", "data", "inputs")
SHOWN = 5  # columns that an error names
BATCH = 1_000  # rows of a Hugging Face data set that are decoded at once
LONG = 5_000  # samples that take long enough to show how far the reading is


def read_columns(data: Any, *, x: Any, y: Column, by: Any = None) -> Columns:
    """Read what a user has. `x`, `y`, `by` name columns; `by` may be an array [n]. Raises UsageError, ConfigError."""
    named = by if isinstance(by, (str, int)) else None
    found = _reader(data)(data, x, y, named)
    if named is None and by is not None:
        check_by(by, getattr(data, "columns", getattr(data, "column_names", ())))
        check_order("by", data[0] if isinstance(data, (tuple, list)) and data else data, by)
        found = replace(found, by=as_array(by))
        if found.by is not None and found.by.ndim != 1:
            raise ConfigError(f"by is {found.by.dtype} {list(found.by.shape)}", hint="give one value for each sample")
    found = replace(found, x=as_numbers(found.x), y=as_numbers(found.y))
    if not (found.x.ndim and found.y.ndim):
        raise ConfigError("x or y is a single value, no array", hint="write fc.fleet((x, y), ...): two arrays")
    lengths = {"x": len(found.x), "y": len(found.y), **({} if found.by is None else {"by": len(found.by)})}
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ConfigError(f"columns of different lengths: {told}", hint="give one value for each sample")
    if not len(found.x):
        raise no_samples()
    return found


def _labels(value: Any) -> Array:
    """Labels as an array. NumPy would make the text 'nan' of NaN in a list of texts."""
    found = as_array(value)
    return np.asarray(value, dtype=object) if found.dtype.kind in "US" and isinstance(value, (list, tuple)) else found


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


def _reader(data: Any) -> Callable[[Any, Any, Column, Column], Columns]:
    if is_frame(data):
        return read_frame
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
    names = names_of(data[0]) if len(data) == 2 and is_frame(data[0]) else []  # noqa: PLR2004 - x and y
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
    listed = [find_column("x", name, names, ()) for name in ([x] if isinstance(x, str) else x or names)]
    if more := [name for name in names if name not in listed]:
        hint = "give all devices, and the test data, the same columns"
        raise ConfigError(f"there is a column {more[0]!r} beside {', '.join(listed[:SHOWN])}", hint=hint)
    return Columns(x=frame_inputs(data[0], listed), y=_labels(data[1]), names=listed)


def _hugging_face(data: Any, x: Any, y: Column, by: Column) -> Columns:
    if isinstance(data, Mapping):
        raise UsageError(
            f"these are {len(data)} data sets", hint="write fc.fleet(data['train'], test=data['test'], ...)"
        )
    names = list(data.column_names)
    label = find_column("y", y, names, LABEL_COLUMNS)
    mine = None if by is None else find_column("by", by, names, ())
    if x is None or isinstance(x, str):
        column = find_column("x", x, names, INPUT_COLUMNS, [label, *([] if mine is None else [mine])])
        inputs, listed = data.select_columns([column]).with_format("numpy"), [column]
    else:
        listed = [find_column("x", name, names, ()) for name in x]
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
    keys = _keys_of(data, data[places[0]], x, y, by)
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


def _keys_of(data: Any, sample: Any, x: Any, y: Column, by: Column) -> list[Any]:
    """Under which a sample has x, y and, where it is asked for, its device: names in a mapping, places in a tuple."""
    if isinstance(sample, Mapping):
        names = [str(name) for name in sample]
        known = [find_column("y", y, names, LABEL_COLUMNS), *([] if by is None else [find_column("by", by, names, ())])]
        return [find_column("x", x, names, INPUT_COLUMNS, known), *known]
    if isinstance(sample, (tuple, list)) and len(sample) > 1:
        places = [0 if x is None else x, 1 if y is None else y, *([] if by is None else [by])]
        if wrong := [key for key in places if not isinstance(key, int) or not 0 <= key < len(sample)]:
            hint = f"use a number from 0 to {len(sample) - 1}, or by=array with one value for each sample"
            raise UsageError(f"a sample is a tuple of {len(sample)} and has no {wrong[0]!r}", hint=hint)
        return places
    if hasattr(data, "to_pandas"):
        raise no_data_set(data)
    raise UsageError(f"a sample is {type(sample).__name__}", hint="the data set gives (x, y), or a dict with both")


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
