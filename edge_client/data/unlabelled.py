"""A folder of samples without labels, for a device that only asks for its nearest center."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from edge_client.data.dataset import Dataset, DeviceData, load_folder
from edge_client.errors import ConfigError
from edge_client.protocol.task import Array


def load_with_or_without_labels(folder: Path) -> tuple[DeviceData, bool]:
    """The folder's samples, and whether they have labels; where they have none, y is zero. Raises ConfigError."""
    path = folder / "train.npz"
    x = _only_inputs(path) if path.is_file() else None
    if x is None:
        return load_folder(folder), True
    try:
        return DeviceData(train=Dataset(x, np.zeros(len(x), np.int64))), False
    except ValueError as wrong:
        raise ConfigError(f"cannot use {path}: {wrong}", hint="x holds samples [n, ...], floating point") from wrong


def _only_inputs(path: Path) -> Array | None:
    """The samples of a file without y; None for any other file, which `load` reads and complains about."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if not isinstance(arrays, np.lib.npyio.NpzFile) or "y" in arrays or "x" not in arrays:
                return None
            x = arrays["x"]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile):
        return None
    return x if np.issubdtype(x.dtype, np.floating) else x.astype(np.float32)
