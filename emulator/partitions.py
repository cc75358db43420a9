"""Cutting a data set into devices of known groups, disjoint and deterministic, so that clustering can be scored.

Every sample goes to one device at most, and there to training or to test. Nothing here trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edge_client.dataset import Dataset, Local
from edge_client.errors import ConfigError
from edge_client.protocol.task import Array, ClientId
from emulator import datasets

TRAIN_SHARE = 0.8
REFERENCE = 16  # samples kept from every device, to compare exported files with torch


@dataclass(frozen=True, kw_only=True)
class Split:
    """A fleet's data: devices that train, devices that only join later, and everybody's true group.

    `reference` [r, ...] are samples that no device holds.
    """

    devices: Mapping[ClientId, Local]
    new_devices: Mapping[ClientId, Local]
    groups: Mapping[ClientId, int] = field(repr=False)
    reference: Array = field(repr=False)


def digits_fleet(devices: int = 12, new: int = 3, groups: int = 3, seed: int = 0) -> Split:
    """The handwritten digits, cut for a fleet whose groups write their labels differently."""
    return label_permutation_groups(datasets.load("digits"), devices=devices, new=new, groups=groups, seed=seed)


def label_permutation_groups(
    data: Dataset, *, devices: int, groups: int, seed: int, new: int = 0, reference: int = REFERENCE
) -> Split:
    """Device i belongs to group i mod `groups`; each group writes the classes in its own permutation.

    No class is written alike by two groups, so a model that serves one group is wrong for every other. Every device
    gets the same number of samples, up to one, and keeps a fifth of them for testing.
    """
    classes = int(data.y.max()) + 1
    _check(len(data), classes, devices=devices, new=new, groups=groups, reference=reference)
    rng = np.random.Generator(np.random.PCG64(seed))
    order = rng.permutation(len(data))
    written = _latin(classes, groups, rng)
    names = [f"device-{i:02d}" for i in range(devices)] + [f"new-{i}" for i in range(new)]
    group = {name: (i if i < devices else i - devices) % groups for i, name in enumerate(names)}
    parts = np.array_split(order[reference:], len(names))
    local = {name: _local(data, part, written[group[name]]) for name, part in zip(names, parts, strict=True)}
    return Split(
        devices={name: local[name] for name in names[:devices]},
        new_devices={name: local[name] for name in names[devices:]},
        groups=group,
        reference=data.x[order[:reference]],
    )


def _latin(classes: int, groups: int, rng: np.random.Generator) -> Array:
    """[groups, classes] permutations, no two of which agree anywhere: rows of a shuffled Latin square."""
    shift = rng.permutation(classes)[:groups]
    symbols, columns = rng.permutation(classes), rng.permutation(classes)
    square: Array = symbols[(columns[None, :] + shift[:, None]) % classes]
    return square


def _local(data: Dataset, index: Array, written: Array) -> Local:
    cut = round(TRAIN_SHARE * len(index))
    train, test = (Dataset(data.x[part], written[data.y[part]]) for part in (index[:cut], index[cut:]))
    return Local(train=train, test=test)


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
