"""The folder of public data sets: its place, the checksums of published files, and where to get a missing file.

Sizes are checked before memory is allocated. Nothing is written, downloaded or unpickled.
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

from edge_client.data.readers import reading_arrays
from edge_client.errors import ConfigError
from edge_client.protocol.task import Array
from edge_client.user_cache import user_cache

FOLDER_VARIABLE = "FEDCENTERS_DATA"
MAX_FILE_BYTES = 1 << 30  # of one file's content, unless its loader says otherwise
CHUNK_BYTES = 1 << 20

HOME_PAGES = {
    "fashion-mnist": "https://github.com/zalandoresearch/fashion-mnist",
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/FILE.gz, as torchvision does; the qmnist files from "
    "https://github.com/facebookresearch/qmnist",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar.html, the binary version",
    "emnist": "https://www.nist.gov/itl/products-and-services/emnist-dataset, the MNIST format, gzip.zip",
    "femnist": "https://github.com/TalwalkarLab/leaf, preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.8",
    "celeba": "https://github.com/TalwalkarLab/leaf, preprocess.sh -s niid --sf 1.0 -k 5 -t sample --tf 0.8",
    "wisdm": "https://www.cis.fordham.edu/wisdm/dataset.php, the transformed file as x, y, user in an .npz",
    "shakespeare": "https://github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt",
    "fsdd": "https://github.com/Jakobovski/free-spoken-digit-dataset, the folder recordings",
}

ARCHIVES = {  # what is published in one archive need not be unpacked: a folder, the archive, and where in it
    "emnist": ("emnist/gzip.zip", "gzip/"),
    "celeba/img_align_celeba": ("celeba/img_align_celeba.zip", "img_align_celeba/"),
}

# Of the content, unpacked where the file is a .gz, so that packing it again changes nothing; of the two archives as
# they are. None is known for the JSON files of FEMNIST and CelebA, which LEAF's scripts make on one's own machine, for
# the wav files of FSDD, and for files that a user unpacked from the archives: there only form and range are checked.
# CIFAR-10's are those of torchvision for Ruby, EMNIST's that of TensorFlow Datasets, CelebA's that of torchvision.
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
    "cifar10/cifar-10-batches-bin/data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "cifar10/cifar-10-batches-bin/data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "cifar10/cifar-10-batches-bin/data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "cifar10/cifar-10-batches-bin/data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "cifar10/cifar-10-batches-bin/data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "cifar10/cifar-10-batches-bin/test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    "emnist/gzip.zip": "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    "celeba/img_align_celeba.zip": "46fb89443c578308acf364d7d379fe1b9efb793042c0af734b6112e4fd3a8c74",
    "cifar10/cifar10_from_jpeg_delta.npz": "dd9b7503f053a2716dbf0745e4ee798866781959362240e9e61a935b2f77a168",
    "wisdm/wisdm_v1.1_transformed.npz": "08bc6bb1bddf65348fde77999bf3c3ee9a9b386920307bbde6d6dc6514c40409",
    "fsdd/fsdd_8khz.npz": "43cb706a49f8495b162d0ceb4dd4fd66c5dba4a02120dbf7bad57fc1cc64ee17",
    "shakespeare/tinyshakespeare.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}


def data_folder(asked: Path | None = None) -> Path:
    """`asked`, else the variable FEDCENTERS_DATA, else fedcenters/data in the user's cache."""
    if asked is not None:
        return asked
    if told := os.environ.get(FOLDER_VARIABLE):
        return Path(told)
    return user_cache() / "data"


@dataclass(frozen=True, kw_only=True)
class DataFolderReader:
    """A folder of data sets, one subfolder each; `known` maps a file's name to the sha256 of its content."""

    path: Path
    known: Mapping[str, str] = field(default_factory=lambda: SHA256, repr=False)
    _opened: dict[str, zipfile.ZipFile] = field(default_factory=dict, init=False, repr=False, compare=False)

    def has(self, name: str) -> bool:
        """Whether the file is there: plain, as .gz, or in its published archive."""
        return self._found(name) is not None

    def read(self, name: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
        """The content of `name` or `name`.gz, unpacked: at most `limit` bytes, the published ones if those are known.

        Raises ConfigError when it is missing, too large, damaged or altered.
        """
        path = self._found(name)
        if path is None:
            raise self.missing_file_error(name)
        try:
            with path.open("rb") as raw, gzip.open(raw) if path.name.endswith(".gz") else raw as file:
                content = file.read(limit + 1)
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError) as wrong:  # RuntimeError: encrypted
            raise ConfigError(f"cannot read {path}: {wrong}", hint=self._hint(name)) from wrong
        if len(content) > limit:
            raise ConfigError(f"{path} holds more than {limit} bytes", hint=self._hint(name))
        self._check(name, path, hashlib.sha256(content).hexdigest())
        return content

    def arrays(self, name: str, *, limit: int = MAX_FILE_BYTES) -> dict[str, Array]:
        """The arrays of an .npz file; no pickle. Raises ConfigError as `read` does."""
        content = self.read(name, limit=limit)
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > limit:
                raise ConfigError(f"{self.path / name} unpacks to {size} bytes, over {limit}", hint=self._hint(name))
            with reading_arrays(), np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                found = dict(arrays)
        except (ValueError, OSError, zipfile.BadZipFile) as wrong:
            raise self.format_error(name, wrong) from wrong
        if strange := [key for key, value in found.items() if not isinstance(value, np.ndarray)]:
            raise self.format_error(name, f"members {strange} are no arrays")
        return found

    def missing_file_error(self, name: str) -> ConfigError:
        """The error that says which file is missing, from which folder, and where to get it."""
        absent = "" if self.path.is_dir() else ": there is no such folder"
        return ConfigError(f"{name} is not in the data folder {self.path}{absent}", hint=self._hint(name))

    def format_error(self, name: str, why: object) -> ConfigError:
        """The error for content that breaks its format."""
        return ConfigError(f"{self.path / name}: {why}", hint=self._hint(name))

    def _found(self, name: str) -> Path | zipfile.Path | None:
        home, _, file = name.rpartition("/")
        places: list[Path | zipfile.Path] = [self.path / home]
        if (packed := self._packed(home)) is not None:
            places.append(packed)
        return next((p for place in places for p in (place / file, place / f"{file}.gz") if p.is_file()), None)

    def _packed(self, home: str) -> zipfile.Path | None:
        """The place in a published archive where the files of a folder lie."""
        name, inside = ARCHIVES.get(home, ("", ""))
        if not name or not (self.path / name).is_file():
            return None
        if name not in self._opened:
            self._opened[name] = self._archive(name)
        return zipfile.Path(self._opened[name], inside)

    def _archive(self, name: str) -> zipfile.ZipFile:
        """A published archive after a check of its own checksum."""
        path, digest = self.path / name, hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
            self._check(name, path, digest.hexdigest())
            return zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as wrong:
            raise ConfigError(f"cannot read {path}: {wrong}", hint=self._hint(name)) from wrong

    def _check(self, name: str, path: Path | zipfile.Path, digest: str) -> None:
        if digest != self.known.get(name, digest):
            raise ConfigError(
                f"{path} is not the published file: its content has sha256 {digest}, expected {self.known[name]}",
                hint=f"get it again: {_home(name)}",
            )

    def _hint(self, name: str) -> str:
        packed = f"{name} or {name}.gz" if "-idx" in name else name  # the MNIST format is published packed
        place, _ = ARCHIVES.get(name.rpartition("/")[0], (packed, ""))
        return f"get it from {_home(name)}; put it at {place} in a folder named by `data` (--data) or {FOLDER_VARIABLE}"


def _home(name: str) -> str:
    return HOME_PAGES.get(name.partition("/")[0], "its publisher")
