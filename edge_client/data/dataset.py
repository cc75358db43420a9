"""The samples of a device, and the order in which training reads them.

Training samples and, if the device keeps some back, held-out ones. readers.py reads them from files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data import readers
from edge_client.errors import TOO_LITTLE_MEMORY, ConfigError, Malformed, RuntimeMissing
from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.samples.input_parts import FROM_PARTS, Parts, other_parts
from edge_client.protocol.task import I64, Array

log = logging.getLogger(__name__)
SHARES_OFF = 0.01  # by which the sum of probabilities may miss 1, as of float16


@dataclass(frozen=True, repr=False)
class Dataset:
    """Samples `x` [n, ...] (floating point) and `y`: integer class labels, or floating point targets [n, ...].

    Labels are [n], or [n, ...] for one per token or pixel, where IGNORED leaves a position out. `parts`: the arrays
    that x holds, where it was packed of several; () where nothing is known of that.
    """

    x: Array
    y: Array
    parts: Parts = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Refuse arrays that no training step could read."""
        if self.x.ndim < 1 or self.y.ndim < 1 or len(self.x) != len(self.y):
            raise ValueError(f"x is {self.x.shape} and y is {self.y.shape}; the first dimensions must agree")
        if not np.issubdtype(self.x.dtype, np.floating):
            raise ValueError(f"x is {self.x.dtype}; use floating point numbers")
        if np.issubdtype(self.y.dtype, np.integer):
            if self.y.ndim == 1 and len(self.y) and self.y.min() < 0:
                raise ValueError("class labels must be one integer per sample, from 0")
            if self.y.ndim > 1 and ((self.y < 0) & (self.y != IGNORED)).any():
                raise ValueError(f"class labels must be integers from 0, or {IGNORED} to leave a position out")
        elif not np.issubdtype(self.y.dtype, np.floating):
            raise ValueError(f"y is {self.y.dtype}; use integers (classes) or floating point numbers (targets)")
        for name, values in (("x", self.x), ("y", self.y)):
            if len(wrong := np.argwhere(~np.isfinite(values))):
                raise ValueError(f"{name} holds NaN or infinity, first in {name}{wrong[0].tolist()}")

    def __len__(self) -> int:
        return len(self.x)

    @property
    def counted(self) -> Array:
        """[n] whether a sample has a loss: all but those whose labels are IGNORED at each position."""
        labels = self.y.dtype.kind == "i"
        return (self.y != IGNORED).reshape(len(self), -1).any(axis=1) if labels else np.ones(len(self), bool)

    def __repr__(self) -> str:
        what = "classes" if np.issubdtype(self.y.dtype, np.integer) else f"targets {list(self.y.shape[1:])}"
        return f"Dataset({len(self)} sample{'s' * (len(self) != 1)} {list(self.x.shape[1:])}, {what})"


@dataclass(frozen=True, kw_only=True)
class DeviceData:
    """The data of one device; `test` is held out and never trained on. `class_names` may be empty."""

    train: Dataset
    test: Dataset | None = None
    class_names: tuple[str, ...] = field(default=(), repr=False)


def describe_misfit(program: Program, data: Dataset, *, labels: bool = True) -> str:
    """Why the program cannot read these samples, and what to correct; "" if it can. Without `labels` y is ignored."""
    if len(data) == 0:
        return "no samples on this device"
    if data.parts and not program.parts:
        named = ", ".join(f"{FROM_PARTS}{part.name}" for part in data.parts)
        return f"samples are the arrays {named}, the model takes one: save it as x"
    if data.parts and (wrong := other_parts(program.parts, data.parts)):
        return wrong
    if data.x.shape[1:] != program.input:
        if program.parts:
            wanted = ", ".join(f"{FROM_PARTS}{part}" for part in program.parts)
            return f"samples are one array x {list(data.x.shape[1:])}, the model takes several: save {wanted}"
        return _misshapen("x", "samples", data.x, program.input)
    return (_describe_other_targets(program, data.y) if labels else "") or _describe_too_large(program, data)


def _describe_too_large(program: Program, data: Dataset) -> str:
    """Of the first number that would become infinity in the program's floating point."""
    kind = np.dtype(program.dtype)
    most = np.finfo(kind).max
    for name, values in (("x", data.x), ("y", data.y)):
        if values.dtype.itemsize > kind.itemsize and max(values.max(), -values.min()) > most:
            at = np.argwhere(np.abs(values) > most)[0]
            return f"{name}{at.tolist()} is {values[tuple(at)]:.3g}, which {kind} cannot hold: scale {name}"
    return ""


def _describe_other_targets(program: Program, y: Array) -> str:
    if y.dtype.kind not in "iu":
        return _describe_other_numbers(program, y)
    if not program.has_classes:
        told = "y holds class labels, the program predicts numbers: save y as floating point targets"
        return told + (", or compile its loss with labels as `targets`" if program.own_loss else "")
    if y.shape[1:] != program.truth:
        return _misshapen("y", "labels", y, program.truth)
    most, classes = int(y.max()), program.classes
    left_out = f", and {IGNORED} to leave a position out" if program.truth else ""
    told = f"y holds the label {most}, the program has {classes} classes: use 0 to {classes - 1}{left_out}"
    return "" if most < classes else told


def _describe_other_numbers(program: Program, y: Array) -> str:
    """Of floating point y: numbers to predict, or the probabilities of classes, which sum to 1."""
    probabilities = program.loss == "cross-entropy" and not program.own_loss
    if program.has_classes and not probabilities:
        return "y holds floating point numbers, the program reads class labels: save y as integers"
    if probabilities and y.ndim == 1:
        return "y holds floating point numbers, one for each sample: save class labels as integers"
    shape = program.target if probabilities else program.truth
    if y.shape[1:] != shape:
        return _misshapen("y", "targets", y, shape)
    if not probabilities:
        return ""
    off = (np.abs(y.sum(axis=1, dtype=np.float64) - 1) > SHARES_OFF) | (y < -SHARES_OFF).any(axis=1)
    told = (
        f"y of {int(off.sum())} samples holds no probabilities of the {y.shape[1]} classes, from 0 and of sum 1: "
        "save class labels as integers; numbers to predict need a program that is compiled for squared-error"
    )
    return told if off.any() else ""


def require_fit(program: Program, local: DeviceData, *, labels: bool) -> None:
    """Raises ConfigError, with what to correct, where the program cannot read the training or the held-out samples."""
    for split, data in (("train", local.train), ("test", local.test if labels else None)):
        if data is not None and (misfit := describe_misfit(program, data, labels=labels)):
            raise ConfigError(
                misfit,
                hint=f"correct {split}.npz, or the files in {split}/; docs/bring-your-own-data.md describes them",
            )


def _misshapen(name: str, what: str, values: Array, wanted: tuple[int, ...]) -> str:
    has, reads, whole = list(values.shape[1:]), list(wanted), ", ".join(["n", *map(str, wanted)])
    return f"{name} has {what} of shape {has}, the program reads {reads}: save {name} with shape [{whole}]"


def load_folder(
    folder: Path,
    *,
    limit: int = 0,
    between: Callable[[], object] = lambda: None,
    held: tuple[readers.Held, readers.Held] | None = None,
) -> DeviceData:
    """Read a device's folder, at most the newest `limit` training samples (0: all); `between` its files is called.

    What earlier calls left in `held` is not read again. Raises ConfigError, which names the file that is wrong.
    """
    train, test = readers.list_files(folder, "train"), readers.list_files(folder, "test")
    if unread := [*readers.unread_files(folder, "train"), *readers.unread_files(folder, "test")]:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        log.warning("%s%s not read: %s", unread[0], f"{more} are" if more else " is", readers.UNREAD_HINT)
    if not train:
        missing = f"{folder / 'train.npz'} does not exist" if folder.is_dir() else f"there is no folder {folder}"
        raise ConfigError(
            f"no training data: {missing}",
            hint="write train.npz with numpy.savez(path, x=samples, y=labels), or put files into a folder train "
            "(docs/bring-your-own-data.md); another folder is named by `data` in the configuration, or by --data",
        )
    of_train, of_test = held or ({}, {})
    trained = _read(train, limit, between, of_train)
    return DeviceData(
        train=trained, test=_read(test, 0, between, of_test) if test else None, class_names=readers.class_names(folder)
    )


def load_with_or_without_labels(folder: Path) -> tuple[DeviceData, bool]:
    """The folder's samples, and whether they have labels; where they have none, y is zero. Raises ConfigError."""
    path = folder / "train.npz"
    found = readers.read_inputs_without_labels(path) if path.is_file() else None
    if found is None:
        return load_folder(folder), True
    try:
        unlabelled = Dataset(found.x, found.y, parts=found.parts)
        return DeviceData(train=unlabelled, class_names=readers.class_names(folder)), False
    except ValueError as wrong:
        raise ConfigError(f"cannot use {path}: {wrong}", hint="x holds samples [n, ...], floating point") from wrong


class DataFolder:
    """A folder of samples; `reload_if_changed` reads what has changed in it. `between` files is called."""

    def __init__(self, folder: Path, *, most: int = 0, between: Callable[[], object] = lambda: None) -> None:
        self._folder, self._most, self._between = folder, most, between
        self._seen: readers.FolderSignature | None = None
        self._schema: readers.FolderSignature = ()  # of its file, by which `_held` was read
        self._held: tuple[readers.Held, readers.Held] = {}, {}  # of the samples that `load` gave last

    def load(self) -> DeviceData:
        """Read the folder. Raises ConfigError."""
        self._seen = readers.folder_signature(self._folder)
        schema = tuple(each for each in self._seen if each[0] == readers.SCHEMA_FILE)
        train, test = self._held if schema == self._schema else ({}, {})
        held = dict(train), dict(test)
        found = load_folder(self._folder, limit=self._most, between=self._between, held=held)
        self._schema, self._held = schema, held  # not before: that of a failed try is a second copy of the samples
        return found

    def reload_if_changed(self) -> DeviceData | None:
        """The folder's samples if they have changed; None otherwise, or when they cannot be used as they are.

        Raises Malformed("no_data") where no training sample is left: a user who removes them wants them used no more.
        """
        if readers.folder_signature(self._folder) == self._seen:
            return None
        try:
            if not readers.list_files(self._folder, "train"):
                raise Malformed("no_data", "no samples on this device: its folder has no training data any more")
            return self.load()
        except (ConfigError, RuntimeMissing, MemoryError, OSError) as wrong:  # of half a file, perhaps
            told = getattr(wrong, "message", wrong) if str(wrong) else TOO_LITTLE_MEMORY
            log.warning("new samples cannot be used, so those before are: %s", told)
            return None


def _read(parts: Sequence[readers.DataFile], most: int, between: Callable[[], object], held: readers.Held) -> Dataset:
    found = readers.gather_samples(parts, most, between, held)
    try:
        return Dataset(found.x, found.y, parts=found.parts)
    except ValueError as wrong:
        raise ConfigError(f"cannot use {_why(parts, wrong)}", hint=readers.FORMAT_HINT) from wrong


def _why(parts: Sequence[readers.DataFile], wrong: ValueError) -> str:
    """The newest part whose samples are refused by themselves, and why."""
    for part in reversed(parts):
        try:
            found = part.read()
            Dataset(readers.to_float(found.x), readers.to_labels(found.y), parts=found.parts)
        except ValueError as own:  # noqa: PERF203
            return f"{part.name}: {own}"
    return f"{parts[-1].name}: {wrong}"


@dataclass(frozen=True)
class ShuffledBatches(Sequence[I64]):
    """Made while they are read: a task may ask for a million steps."""

    n: int
    batch: int
    seed: int
    steps: int
    stop: int  # of a pass

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[I64]:
        rng, done = np.random.Generator(np.random.PCG64(self.seed)), 0
        while done < self.steps:
            order: Array = rng.permutation(self.n)
            for at in range(0, self.stop, self.batch)[: self.steps - done]:
                yield order[at : at + self.batch]
                done += 1

    @cached_property
    def _all(self) -> list[I64]:
        return list(self)

    def __getitem__(self, at: Any) -> Any:  # noqa: ANN401 - one, or some
        return self._all[at]


def batches(n: int, batch: int, seed: int, steps: int, *, fixed: bool) -> ShuffledBatches:
    """`steps` arrays of sample indices: one PCG64(seed) permutation of n per pass, cut in order.

    The short last batch of a pass is used unless `fixed`. Raises Malformed("no_data") when no batch fits.
    """
    if n < 1 or (fixed and n < batch):
        raise Malformed("no_data", f"{n} samples, a batch needs {batch if fixed else 1}")
    return ShuffledBatches(n, batch, seed, steps, n - n % batch if fixed else n)
