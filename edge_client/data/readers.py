"""Files that become samples: arrays, tables and pictures of one folder, the newest of them, and whether any are new.

    train.npz            x [n, ...] and y, as `numpy.savez` writes them; or x.ids, x.mask, ..., the arrays of a model
                         that takes several, and y; with or instead of
    train/NAME.npz       the same in pieces
    train/NAME.x.npy     with NAME.y.npy
    train/NAME.csv       a table with a header; schema.toml says which columns mean what
    train/CLASS/NAME.png one sample a file; schema.toml says the classes in their order (images.py)

and the same for `test`. Files are only read, never changed or removed.
"""

from __future__ import annotations

import csv
import logging
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data import images
from edge_client.errors import ConfigError
from edge_client.printable import first_of
from edge_client.protocol.samples.input_parts import Parts, joined_parts, read_arrays
from edge_client.protocol.task import Array
from edge_client.toml_files import read_toml

log = logging.getLogger(__name__)
SCHEMA_FILE = "schema.toml"
FORMAT_HINT = "x is float [n, ...], y is [n] integers or float targets; docs/flash-a-board.md describes the files"
UNREAD_HINT = "docs/flash-a-board.md lists the files that are; a picture needs the folder of its class"
UNFINISHED = (".tmp", ".part", ".new")  # endings of what is still being written
NUMPY_HINT = "write it again, with numpy.savez(path, x=samples, y=labels)"
CSV_KEYS = ("features", "label", "targets", "classes", "shape", "mean", "scale")
MAX_LINE_CHARS = 1 << 20  # characters of a CSV field
FileStamp = tuple[str, int, int, int]  # name, size, ctime (a copy may keep the next one), mtime
FolderSignature = tuple[FileStamp, ...]  # of every file


class NoArrays(ValueError):
    """A file that is not of numpy, or is damaged, or holds what is no array of numbers."""


@contextmanager
def reading_arrays() -> Iterator[None]:
    """Raise NoArrays where numpy says so, in words that advise nothing unsafe."""
    try:
        yield
    except (zipfile.BadZipFile, EOFError, zlib.error, RuntimeError, tokenize.TokenError) as wrong:
        raise NoArrays(f"it is damaged, or no file of numpy ({wrong})") from wrong
    except ValueError as wrong:
        if "pickle" not in str(wrong):
            raise
        objects = str(wrong).startswith("Object arrays")
        raise NoArrays(
            "an array holds objects, not numbers" if objects else "it is damaged, or no file of numpy"
        ) from None


@dataclass(frozen=True)
class Samples:
    """`x` [n, ...] and `y` [n, ...]; `parts`: the arrays that x was packed of, if it was."""

    x: Array
    y: Array
    parts: Parts = ()


Held = dict[FileStamp, Samples]  # views of samples by file, as `gather_samples` left them


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file, or a pair of them: what changes with it, and how it is read."""

    stamp: FileStamp
    read: Callable[[], Samples]

    @property
    def name(self) -> str:
        return self.stamp[0]


def list_files(folder: Path, split: str) -> list[DataFile]:
    """Every file of "train" or "test", the oldest first. Raises ConfigError for one that schema.toml must explain."""
    schema = _schema(folder)
    found: list[DataFile] = []
    whole, pieces = folder / f"{split}.npz", folder / split
    if whole.is_file():
        found.append(DataFile(stamp=_stamp(folder, whole), read=lambda: _npz(whole)))
    for path in sorted(pieces.rglob("*")) if pieces.is_dir() else ():
        reader = _reader(path, pieces, schema) if path.is_file() and not _is_hidden(path, pieces) else None
        if reader is not None:
            with suppress(FileNotFoundError):  # it was removed just now
                found.append(DataFile(stamp=_stamp(folder, path), read=reader))
    return sorted(found, key=lambda part: (part.stamp[3], part.name))


def unread_files(folder: Path, split: str) -> list[str]:
    """The files that look like samples of "train" or "test", and are not read, by their names."""
    read = {part.name for part in list_files(folder, split)}
    beside = (path for path in folder.glob(f"{split}.*") if path.suffix != ".npz")
    within = (path for path in (folder / split).rglob("*") if not path.name.endswith(".y.npy"))
    found = (path for path in (*beside, *within) if path.is_file() and path.suffix not in UNFINISHED)
    names = sorted(str(path.relative_to(folder)) for path in found if not _is_hidden(path, folder))
    return [name for name in names if name not in read]


def gather_samples(parts: Sequence[DataFile], limit: int, between: Callable[[], object], held: Held) -> Samples:
    """The newest `limit` samples of the parts (0: all), the oldest first. Raises ConfigError naming a wrong part.

    `between` is called before each part. What is `held` of an earlier call is not read again; then this call's is held.
    Some damaged pictures are left out.
    """
    taken, damaged = list[Samples](), dict[str, ConfigError]()
    count = 0
    for part in reversed(parts):
        if limit and count >= limit:
            break
        between()
        try:
            taken.append(_checked(part, taken[0] if taken else None, held))
        except ConfigError as wrong:
            if not isinstance(wrong.__cause__, images.DamagedPicture):
                raise
            damaged[part.name] = wrong
            continue
        count += len(taken[-1].x)
    sound = _leave_out(damaged, parts)
    taken.reverse()
    x, y = (np.concatenate([getattr(each, name) for each in taken]) for name in ("x", "y"))
    held.clear()
    at = len(x)
    for part, each in zip(reversed(sound), reversed(taken), strict=False):
        end, at = at, at - len(each.x)
        if not part.name.endswith(".npy"):  # whose labels are in another file
            held[part.stamp] = Samples(x[at:end], y[at:end], each.parts)
    return Samples(x[-limit:], y[-limit:], taken[0].parts) if limit else Samples(x, y, taken[0].parts)


def _leave_out(damaged: Mapping[str, ConfigError], parts: Sequence[DataFile]) -> list[DataFile]:
    """Tell of damaged pictures; -> the others. Raises ConfigError where most are damaged, or all of a class."""
    sound = [part for part in parts if part.name not in damaged]
    known = {Path(part.name).parent for part in sound}
    for name, wrong in damaged.items():
        if len(damaged) > len(sound) or Path(name).parent not in known:
            raise ConfigError(wrong.message, hint="copy it again, save it as PNG, or remove it")
    if damaged:
        told = len(damaged), len(parts), first_of([*damaged], 9), wrong.__cause__
        log.warning("%d of %d files are left out: %s (%s)", *told)
    return sound


def folder_signature(folder: Path) -> FolderSignature:
    """What changes when a sample is added, changed or removed: names, sizes and times of the files."""
    found: list[FileStamp] = []
    for root, _, names in os.walk(folder):  # which passes over a folder that is gone in between
        for path in (Path(root) / name for name in names if not name.startswith(".")):
            with suppress(OSError):
                found.append(_stamp(folder, path))
    return tuple(sorted(found))


def read_inputs_without_labels(path: Path) -> Samples | None:
    """The samples of an .npz file without y, which is zero; None for any other file, which `list_files` is for."""
    try:
        with path.open("rb") as file, reading_arrays():
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile) or "y" in arrays:
                return None
            x, parts = read_arrays(arrays)
            return Samples(to_float(x), np.zeros(len(x), np.int64), parts)
    except (KeyError, ValueError, OSError):
        return None


def to_float(x: Array) -> Array:
    """Whole numbers as float32; floating point as it is, and what is neither, which `Dataset` refuses."""
    return x.astype(np.float32) if x.dtype.kind in "iub" else x


def to_labels(y: Array) -> Array:
    """Classes as int64; targets as they are."""
    return y.astype(np.int64) if np.issubdtype(y.dtype, np.integer) else y


def _is_hidden(path: Path, folder: Path) -> bool:
    """Whether a name below the folder begins with a dot, as that of a file browser's thumbnails."""
    return any(name.startswith(".") for name in path.relative_to(folder).parts)


def _stamp(folder: Path, path: Path) -> FileStamp:
    status = path.stat()
    return str(path.relative_to(folder)), status.st_size, status.st_ctime_ns, status.st_mtime_ns


def _reader(path: Path, pieces: Path, schema: Mapping[str, Any]) -> Callable[[], Samples] | None:
    """How a file is read; None for one that is no samples."""
    if path.suffix.lower() == ".npz":
        return lambda: _npz(path)
    if path.name.endswith(".x.npy"):
        return lambda: Samples(_npy(path), _npy(path.with_name(path.name.removesuffix(".x.npy") + ".y.npy")))
    if path.suffix.lower() == ".csv":
        return lambda: _csv(path, _table(schema, "csv", CSV_KEYS, path))
    if path.suffix.lower() in images.SUFFIXES and path.parent != pieces:
        return lambda: Samples(
            *images.read_image(path, _table(schema, "images", images.IMAGE_KEYS, path), label=path.parent.name)
        )
    return None


def _checked(part: DataFile, other: Samples | None, held: Held) -> Samples:
    try:
        found = held.get(part.stamp) or part.read()
        x, y = to_float(found.x), to_labels(found.y)
        if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
            raise ValueError(f"x is {x.shape} and y is {y.shape}; the first dimensions must agree")  # noqa: TRY301 - joined below
        if other is not None:
            _check_alike(x, y, found.parts, other)
    except KeyError as missing:
        raise ConfigError(f"{part.name} lacks {missing.args[0]}", hint=FORMAT_HINT) from missing
    except NoArrays as wrong:
        raise ConfigError(f"cannot use {part.name}: {wrong}", hint=f"{NUMPY_HINT}: {FORMAT_HINT}") from wrong
    except (ValueError, TypeError, OSError, csv.Error) as wrong:
        raise ConfigError(f"cannot use {part.name}: {wrong}", hint=FORMAT_HINT) from wrong
    return Samples(x, y, found.parts)


def _check_alike(x: Array, y: Array, parts: Parts, other: Samples) -> None:
    """Raise ValueError for samples that are not of the kind of others."""
    if [part.name for part in parts] != [part.name for part in other.parts]:
        mine, theirs = (", ".join(map(str, each)) or "one array x" for each in (parts, other.parts))
        raise ValueError(f"samples are {mine}, others are {theirs}")
    joined_parts(parts, other.parts)
    if (x.shape[1:], y.shape[1:]) != (other.x.shape[1:], other.y.shape[1:]):
        raise ValueError(f"samples are {list(x.shape[1:])}, others are {list(other.x.shape[1:])}")
    if y.dtype.kind != other.y.dtype.kind:
        raise ValueError(f"y is {y.dtype}, others are {other.y.dtype}")


def _npz(path: Path) -> Samples:
    with path.open("rb") as file, reading_arrays():
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("one array, not an archive of arrays")  # noqa: TRY004 - joins numpy's own
        x, parts = read_arrays(arrays)
        if "y" not in arrays:
            raise KeyError("the array 'y'")
        return Samples(x, arrays["y"], parts)


def _npy(path: Path) -> Array:
    with path.open("rb") as file, reading_arrays():
        array = np.load(file, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("an archive of arrays, not one array")  # noqa: TRY004 - joins numpy's own
    return array


def _csv(path: Path, table: Mapping[str, Any]) -> Samples:
    """A table with a header -> x [n, ...] float32 and y: [n] int64 classes, or [n, t] float32 targets."""
    csv.field_size_limit(MAX_LINE_CHARS)
    features, label, targets = list(table["features"]), table.get("label"), table.get("targets")
    if (label is None) == (targets is None):
        raise ValueError(f"{SCHEMA_FILE}: [csv] needs either label or targets")
    with path.open(encoding="utf-8-sig", newline="") as file:  # Excel writes a mark before the first name
        try:
            rows = list(_rows(csv.DictReader(file), [*features, *(targets or [label])]))
        except UnicodeDecodeError:
            raise ValueError("this text is not UTF-8; save the table as CSV in UTF-8") from None
    width = len(features)
    x = np.array([_numbers(row[:width], features, line) for line, row in rows], dtype=np.float32).reshape(-1, width)
    x = ((x - np.float32(table.get("mean", 0.0))) / np.float32(table.get("scale", 1.0))).astype(np.float32)
    if "shape" in table:
        x = x.reshape(len(x), *map(int, table["shape"]))
    if targets is not None:
        y = np.array([_numbers(row[width:], targets, line) for line, row in rows], dtype=np.float32)
        return Samples(x, y.reshape(-1, len(targets)))
    names = [str(name) for name in table["classes"]]
    unknown = sorted({row[width] for _, row in rows} - set(names))
    if unknown:
        raise ValueError(f"the class {unknown[0]!r} is not among the classes of {SCHEMA_FILE}")
    return Samples(x, np.array([names.index(row[width]) for _, row in rows], dtype=np.int64))


def _numbers(values: Sequence[str], columns: Sequence[str], line: int) -> list[float]:
    """The numbers of one row. Raises ValueError where one is missing, as an empty cell or NaN, with its column."""
    numbers = []
    for value, column in zip(values, columns, strict=True):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            what = f"is {value!r}, not a finite number" if value.strip() else "is empty"
            raise ValueError(f"line {line}: {column!r} {what}; fill the cell in, or leave out the line or the column")
        numbers.append(number)
    return numbers


def _rows(reader: csv.DictReader[str], columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The line and the wanted columns of each row; an empty line is none."""
    absent = [name for name in columns if name not in (reader.fieldnames or ())]
    if absent:
        raise ValueError(
            f"no column {absent[0]!r}, which {SCHEMA_FILE} names; it has {', '.join(reader.fieldnames or ())}"
        )
    if twice := [name for name in columns if (reader.fieldnames or ()).count(name) > 1]:
        raise ValueError(f"two columns are called {twice[0]!r}")
    for row in reader:
        if any(row.get(None, ())):  # as of decimal commas, which cut a number in two
            columns_named = len(reader.fieldnames or ())
            raise ValueError(f"line {reader.line_num} is too long: the header names {columns_named} columns")
        values = [row[name] for name in columns]
        if any(value is None for value in values):
            raise ValueError(f"line {reader.line_num} is too short")
        yield reader.line_num, values


def class_names(folder: Path) -> tuple[str, ...]:
    """What schema.toml calls the classes 0, 1, ...; empty where it names none."""
    for table in _schema(folder).values():
        if isinstance(table, dict) and isinstance(names := table.get("classes"), list):
            return tuple(map(str, names))
    return ()


def _schema(folder: Path) -> Mapping[str, Any]:
    path = folder / SCHEMA_FILE
    if not path.is_file():
        return {}
    return read_toml(path, hint="docs/flash-a-board.md describes it")


def _table(schema: Mapping[str, Any], name: str, keys: Sequence[str], path: Path) -> Mapping[str, Any]:
    """The table of schema.toml that explains a file."""
    table = schema.get(name)
    if not isinstance(table, dict):
        wanted = f"a table [{name}], which says what {path.suffix} files mean"
        if not schema:
            raise ValueError(f"{SCHEMA_FILE} beside the folder of samples is missing or empty; it needs {wanted}")
        raise ValueError(f"{SCHEMA_FILE} has no table [{name}], which says what {path.suffix} files mean")  # noqa: TRY004
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise ValueError(f"{SCHEMA_FILE}: [{name}] has no key {unknown[0]!r}; it has {', '.join(keys)}")
    needed = ("size", "classes") if name == "images" else ("features", "classes") if "label" in table else ("features",)
    if lacking := [key for key in needed if key not in table]:
        raise ValueError(f"{SCHEMA_FILE}: [{name}] has no {lacking[0]!r}")
    lists = ("size", "features", "targets", "classes", "shape")
    if plain := [key for key in lists if not isinstance(table.get(key, []), list)]:
        raise ValueError(f"{SCHEMA_FILE}: [{name}] {plain[0]} is a list, in [ ]")
    classes = [str(each) for each in table.get("classes", ())]
    if twice := [each for each in classes if classes.count(each) > 1]:
        raise ValueError(f"{SCHEMA_FILE}: [{name}] names the class {twice[0]!r} twice")
    return table
