"""The data that a bundle is made of, and the plug-ins that read it from run folders.

export/ imports neither coordinator/ nor emulator/. Each of them registers a module with the functions of `RunReader`
under the entry point group `fedcenters.runs` (pyproject.toml); other packages can add theirs.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from edge_client.data.dataset import Dataset, describe_misfit
from edge_client.data.readers import reading_arrays
from edge_client.errors import ConfigError
from edge_client.protocol import signing
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import Router
from edge_client.protocol.program import Program
from edge_client.protocol.samples.input_parts import read_arrays
from edge_client.protocol.task import Array, Flat

ENTRY_POINT_GROUP = "fedcenters.runs"
MAX_COMPARED_SAMPLES = 64  # samples of the reference on which every file is compared before it is written
NO_DEVICE = ""  # the device of samples that no device holds
Signer = Callable[[bytes], str]
Card = Mapping[str, Any]  # see model_cards.py


@dataclass(frozen=True, kw_only=True)
class LabelledSamples:
    """Samples to compare files on: `x` [n, *input] float32.

    `y` [n] int64 labels, or [n, ...] targets, where they are known; `device` [n] text, the device of each;
    `center` [n] int64, the center that this device is assigned to, -1 where unknown.
    """

    x: Array
    y: Array | None = None
    device: Array = field(default_factory=lambda: np.empty(0, "U1"))
    center: Array = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        """Fill in missing arrays; raise ConfigError for arrays of different lengths."""
        n = len(self.x)
        if n == 0:
            raise ConfigError("there are no samples", hint="give at least one")
        object.__setattr__(self, "x", np.ascontiguousarray(self.x, dtype=np.float32))
        if len(self.device) == 0:
            object.__setattr__(self, "device", np.full(n, NO_DEVICE))
        if len(self.center) == 0:
            object.__setattr__(self, "center", np.full(n, -1))
        lengths = {len(a) for a in (self.x, self.device, self.center, *(() if self.y is None else (self.y,)))}
        if lengths != {n}:
            raise ConfigError(f"samples of {sorted(lengths)} rows", hint="x, y, device and center have one row each")

    def __len__(self) -> int:
        return len(self.x)

    def require_fit(self, program: Program) -> None:
        """Raise ConfigError, with what to correct, for samples that the program cannot read."""
        y = np.zeros(len(self), np.int64) if self.y is None else self.y
        try:
            misfit = describe_misfit(program, Dataset(self.x, y), labels=self.y is not None)
        except ValueError as wrong:
            misfit = str(wrong)
        if misfit:
            raise ConfigError(misfit, hint="correct the samples; docs/bring-your-own-data.md describes them")

    def rows(self, index: Array) -> LabelledSamples:
        """The samples with these numbers, or where a mask is true."""
        y = None if self.y is None else self.y[index]
        return LabelledSamples(x=self.x[index], y=y, device=self.device[index], center=self.center[index])

    def subsample(self, limit: int) -> LabelledSamples:
        """At most `limit` samples: the first ones of every device, equally many of each."""
        if len(self) <= limit:
            return self
        place = np.zeros(len(self), np.int64)
        for name in np.unique(self.device):
            mine = np.flatnonzero(self.device == name)
            place[mine] = np.arange(len(mine))
        return self.rows(np.sort(np.argsort(place, kind="stable")[:limit]))

    def to_npz(self) -> bytes:
        """An .npz file without pickle."""
        buffer = io.BytesIO()
        labels: dict[str, Any] = {} if self.y is None else {"y": self.y}
        np.savez_compressed(buffer, x=self.x, device=self.device, center=self.center, **labels)
        return buffer.getvalue()

    @staticmethod
    def read(path: Path) -> LabelledSamples:
        """What `to_npz` wrote, or any npz with an array x, or with x.NAME for several inputs. Raises ConfigError."""
        if path.is_file() and not zipfile.is_zipfile(path):
            raise ConfigError(f"{path} is no npz file", hint="give an npz file with an array x")
        try:
            with path.open("rb") as file, reading_arrays(), np.load(file, allow_pickle=False) as arrays:
                known = {name: arrays[name] for name in ("y", "device", "center") if name in arrays}
                return LabelledSamples(x=read_arrays(arrays)[0], **known)
        except KeyError as missing:
            raise ConfigError(f"{path} lacks {missing.args[0]}", hint="give an npz file with an array x") from None
        except (OSError, ValueError, TypeError) as wrong:
            raise ConfigError(f"{path} cannot be read: {wrong}", hint="give an npz file with an array x") from wrong


@dataclass(frozen=True, kw_only=True)
class NewcomerData:
    """A run's data for devices that join later: a router, the common start [size], and a tree with its models."""

    router: Router | None = None
    start: Flat | None = field(default=None, repr=False)
    tree: CenterTree | None = None
    splits: Sequence[Flat] = field(default=(), repr=False)  # of the tree, in order


@dataclass(frozen=True, kw_only=True)
class BundleNames:
    """What users call things: the values of classes 0, 1, ..., the inputs' columns, and the center of each device.

    Each is empty where it is not known.
    """

    classes: Sequence[str | bool] = ()
    columns: Sequence[str] = ()
    devices: Mapping[str, int] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The entry `names` of manifest.json."""
        return {"classes": list(self.classes), "columns": list(self.columns), "devices": dict(self.devices)}


@dataclass(frozen=True, kw_only=True)
class BundleSource:
    """Everything that a bundle is made of. `files`: sha256 -> container, for every container of the program."""

    program: Program
    files: Mapping[str, bytes] = field(repr=False)
    centers: Sequence[Flat] = field(repr=False)  # [schema.size] each
    cards: Sequence[Card]
    reference: LabelledSamples | None = None  # a part of the bundle; a real device's samples need its owner's consent
    held_out: LabelledSamples | None = None  # what the cards' accuracies are measured on; not a part of the bundle
    calibration: LabelledSamples | None = None  # training samples, for static quantization; not a part of the bundle
    sign: Signer | None = None  # manifest.json's bytes -> the text of manifest.sig
    made: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # files that exist already, by path in a bundle
    newcomers: NewcomerData = field(default_factory=NewcomerData)
    names: BundleNames = field(default_factory=BundleNames)


def make_signer(private: bytes, federation: str) -> Signer:
    """A function from manifest.json's bytes to manifest.sig. `private`: an Ed25519 key [32 bytes].

    manifest.sig is one line of JSON {"federation", "key", "sig"}; `sig` signs the text of protocol/signing.py with the
    kind "bundle". The manifest names every other file by its hash, so one signature covers all files.
    """

    def sign(manifest: bytes) -> str:
        digest = hashlib.sha256(manifest).hexdigest()
        sig = signing.sign(private, federation, signing.BUNDLE_KIND, digest, len(manifest))
        key = signing.key_id(signing.public_key(private))
        return canonical_json({"federation": federation, "key": key, "sig": sig}).decode() + "\n"

    return sign


class RunReader(Protocol):
    """A module that reads one kind of run folder."""

    def is_run_folder(self, run: Path) -> bool:
        """Whether the folder is of this kind; a quick check."""

    def bundle_source(self, run: Path, *, method: str, engines: Sequence[str], data: Path | None) -> BundleSource:
        """The bundle's data. `method`: whose centers, "" for the first method; `data`: the folder of data sets."""

    def held_out(self, run: Path, *, data: Path | None) -> LabelledSamples | None:
        """Every test sample of every device of the run, or None where they are not available."""

    def calibration(self, run: Path, *, data: Path | None) -> LabelledSamples | None:
        """Some training samples of its devices, or None where they are not available."""


def find_run_reader(run: Path) -> RunReader:
    """The reader of this folder. Raises ConfigError for a folder of no known kind."""
    kinds = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    for name in sorted(kinds):
        kind = cast("RunReader", kinds[name].load())
        if kind.is_run_folder(run):
            return kind
    what = "does not exist" if not run.exists() else "is no run folder that can be read here"
    raise ConfigError(
        f"{run} {what}",
        hint=f"give the folder of a finished run; this installation reads: {', '.join(kinds) or 'none'}",
    )
