"""Fashion-MNIST, MNIST with the writers of QMNIST, EMNIST letters, and CIFAR-10 from the data folder. Raw pixels."""

from __future__ import annotations

import numpy as np

from edge_client.errors import ConfigError
from edge_client.protocol.task import I64, Array
from emulator.data.loaders import idx
from emulator.data.loaders.folder import DataFolderReader
from emulator.data.loaders.samples import DataSet, RawSamples, concatenate, to_centered_range, to_unit_range

RECORD_BYTES = 1 + 3 * 32 * 32  # CIFAR-10: a label and three planes
MAX_RECORDS = 10_000
JPEG_NOTE = "images went through JPEG, so they are not the published pixels"
UPPER, LETTERS = 10, 26  # EMNIST by class: digits 0..9, then A..Z, then a..z
MAX_EMNIST_BYTES = 1 << 30


def fashion_mnist(folder: DataFolderReader) -> DataSet:
    """60,000 and 10,000 pictures of clothes in ten classes, [1, 28, 28]."""
    return _mnist_like(folder, "fashion-mnist")


def mnist(folder: DataFolderReader) -> DataSet:
    """60,000 and 10,000 handwritten digits, [1, 28, 28]."""
    return _mnist_like(folder, "mnist")


def mnist_writers(folder: DataFolderReader) -> DataSet:
    """MNIST with the NIST writer of every image as its user, and as domain 0 census employees, 1 students (QMNIST).

    No writer is in both official parts, so there is one part, and a device tests on a fifth of its own images.
    """
    plain = mnist(folder)
    parts = []
    for name, part in (("train", plain.train), ("test", plain.test)):
        file = f"mnist/qmnist-{name}-labels-idx2-int"
        table = _array(folder, file, dims=2)
        if part is None or len(table) < len(part) or table.shape[1] < 3 or not (table[: len(part), 0] == part.y).all():  # noqa: PLR2004 - digit, series, writer
            raise folder.format_error(file, "these are not the extended labels of the MNIST images beside them")
        table = table[: len(part)].astype(np.int64)  # the test file goes on with 50,000 images that MNIST lacks
        parts.append(RawSamples(x=part.x, y=part.y, user=table[:, 2], domain=(table[:, 1] != 0).astype(np.int64)))
    return DataSet(train=concatenate(*parts), ready=plain.ready)


def emnist_letters(folder: DataFolderReader) -> DataSet:
    """EMNIST by class without the digits: 26 letters, domain 0 lower case and 1 upper case, upright, 0..1 (FedSoft)."""
    parts = []
    for name in ("train", "test"):
        x = _array(folder, f"emnist/emnist-byclass-{name}-images-idx3-ubyte", dims=3, limit=MAX_EMNIST_BYTES)
        y = _labels(folder, f"emnist/emnist-byclass-{name}-labels-idx1-ubyte", len(x), classes=UPPER + 2 * LETTERS)
        keep = np.flatnonzero(y >= UPPER)
        upright = x[keep].transpose(0, 2, 1)[:, None]  # the file holds its images transposed
        upper = (y[keep] < UPPER + LETTERS).astype(np.int64)
        parts.append(RawSamples(x=np.ascontiguousarray(upright), y=(y[keep] - UPPER) % LETTERS, domain=upper))
    return DataSet(train=parts[0], test=parts[1], ready=to_unit_range)


def cifar10(folder: DataFolderReader) -> DataSet:
    """50,000 and 10,000 colour pictures in ten classes, [3, 32, 32]; from the binary version, or from JPEG copies."""
    bins = [f"cifar10/cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
    if folder.has(bins[0]):
        train, test = (
            concatenate(*(_records(folder, name) for name in names))
            for names in (bins, ["cifar10/cifar-10-batches-bin/test_batch.bin"])
        )
        return DataSet(train=train, test=test, ready=to_centered_range)
    copies = "cifar10/cifar10_from_jpeg_delta.npz"
    if folder.has(copies):
        held = folder.arrays(copies)
        train, test = (_from_planes(held[f"q_{part}"], held[f"y_{part}"]) for part in ("train", "test"))
        return DataSet(train=train, test=test, ready=to_centered_range, note=JPEG_NOTE)
    if folder.has("cifar10/cifar-10-batches-py/data_batch_1"):
        raise ConfigError(
            f"{folder.path / 'cifar10'} holds the Python version of CIFAR-10: pickles, which can run code",
            hint="get the binary version, cifar-10-binary.tar.gz, from https://www.cs.toronto.edu/~kriz/cifar.html",
        )
    raise folder.missing_file_error(bins[0])


def _mnist_like(folder: DataFolderReader, home: str) -> DataSet:
    parts = []
    for name in ("train", "t10k"):
        x = _array(folder, f"{home}/{name}-images-idx3-ubyte", dims=3)
        y = _labels(folder, f"{home}/{name}-labels-idx1-ubyte", len(x), classes=10)
        parts.append(RawSamples(x=x[:, None], y=y))
    return DataSet(train=parts[0], test=parts[1], ready=to_centered_range)


def _array(folder: DataFolderReader, name: str, *, dims: int, limit: int = 1 << 26) -> Array:
    try:
        found = idx.parse_idx(folder.read(name, limit=limit))
    except ValueError as wrong:
        raise folder.format_error(name, wrong) from wrong
    if found.ndim != dims or not found.size:
        raise folder.format_error(name, f"shape {found.shape}, expected {dims} dimensions and at least one sample")
    return found


def _labels(folder: DataFolderReader, name: str, n: int, *, classes: int) -> I64:
    y = _array(folder, name, dims=1).astype(np.int64)
    if len(y) != n or y.min() < 0 or y.max() >= classes:
        raise folder.format_error(name, f"{len(y)} labels up to {y.max()} for {n} images of {classes} classes")
    return y


def _records(folder: DataFolderReader, name: str) -> RawSamples:
    data = folder.read(name, limit=RECORD_BYTES * MAX_RECORDS)
    if not data or len(data) % RECORD_BYTES:
        raise folder.format_error(name, f"{len(data)} bytes are no whole number of records of {RECORD_BYTES}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, RECORD_BYTES)
    if rows[:, 0].max() > 9:  # noqa: PLR2004 - ten classes
        raise folder.format_error(name, f"label {rows[:, 0].max()}, but CIFAR-10 has ten classes")
    return RawSamples(x=rows[:, 1:].reshape(-1, 3, 32, 32), y=rows[:, 0].astype(np.int64))


def _from_planes(q: Array, y: Array) -> RawSamples:
    """[3, n, 32, 32] planes G, R - G, B - G, differenced along both image axes modulo 256 -> [n, 3, 32, 32] RGB."""
    planes = np.cumsum(np.cumsum(q, axis=2, dtype=np.uint8), axis=3, dtype=np.uint8)
    planes[1:] += planes[0]
    return RawSamples(x=np.ascontiguousarray(planes[[1, 0, 2]].transpose(1, 0, 2, 3)), y=y.astype(np.int64))
