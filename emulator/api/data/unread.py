"""What users bring that is not read as it is, and what to write instead. No library of these is imported."""

# ruff: noqa: ANN401 - the objects of other libraries have no types here

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.errors import ConfigError, UsageError

PAIR = 2
SHOWN = 5  # names that an error lists
STREAM = "a stream has no order that a seed could repeat"
NO_STREAM = "give a data set with a length: list(stream), or a map-style Dataset"
MAKE_NUMBERS = (
    "pd.to_numeric makes numbers of text that holds some, pd.get_dummies of names and categories, and "
    "(dates - first).dt.total_seconds() of dates"
)
ONE_KIND = "make them one kind: uint8 are pixels and become 0 to 1, other numbers stay what they are"
DEVICES_TESTS = "two dicts, fc.fleet({'a': train}, test={'a': test})"
BY_DEVICE = (
    "give each device its data in a dict, as dict(enumerate(data)); test=0.2 of these are then held out. For test data "
    f"of each device give {DEVICES_TESTS}"
)


def is_frame(data: Any) -> bool:
    """Whether it is a pandas DataFrame, or acts as one."""
    return hasattr(data, "iloc") and hasattr(data, "columns")


def is_hugging_face(data: Any) -> bool:
    """Whether it is a data set, or a stream, of Hugging Face."""
    return hasattr(data, "column_names") and hasattr(data, "with_format")


def is_data_set(data: Any) -> bool:
    """Whether it has samples with their labels, and is no array, list or mapping of some."""
    if hasattr(data, "collate_fn") or is_hugging_face(data):
        return True
    arrays = ("__array__", "to_numpy", "detach", "toarray", "shape")
    if isinstance(data, (Sequence, Mapping)) or any(hasattr(data, name) for name in arrays):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not is_frame(value)


def _is_pair_of_arrays(value: Any) -> bool:
    """Whether it is (x, y) of several samples: as many labels as samples."""
    if not (isinstance(value, (tuple, list)) and len(value) == PAIR and all(map(_is_array, value))):
        return False
    shapes = [tuple(part.shape) for part in value]
    return all(shapes) and shapes[0][0] == shapes[1][0]


def holds_samples(data: Any) -> bool:
    """Whether a list has samples one by one, each a tuple (x, y, ...) or a mapping, as `list(stream)` has."""
    if not isinstance(data, list) or len(data) <= PAIR:
        return False
    first = data[0]
    if isinstance(first, tuple):
        return len(first) >= PAIR and not _is_pair_of_arrays(first) and not any(map(is_data_set, first))
    return isinstance(first, Mapping) and not any(is_frame(part) or is_data_set(part) for part in first.values())


def check_pair(data: Sequence[Any]) -> None:
    """Raise UsageError for data of several devices, or for training and test data, in the place of (x, y)."""
    if not data:
        return
    if all(map(_is_pair_of_arrays, data)):
        raise UsageError(f"{len(data)} pairs of arrays", hint=BY_DEVICE)
    kinds = " and ".join(sorted({type(part).__name__ for part in data}))
    if len(data) != PAIR and all(is_data_set(part) or is_frame(part) for part in data):
        raise UsageError(f"{len(data)} data sets ({kinds})", hint=BY_DEVICE)
    if len(data) == PAIR and all(map(is_data_set, data)):
        hint = (
            "for test data of their own write fc.fleet(train, test=test, by='column'); for devices give a dict with "
            f"one data set for each, of which test=0.2 is held out, or {DEVICES_TESTS}"
        )
        raise UsageError(f"two data sets ({kinds}) in the place of samples and labels", hint=hint)


def check_devices(data: Mapping[Any, Any]) -> None:
    """Raise UsageError for a dict of columns in the place of a dict with the data of each device."""
    if data and all(map(_is_array, data.values())):
        names = ", ".join(map(str, list(data)[:SHOWN]))
        hint = (
            "for columns write fc.fleet((data['x'], data['y']), by=data['who']), or pandas.DataFrame(data); for "
            "devices give each its (x, y)"
        )
        raise UsageError(f"a dict of arrays: {names}", hint=hint)


def check_by(by: Any, names: Sequence[str]) -> None:
    """Raise UsageError for several columns in `by`."""
    if not isinstance(by, (list, tuple)) or not 0 < len(by) < len(names):
        return
    if all(isinstance(name, str) and name in names for name in by):
        joined = " + '-' + ".join(f"data[{name!r}].astype(str)" for name in by)
        raise UsageError(f"by names {len(by)} columns", hint=f"name one, or give their values together: by={joined}")


def check_order(name: str, data: Any, beside: Any) -> None:
    """Raise ConfigError for a column of pandas that names the rows of a data frame, and has them in another order."""
    if not is_frame(data) or not hasattr(beside, "index") or not hasattr(beside, "iloc"):
        return
    mine, theirs = data.index, beside.index
    if len(mine) != len(theirs) or mine.equals(theirs):
        return
    if mine.value_counts().to_dict() == theirs.value_counts().to_dict():  # names of several kinds cannot be sorted
        hint = f"{name}.to_numpy() takes them as they stand, {name}.loc[data.index] by their index"
        raise ConfigError(f"{name} has the rows of the data frame in another order, by its index", hint=hint)


def check_column(what: str, asked: Any) -> None:
    """Raise UsageError for what is no name of a column."""
    if asked is None or isinstance(asked, (str, int, np.integer)):
        return
    hint = f"give the name of one column: {what}='name'"
    if what == "y":
        hint = (
            "give the name of one column: y='name'; labels that are no column, and several targets, are arrays: "
            "fc.fleet((data[['a', 'b']], labels), by=...)"
        )
    elif what == "x":
        hint += "; several columns are those of a data frame: pandas.DataFrame(data)"
    raise UsageError(f"{what} is a {type(asked).__name__}", hint=hint)


def check_no_pixels_among_others(place: int, kind: np.dtype[Any], before: np.dtype[Any]) -> None:
    """Raise ConfigError for pixels beside other numbers, of which the data set's samples are one kind."""
    if np.uint8 in (kind, before):
        told = f"sample {place} is {kind}, those before are {before}"
        raise ConfigError(told, hint=ONE_KIND)


def no_data_set(data: Any) -> UsageError:
    """Why this is not read, and what to write."""
    kind = type(data).__name__
    of = f"a {kind} of {type(data).__module__.partition('.')[0]}"
    told = f"{kind} is no data set"
    hint = "give a torch Dataset or DataLoader, (x, y) arrays, a pandas or Hugging Face data set, or a folder"
    if is_hugging_face(data):  # without a length
        told, hint = STREAM, NO_STREAM
    elif hasattr(data, "collect_schema") and not hasattr(data, "to_pandas"):  # a LazyFrame of polars
        told, hint = of, "give it as a pandas data frame: data.collect().to_pandas()"
    elif hasattr(data, "to_pandas"):
        told, hint = of, "give it as a pandas data frame: data.to_pandas()"
    elif hasattr(data, "get_group"):
        told, hint = "the groups of a data frame", "give them as a dict: dict(list(data))"
    elif getattr(getattr(data, "dtype", None), "names", None):
        told, hint = "an array with named fields", "give it as a data frame: pandas.DataFrame(data)"
    elif isinstance(data, Mapping):
        told = f"a dict with {', '.join(map(str, list(data)[:SHOWN]))}"
        hint = f"give (x, y), as (data['x'], data['y']); for test data of each device give {DEVICES_TESTS}"
    elif isinstance(data, np.ndarray) or hasattr(data, "detach"):
        told, hint = "these samples have no labels", "write fc.fleet((x, y), ...), one label for each sample"
    elif hasattr(data, "__iter__") and not hasattr(data, "__len__"):
        told, hint = STREAM, NO_STREAM
    return UsageError(told, hint=hint)


def no_samples() -> ConfigError:
    """What to do about data without a single sample."""
    return ConfigError("there are no samples", hint="give at least two for each device, or leave the device out")


def no_device_folders(folder: Path) -> ConfigError:
    """Why a path has no folders of devices, and what to write."""
    if folder.is_file():
        hint = "read it first, as pandas.read_csv(path) or numpy.load(path), and give what it holds"
        return ConfigError(f"{folder} is a file", hint=hint)
    if not folder.is_dir():
        return ConfigError(f"{folder} is no folder", hint="give a folder with one subfolder for each device")
    if kind := next((kind for kind in ("csv", "parquet") if any(folder.glob(f"*.{kind}"))), ""):
        tables = f"{{file.stem: pandas.read_{kind}(file) for file in Path(folder).glob('*.{kind}')}}"
        hint = f"for a table of each device give {tables}"
        return ConfigError(f"{folder} has tables and no subfolders", hint=hint)
    return ConfigError(f"{folder} has no subfolders", hint="one for each device, with train.npz or train/ in it")
