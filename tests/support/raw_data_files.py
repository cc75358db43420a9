"""Tiny files in the real formats, written as their publishers write them, and small data sets made by hand."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.protocol.task import Array
from emulator.data.loaders.folder import DataFolderReader
from emulator.data.loaders.samples import DataSet, RawSamples

CODES = {"uint8": 8, "int32": 12}


def unknown(path: Path) -> DataFolderReader:
    """A data folder of which no checksum is known."""
    return DataFolderReader(path=path, known={})


def idx_bytes(array: Array) -> bytes:
    header = bytes([0, 0, CODES[str(array.dtype)], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(path: Path, array: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(idx_bytes(array)) if path.suffix == ".gz" else idx_bytes(array))


def write_mnist(folder: Path, home: str, *, train: int = 40, test: int = 10, suffix: str = ".gz") -> None:
    rng = np.random.default_rng(0)
    for name, n in (("train", train), ("t10k", test)):
        images = rng.integers(256, size=(n, 28, 28), dtype=np.uint8)
        write_idx(folder / home / f"{name}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / home / f"{name}-labels-idx1-ubyte{suffix}", (np.arange(n) % 10).astype(np.uint8))


def write_leaf(folder: Path, home: str, users: dict[str, tuple[list[Any], list[int]]]) -> None:
    """One JSON file per part; the same users and samples in both."""
    held = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    raw = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": held}
    for part in ("train", "test"):
        (folder / home / part).mkdir(parents=True, exist_ok=True)
        (folder / home / part / "all_data_0.json").write_text(json.dumps(raw))


def numbered(train: int = 2_000, test: int = 400, *, classes: int = 10, users: int = 0) -> DataSet:
    """A sample's own number is its only feature, and its class that number modulo `classes`. Test counts on."""

    def part(begin: int, n: int) -> RawSamples:
        number = np.arange(begin, begin + n)
        return RawSamples(
            x=number[:, None].astype(np.float64), y=number % classes, user=number // 7 % users if users else None
        )

    return DataSet(train=part(0, train), test=part(train, test) if test else None, ready=lambda x: x)


def images(n: int = 60) -> DataSet:
    """Random square images of four classes, in two parts."""
    rng = np.random.default_rng(1)
    x = rng.integers(256, size=(n, 1, 4, 4), dtype=np.uint8)
    y = np.arange(n) % 4
    return DataSet(train=RawSamples(x=x, y=y), test=RawSamples(x=x[::2], y=y[::2]))
