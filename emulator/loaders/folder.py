"""The data folder: where it lies, whether a file in it is the published one, and where to get it when it is missing.

Reads within limits that hold before anything is allocated. Never writes, never downloads, opens no pickle.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge_client.errors import ConfigError
from edge_client.protocol.task import Array

VARIABLE = "FEDCENTERS_DATA"
LIMIT_BYTES = 1 << 30  # of one file's content, unless its loader says otherwise

HOMES = {
    "fashion-mnist": "https://github.com/zalandoresearch/fashion-mnist",
    "mnist": "http://yann.lecun.com/exdb/mnist, and the extended labels from https://github.com/facebookresearch/qmnist",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar.html, the binary version",
    "emnist": "https://www.nist.gov/itl/products-and-services/emnist-dataset, the MNIST format",
    "femnist": "https://github.com/TalwalkarLab/leaf, preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.8",
    "celeba": "https://github.com/TalwalkarLab/leaf, preprocess.sh -s niid --sf 1.0 -k 5 -t sample --tf 0.8",
    "wisdm": "https://www.cis.fordham.edu/wisdm/dataset.php, the transformed file as x, y, user in an .npz",
    "shakespeare": "https://github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt",
    "fsdd": "https://github.com/Jakobovski/free-spoken-digit-dataset, the folder recordings",
}

# Of the content, unpacked where the file is a .gz, so that packing it again changes nothing. None is known for
# CIFAR-10's binary version and EMNIST, of which archives have one, for FEMNIST and CelebA, which LEAF's scripts make,
# and for the wav files of FSDD: there only form and range are checked.
SHA256 = {
    "fashion-mnist/train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "fashion-mnist/train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "fashion-mnist/t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "fashion-mnist/t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    "mnist/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "mnist/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "mnist/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "mnist/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "mnist/qmnist-train-labels-idx2-int": "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5",
    "mnist/qmnist-test-labels-idx2-int": "92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd",
    "cifar10/cifar10_from_jpeg_delta.npz": "dd9b7503f053a2716dbf0745e4ee798866781959362240e9e61a935b2f77a168",
    "wisdm/wisdm_v1.1_transformed.npz": "08bc6bb1bddf65348fde77999bf3c3ee9a9b386920307bbde6d6dc6514c40409",
    "fsdd/fsdd_8khz.npz": "43cb706a49f8495b162d0ceb4dd4fd66c5dba4a02120dbf7bad57fc1cc64ee17",
    "shakespeare/tinyshakespeare.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}


def data_folder(asked: Path | None = None) -> Path:
    """`asked`, else the variable FEDCENTERS_DATA, else fedcenters/data in the user's cache."""
    if asked is not None:
        return asked
    if told := os.environ.get(VARIABLE):
        return Path(told)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedcenters" / "data"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of data sets, one subfolder each; `known` maps a file's name to the sha256 of its content."""

    path: Path
    known: Mapping[str, str] = field(default_factory=lambda: SHA256, repr=False)

    def has(self, name: str) -> bool:
        """Whether the file is there, as it is or as .gz."""
        return self._found(name) is not None

    def read(self, name: str, *, limit: int = LIMIT_BYTES) -> bytes:
        """The content of `name` or `name`.gz, unpacked: at most `limit` bytes, the published ones if those are known.

        Raises ConfigError when it is missing, too large, damaged or altered.
        """
        path = self._found(name)
        if path is None:
            raise self.missing(name)
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                content = file.read(limit + 1)
        except (OSError, EOFError, zlib.error) as wrong:
            raise ConfigError(f"cannot read {path}: {wrong}", hint=self._hint(name)) from wrong
        if len(content) > limit:
            raise ConfigError(f"{path} holds more than {limit} bytes", hint=self._hint(name))
        self._check(name, path, hashlib.sha256(content).hexdigest())
        return content

    def arrays(self, name: str, *, limit: int = LIMIT_BYTES) -> dict[str, Array]:
        """The arrays of an .npz file; no pickle. Raises ConfigError as `read` does."""
        content = self.read(name, limit=limit)
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > limit:
                raise ConfigError(f"{self.path / name} unpacks to {size} bytes, over {limit}", hint=self._hint(name))
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                found = dict(arrays)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as wrong:
            raise self.wrong(name, wrong) from wrong
        if strange := [key for key, value in found.items() if not isinstance(value, np.ndarray)]:
            raise self.wrong(name, f"members {strange} are no arrays")
        return found

    def missing(self, name: str) -> ConfigError:
        """The error that says which file is missing, from which folder, and where to get it."""
        return ConfigError(f"{name} is not in the data folder {self.path}", hint=self._hint(name))

    def wrong(self, name: str, why: object) -> ConfigError:
        """The error for content that breaks its format."""
        return ConfigError(f"{self.path / name}: {why}", hint=self._hint(name))

    def _found(self, name: str) -> Path | None:
        return next((p for p in (self.path / name, self.path / f"{name}.gz") if p.is_file()), None)

    def _check(self, name: str, path: Path, digest: str) -> None:
        if digest != self.known.get(name, digest):
            raise ConfigError(
                f"{path} is not the published file: its content has sha256 {digest}, expected {self.known[name]}",
                hint=f"get it again: {_home(name)}",
            )

    def _hint(self, name: str) -> str:
        return f"get it from {_home(name)}; put it at {name} in a folder named by --data or {VARIABLE}"


def _home(name: str) -> str:
    return HOMES.get(name.partition("/")[0], "its publisher")
