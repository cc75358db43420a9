"""A fleet's data: the samples of every device, how the device sees them, and its true group (partition_schemes.py).

Every sample goes to at most one device, and there to training or to test; only mixtures draw with replacement, as in
their paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError
from edge_client.protocol.task import I64, Array, ClientId
from emulator.data import registry
from emulator.data.loaders.samples import DataSet, RawSamples

TRAIN_SHARE = 0.8
REFERENCE_SAMPLES = 16  # samples kept from every device, to compare exported files with torch


@dataclass(frozen=True, kw_only=True)
class FleetData:
    """A fleet's data: devices that train, devices that only join later, and the true group of those that have one.

    `reference` [r, ...] are samples that no device holds. `holdouts` are test samples of one pure distribution each.
    """

    devices: Mapping[ClientId, DeviceData]
    new_devices: Mapping[ClientId, DeviceData] = field(default_factory=dict)
    groups: Mapping[ClientId, int] = field(default_factory=dict, repr=False)
    reference: Array = field(default_factory=lambda: np.empty(0, np.float32), repr=False)
    holdouts: Mapping[str, Dataset] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class PartitionIndices:
    """The samples of every device, by number: `train` in the training part, `test` in the test part.

    A data set without a test part has None there, and each device's samples are split four to one. `turns` [devices]
    are quarter turns of a device's images; `written` [devices, classes] is the label that it gives to each class.
    """

    train: Sequence[I64]
    test: Sequence[I64] | None = None
    groups: I64 | None = None
    turns: I64 | None = None
    written: I64 | None = None


def make_fleet_data(
    data: DataSet, cut: PartitionIndices, rng: np.random.Generator, *, holdouts: Mapping[str, Dataset] | None = None
) -> FleetData:
    """Every device's samples as float32; devices are named device-000, device-001, ..."""
    width = len(str(max(len(cut.train) - 1, 10)))
    names = [f"device-{i:0{width}d}" for i in range(len(cut.train))]
    devices = {}
    for i, name in enumerate(names):
        train, test = _two_parts(data, cut, i, rng)
        devices[name] = DeviceData(train=_as_device_sees(data, train, cut, i), test=_as_device_sees(data, test, cut, i))
    groups = {} if cut.groups is None else dict(zip(names, cut.groups.tolist(), strict=True))
    return FleetData(devices=devices, groups=groups, holdouts=holdouts or {})


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


def label_permutation_groups(
    data: DataSet, *, devices: int, groups: int, seed: int, new: int = 0, reference: int = REFERENCE_SAMPLES
) -> FleetData:
    """Device i belongs to group i mod `groups`; each group writes the classes in its own permutation.

    No two groups give a class the same label, so a model that fits one group is wrong for every other. Every device
    gets the same number of samples, up to one, and keeps a fifth of them for testing.
    """
    whole = data.joined().train
    _check(len(whole), data.classes, devices=devices, new=new, groups=groups, reference=reference)
    rng = np.random.Generator(np.random.PCG64(seed))
    order = rng.permutation(len(whole))
    written = latin_square(data.classes, groups, rng)
    names = [f"device-{i:02d}" for i in range(devices)] + [f"new-{i}" for i in range(new)]
    group = {name: (i if i < devices else i - devices) % groups for i, name in enumerate(names)}
    parts = np.array_split(order[reference:], len(names))
    cut = PartitionIndices(train=parts, written=written[[group[name] for name in names]])
    local = {name: _four_to_one(data, whole, cut, i) for i, name in enumerate(names)}
    return FleetData(
        devices={name: local[name] for name in names[:devices]},
        new_devices={name: local[name] for name in names[devices:]},
        groups=group,
        reference=data.ready(whole.x[order[:reference]]),
    )


def latin_square(classes: int, groups: int, rng: np.random.Generator) -> I64:
    """[groups, classes] permutations, no two of which agree anywhere: rows of a shuffled Latin square."""
    shift = rng.permutation(classes)[:groups]
    symbols, columns = rng.permutation(classes), rng.permutation(classes)
    square: I64 = symbols[(columns[None, :] + shift[:, None]) % classes]
    return square


def _four_to_one(data: DataSet, whole: RawSamples, cut: PartitionIndices, i: int) -> DeviceData:
    """A device of the demo: its samples in the order of the split, the first four fifths to train."""
    index = cut.train[i]
    at = round(TRAIN_SHARE * len(index))
    train, test = (_as_device_sees(data, whole.rows(part), cut, i) for part in (index[:at], index[at:]))
    return DeviceData(train=train, test=test)


def _two_parts(data: DataSet, cut: PartitionIndices, i: int, rng: np.random.Generator) -> tuple[RawSamples, RawSamples]:
    if cut.test is not None:
        return data.train.rows(cut.train[i]), (data.test or data.train).rows(cut.test[i])
    shuffled = rng.permutation(cut.train[i])
    at = min(round(TRAIN_SHARE * len(shuffled)), len(shuffled) - 1)  # at least one sample to test
    return data.train.rows(np.sort(shuffled[:at])), data.train.rows(np.sort(shuffled[at:]))


def _as_device_sees(data: DataSet, samples: RawSamples, cut: PartitionIndices, i: int) -> Dataset:
    """Samples as device i sees them: turned, its own names for the classes, float32."""
    x = samples.x if cut.turns is None else rotate_images(samples.x, int(cut.turns[i]))
    y = samples.y if cut.written is None else cut.written[i][samples.y]
    return Dataset(np.ascontiguousarray(data.ready(x)), y)


def _check(n: int, classes: int, *, devices: int, new: int, groups: int, reference: int) -> None:
    if devices < 1 or new < 0 or reference < 0:
        raise ConfigError(f"{devices} devices and {new} new ones", hint="use at least one device")
    if not 1 <= groups <= min(classes, devices):
        raise ConfigError(
            f"{groups} groups of {devices} devices over {classes} classes",
            hint=f"use 1 to {min(classes, devices)} groups: each needs a device and a permutation of its own",
        )
    if (n - reference) // (devices + new) < 2:  # noqa: PLR2004 - one to train, one to test
        raise ConfigError(f"{n} samples are too few for {devices + new} devices", hint="use fewer devices")
