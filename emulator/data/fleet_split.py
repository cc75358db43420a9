"""A fleet's data: the samples of every device, how the device sees them, and its true group (partition_schemes.py).

Every sample goes to at most one device, and there to training or to test; only mixtures draw with replacement, as in
their paper. The arrays of all devices are views into one array of each part, and devices with the same samples share
them, so that memory grows with the samples and not with the devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError
from edge_client.protocol.program import IGNORED
from edge_client.protocol.task import I64, Array, ClientId
from emulator.data import registry
from emulator.data.loaders.samples import DataSet, RawSamples

MAX_NAME = 64  # characters of a device's name in a topic
REFERENCE_SAMPLES = 16  # samples kept from every device, to compare exported files with torch


class SamplesMissing(ConfigError):
    """The samples of a run were the user's own, and its folder does not hold them."""


@dataclass(frozen=True, kw_only=True)
class FleetData:
    """A fleet's data: devices that train, devices that only join later, and the true group of those that have one.

    `reference` [r, ...] are samples that no device holds. `holdouts` are test samples of one pure distribution each.
    `classes` are the user's values of classes 0, 1, ..., and `columns` the names of the inputs, where they have some.
    `pixels`: the user's samples were uint8 and became 0 to 1, as others of theirs do in a prediction.
    `called` has what the user calls a device, where that is not its name. `kept` is fleet.json's entry of each
    device of a run's folder, where `devices` may raise `SamplesMissing` for the samples themselves.
    """

    devices: Mapping[ClientId, DeviceData]
    new_devices: Mapping[ClientId, DeviceData] = field(default_factory=dict)
    groups: Mapping[ClientId, int] = field(default_factory=dict, repr=False)
    reference: Array = field(default_factory=lambda: np.empty(0, np.float32), repr=False)
    holdouts: Mapping[str, Dataset] = field(default_factory=dict, repr=False)
    classes: Sequence[str | bool] = ()
    columns: Sequence[str] = ()
    pixels: bool = False
    called: Mapping[ClientId, Any] = field(default_factory=dict, repr=False)
    kept: Mapping[ClientId, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    def name(self, who: object) -> ClientId | None:
        """The device of this name, or that the user calls so; None for no device."""
        if isinstance(who, str) and who in self.devices:
            return who
        return next((name for name, value in self.called.items() if value == who and name in self.devices), None)


def label_counts(y: Array, classes: int = 0) -> I64:
    """How often each class is a label, of samples [n] or of their positions [n, ...]; at least `classes` counts.

    Targets that are no classes are counted as one.
    """
    if not np.issubdtype(y.dtype, np.integer):
        return np.array([len(y)])
    return np.bincount(y[y != IGNORED], minlength=classes)


@dataclass(frozen=True, kw_only=True)
class PartitionIndices:
    """The samples of every device, by number: `train` in the training part, `test` in the test part.

    Where `test` is None, each device's samples of the training part are split at random by the data set's
    `train_share`, and the test part is left out. `turns` [devices]
    are quarter turns of a device's images; `written` [devices, classes] is the label that it gives to each class.
    `names` are those of the devices; without them they are device-000, device-001, ...
    """

    train: Sequence[I64]
    test: Sequence[I64] | None = None
    groups: I64 | None = None
    turns: I64 | None = None
    written: I64 | None = None
    names: Sequence[ClientId] = ()


def make_fleet_data(
    data: DataSet, cut: PartitionIndices, rng: np.random.Generator, *, holdouts: Mapping[str, Dataset] | None = None
) -> FleetData:
    """Every device's samples as float32."""
    width = len(str(max(len(cut.train) - 1, 10)))
    names = cut.names or [f"device-{i:0{width}d}" for i in range(len(cut.train))]
    groups = {} if cut.groups is None else dict(zip(names, cut.groups.tolist(), strict=True))
    devices = dict(zip(names, _devices(data, cut, rng), strict=True))
    return FleetData(devices=devices, groups=groups, holdouts=holdouts or {})


def device_names(values: Iterable[object], column: str = "") -> list[ClientId]:
    """A name that the protocol allows for each value: the value itself, a number behind the column's name."""
    texts = [str(value) for value in values]
    if all(re.fullmatch(r"\d+(\.0)?", text) for text in texts):
        numbers = [text.removesuffix(".0") for text in texts]
        width = max(map(len, numbers), default=0)
        texts = [f"{column or 'device'}-{number.zfill(width)}" for number in numbers]
    names = [re.sub(r"[^A-Za-z0-9_-]", "-", text)[:MAX_NAME] for text in texts]
    if len(set(names)) == len(names) and all(names):
        return names
    return [f"{i:0{len(str(len(names)))}d}-{name}"[:MAX_NAME] for i, name in enumerate(names)]


def rotate_images(x: Array, quarters: int) -> Array:
    """Images [n, channels, side, side], turned counter-clockwise by quarters of a circle."""
    if quarters % 4 and (x.ndim != 4 or x.shape[-1] != x.shape[-2]):  # noqa: PLR2004 - n, channels, two sides
        raise ConfigError(f"samples of shape {x.shape[1:]} cannot be turned", hint="use a data set of square images")
    return np.rot90(x, quarters, axes=(2, 3)) if quarters % 4 else x


def digits_fleet(devices: int = 12, new: int = 3, groups: int = 3, seed: int = 0) -> FleetData:
    """The handwritten digits, cut for a fleet whose groups write their labels differently."""
    return label_permutation_groups(
        registry.load_data_set("digits"), devices=devices, new=new, groups=groups, seed=seed
    )


def label_permutation_groups(data: DataSet, *, devices: int, groups: int, seed: int, new: int = 0) -> FleetData:
    """Device i belongs to group i mod `groups`; each group writes the classes in its own permutation.

    No two groups give a class the same label, so a model that fits one group is wrong for every other. Every device
    gets the same number of samples, up to one; without a test part it trains on `train_share` of them.
    """
    held = None if data.test is None else len(data.test)
    _check(len(data.train), held, data.classes, devices=devices, new=new, groups=groups)
    rng = np.random.Generator(np.random.PCG64(seed))
    order = rng.permutation(len(data.train))
    written = latin_square(data.classes, groups, rng)
    names = [f"device-{i:02d}" for i in range(devices)] + [f"new-{i}" for i in range(new)]
    group = {name: (i if i < devices else i - devices) % groups for i, name in enumerate(names)}
    train = np.array_split(order[REFERENCE_SAMPLES:], len(names))
    if held is None:
        at = [_trained(data.train_share, len(part)) for part in train]
        test = [part[n:] for part, n in zip(train, at, strict=True)]
        train = [part[:n] for part, n in zip(train, at, strict=True)]
    else:
        test = np.array_split(rng.permutation(held), len(names))
    cut = PartitionIndices(train=train, test=test, written=written[[group[name] for name in names]])
    local = dict(zip(names, _devices(data, cut, rng), strict=True))
    return FleetData(
        devices={name: local[name] for name in names[:devices]},
        new_devices={name: local[name] for name in names[devices:]},
        groups=group,
        reference=data.ready(data.train.x[order[:REFERENCE_SAMPLES]]),
    )


def latin_square(classes: int, groups: int, rng: np.random.Generator) -> I64:
    """[groups, classes] permutations, no two of which agree anywhere: rows of a shuffled Latin square."""
    shift = rng.permutation(classes)[:groups]
    symbols, columns = rng.permutation(classes), rng.permutation(classes)
    square: I64 = symbols[(columns[None, :] + shift[:, None]) % classes]
    return square


def _devices(data: DataSet, cut: PartitionIndices, rng: np.random.Generator) -> list[DeviceData]:
    """Each device's two parts; `cut.test` counts in the training part where the data set has no other."""
    train, test, other = cut.train, cut.test, data.test
    if test is None:
        firsts, which = _distinct(cut.train)  # devices with the same samples split them in the same way
        dealt = [_dealt(cut.train[i], data.train_share, rng) for i in firsts]
        train, test, other = *([dealt[k][part] for k in which] for part in (0, 1)), None
    mine = _as_devices_see(data, data.train, train, cut)
    held = _as_devices_see(data, other or data.train, test, cut)
    return [DeviceData(train=fit, test=kept) for fit, kept in zip(mine, held, strict=True)]


def _dealt(rows: I64, share: float, rng: np.random.Generator) -> tuple[I64, I64]:
    """`rows` in two random parts, each sorted; each has at least one, if there are two: else the second."""
    shuffled = rng.permutation(rows)
    at = _trained(share, len(shuffled))
    return np.sort(shuffled[:at]), np.sort(shuffled[at:])


def _trained(share: float, n: int) -> int:
    """How many of n samples train where a `share` shall: each part has at least one, if there are two."""
    return min(max(round(share * n), 1), n - 1)


def _as_devices_see(data: DataSet, part: RawSamples, rows: Sequence[I64], cut: PartitionIndices) -> list[Dataset]:
    """Each device's rows of `part`, turned, with its own names for the classes, float32; all in one array."""
    n = len(rows)
    turns = np.zeros(n, np.int64) if cut.turns is None else cut.turns
    written = np.empty((n, 0), np.int64) if cut.written is None else cut.written
    firsts, which = _distinct([np.concatenate([r, [t], w]) for r, t, w in zip(rows, turns, written, strict=True)])
    ends = np.cumsum([0, *(len(rows[i]) for i in firsts)])
    one = data.ready(part.x[:1])
    x, y = np.empty((ends[-1], *one.shape[1:]), one.dtype), np.empty((ends[-1], *part.y.shape[1:]), part.y.dtype)
    sets = []
    for i, begin, end in zip(firsts, ends[:-1], ends[1:], strict=True):
        x[begin:end] = data.ready(rotate_images(part.x[rows[i]], int(turns[i])))
        labels = part.y[rows[i]]
        y[begin:end] = labels if cut.written is None else written[i][labels]
        sets.append(Dataset(x[begin:end], y[begin:end], parts=data.parts))
    return [sets[k] for k in which]


def _distinct(arrays: Sequence[I64]) -> tuple[list[int], list[int]]:
    """-> the place of the first array of each content, and of every array the number of its content."""
    seen: dict[bytes, int] = {}
    which = [seen.setdefault(array.tobytes(), len(seen)) for array in arrays]
    firsts = np.unique(which, return_index=True)[1].tolist()
    return firsts, which


def _check(n: int, held: int | None, classes: int, *, devices: int, new: int, groups: int) -> None:
    """`held`: samples of the test part, where there is one."""
    if devices < 1 or new < 0:
        raise ConfigError(f"{devices} devices and {new} new ones", hint="use at least one device")
    if not 1 <= groups <= min(classes, devices):
        raise ConfigError(
            f"{groups} groups of {devices} devices over {classes} classes",
            hint=f"use 1 to {min(classes, devices)} groups: each needs a device and a permutation of its own",
        )
    if min(n - REFERENCE_SAMPLES, n if held is None else 2 * held) < 2 * (devices + new):  # one to train, one to test
        tests = "" if held is None else f" and {held} to test"
        raise ConfigError(f"{n} samples{tests} are too few for {devices + new} devices", hint="use fewer devices")
