"""What a device holds, and in which order it is read.

A folder holds `train.npz` and, if the device keeps held-out samples, `test.npz`; each has `x` [n, ...] floating point
and `y`: [n] integers for class labels, or [n, ...] float targets. Nothing here trains, sends, or knows a model.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.task import Array


@dataclass(frozen=True)
class Dataset:
    """Samples `x` [n, ...] (floating point) and `y`: [n] int64 class labels, or [n, ...] floating point targets."""

    x: Array
    y: Array

    def __post_init__(self) -> None:
        """Refuse arrays that no training step could read."""
        if self.x.ndim < 1 or self.y.ndim < 1 or len(self.x) != len(self.y):
            raise ValueError(f"x is {self.x.shape} and y is {self.y.shape}; the first dimensions must agree")
        if not np.issubdtype(self.x.dtype, np.floating):
            raise ValueError(f"x is {self.x.dtype}; use floating point numbers")
        if np.issubdtype(self.y.dtype, np.integer):
            if self.y.ndim != 1 or (len(self.y) and self.y.min() < 0):
                raise ValueError("class labels must be one integer per sample, from 0")
        elif not np.issubdtype(self.y.dtype, np.floating):
            raise ValueError(f"y is {self.y.dtype}; use integers (classes) or floating point numbers (targets)")
        for name, values in (("x", self.x), ("y", self.y)):
            if not np.isfinite(values).all():
                raise ValueError(f"{name} holds NaN or infinity")

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, kw_only=True)
class Local:
    """The data of one device; `test` is held out and never trained on."""

    train: Dataset
    test: Dataset | None = None


def load(folder: Path) -> Local:
    """Read a device's folder. Raises ConfigError with the file's name when something is missing or wrong."""
    train, test = folder / "train.npz", folder / "test.npz"
    if not train.is_file():
        raise ConfigError(
            f"no training data: {train} does not exist",
            hint="write it with numpy.savez(path, x=samples, y=labels), or correct `data` in the configuration",
        )
    return Local(train=_read(train), test=_read(test) if test.is_file() else None)


def _read(path: Path) -> Dataset:
    hint = (
        "write it with numpy.savez(path, x=samples, y=labels); x is float [n, ...], y is [n] integers or float targets"
    )
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("one array, not an archive of arrays")  # noqa: TRY301, TRY004 - joins numpy's own
            return Dataset(_float(arrays["x"]), _labels(arrays["y"]))
    except KeyError as missing:
        raise ConfigError(f"{path} lacks the array {missing}", hint=hint) from missing
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as wrong:
        raise ConfigError(f"cannot use {path}: {wrong}", hint=hint) from wrong


def _float(x: Array) -> Array:
    return x if np.issubdtype(x.dtype, np.floating) else x.astype(np.float32)


def _labels(y: Array) -> Array:
    return y.astype(np.int64) if np.issubdtype(y.dtype, np.integer) else y


def batches(n: int, batch: int, seed: int, steps: int, *, fixed: bool) -> Iterator[NDArray[np.int64]]:
    """`steps` arrays of sample indices: one PCG64(seed) permutation of n per pass, cut in order.

    The short last batch of a pass is used unless `fixed`. Raises Malformed("no_data") at once when no batch fits.
    """
    if n < 1 or (fixed and n < batch):
        raise Malformed("no_data", f"{n} samples, a batch needs {batch if fixed else 1}")
    return _cut(n, batch, seed, steps, fixed=fixed)


def _cut(n: int, batch: int, seed: int, steps: int, *, fixed: bool) -> Iterator[NDArray[np.int64]]:
    rng = np.random.Generator(np.random.PCG64(seed))
    stop = n - n % batch if fixed else n
    done = 0
    while done < steps:
        order: NDArray[Any] = rng.permutation(n)
        for at in range(0, stop, batch):
            if done == steps:
                return
            yield order[at : at + batch]
            done += 1
