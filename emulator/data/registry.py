"""Data sets by name: the reader of each, and its default model and partition.

loaders/ reads the formats; partition_schemes.py splits a data set over devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_client.errors import UsageError
from emulator.data.loaders import images, leaf, speech, tables
from emulator.data.loaders.folder import DataFolderReader, data_folder
from emulator.data.loaders.samples import DataSet
from export.plugins import find_by_name

UNNAMED = ("arrays", "tensors", "data frame")  # what `fc.fleet` calls samples to which its user gives no name


@dataclass(frozen=True, kw_only=True)
class DataSetEntry:
    """How to read a data set from a folder (and a seed, where it is drawn), and what a simulation takes by default.

    `files`: whether it is read from that folder, and not made or installed.
    """

    read: Callable[[DataFolderReader, int], DataSet]
    model: str  # "": none of ours fits, name your own
    partition: str
    devices: int
    files: bool = True


WECFL_PARTITION = "cluster-dirichlet:groups=10,alpha-group=0.1,alpha=10"
DATA_SETS: dict[str, DataSetEntry] = {
    "digits": DataSetEntry(
        read=lambda _, __: tables.digits(),
        model="digits-mlp",
        partition="label-permutations:groups=3",
        devices=12,
        files=False,
    ),
    "fashion-mnist": DataSetEntry(
        read=lambda f, _: images.fashion_mnist(f), model="wecfl-cnn", partition=WECFL_PARTITION, devices=200
    ),
    "mnist": DataSetEntry(
        read=lambda f, _: images.mnist(f), model="mnist-mlp", partition="rotations:groups=4", devices=200
    ),
    "mnist-writers": DataSetEntry(
        read=lambda f, _: images.mnist_writers(f), model="wecfl-cnn", partition="by-user", devices=0
    ),
    "cifar10": DataSetEntry(
        read=lambda f, _: images.cifar10(f), model="cifar-lenet", partition=WECFL_PARTITION, devices=200
    ),
    "emnist-letters": DataSetEntry(
        read=lambda f, _: images.emnist_letters(f), model="letters-cnn", partition="mixtures:shares=10-90", devices=100
    ),
    "femnist": DataSetEntry(read=lambda f, _: leaf.femnist(f), model="femnist-cnn", partition="by-user", devices=0),
    "celeba": DataSetEntry(read=lambda f, _: leaf.celeba(f), model="celeba-cnn", partition="by-user", devices=0),
    "wisdm": DataSetEntry(read=lambda f, _: tables.wisdm(f), model="", partition="by-user", devices=0),
    "shakespeare": DataSetEntry(read=lambda f, _: tables.shakespeare(f), model="", partition="by-user", devices=0),
    "fsdd": DataSetEntry(read=lambda f, _: speech.fsdd(f), model="", partition="by-user", devices=0),
    "regression": DataSetEntry(
        read=lambda _, seed: tables.regression(2, seed),
        model="linear-regression",
        partition="mixtures:shares=10-90",
        devices=100,
        files=False,
    ),
    "regression-8": DataSetEntry(
        read=lambda _, seed: tables.regression(8, seed),
        model="linear-regression",
        partition="mixtures:shares=random",
        devices=100,
        files=False,
    ),
}


def find_data_set(name: str) -> DataSetEntry:
    """The entry of a data set of this package, or a user's by import path or registered name (export/plugins.py).

    Raises UsageError for an unknown name.
    """
    try:
        found = find_by_name("data-sets", name, DATA_SETS)
    except UsageError as unknown:
        if not is_given_in_python(name):
            raise
        hint = "samples that were given in Python have no name: run it there, as fc.simulate(method, fleet=fleet)"
        raise UsageError(unknown.message, hint=hint) from None
    if not isinstance(found, DataSetEntry):
        raise UsageError(f"{name} is {type(found).__name__}", hint="name an emulator.data.registry.DataSetEntry")
    return found


def is_given_in_python(data_set: str) -> bool:
    """Whether this is what `fc.fleet` calls samples that have no name."""
    return data_set.removesuffix(" of each device") in UNNAMED


def load_data_set(name: str, folder: Path | None = None, *, seed: int = 0) -> DataSet:
    """The whole data set, always in the same order; `seed` is used only by data that are drawn.

    Raises UsageError for an unknown name, and for a `read` of a user's own that returns another kind, ConfigError for
    files that are missing, altered or malformed.
    """
    found = find_data_set(name).read(DataFolderReader(path=data_folder(folder)), seed)
    if not isinstance(found, DataSet):
        told = f"`read` of data set {name!r} returned {type(found).__name__}"
        raise UsageError(told, hint="return DataSet(train=RawSamples(x=x, y=y)) of emulator.data.loaders.samples")
    return found
