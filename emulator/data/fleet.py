"""A fleet as a value: a data set, and how devices share it. The samples are read when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.dataset import DeviceData
from edge_client.protocol.task import ClientId
from emulator.data import partition_schemes, registry
from emulator.data.fleet_split import FleetData
from emulator.data.loaders.samples import DataSet
from emulator.data.partition_schemes import PartitionScheme


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fleet(Mapping[ClientId, DeviceData]):
    """Devices and their samples: a mapping from a device's name to its training and its held-out samples.

    `read` gives the data set for a seed, `scheme` shares it among `count` devices (0: as many as the data name).
    `options` are the options of emulator/options.py by which a run's folder names this fleet; `model` is the model that
    suits the data, if there is one; `classes` are the values of labels that were no numbers, `columns` the names of
    the inputs where they are a table's. `seed` cuts the data; None takes the seed of the run, as the command line does.

    >>> from emulator.data.fleet import named_fleet
    >>> fleet = named_fleet("digits", devices=4)
    >>> fleet
    Fleet(digits, 4 devices, label-permutations:groups=3)
    >>> len(fleet["device-00"].train)
    204
    """

    read: Callable[[int], DataSet]
    scheme: PartitionScheme
    count: int
    options: Mapping[str, Any]
    model: str = ""
    seed: int | None = None
    classes: Sequence[str | bool] = ()
    columns: Sequence[str] = ()
    _cuts: dict[int, FleetData] = field(default_factory=dict, init=False)

    def cut(self, seed: int = 0) -> FleetData:
        """The samples of every device in a run with this seed; the last cut is kept. Raises UsageError, ConfigError."""
        seed = seed if self.seed is None else self.seed
        if seed not in self._cuts:
            found = self.scheme.split(self.read(seed), devices=self.count, seed=seed)
            self._cuts.clear()
            self._cuts[seed] = replace(found, classes=self.classes, columns=self.columns)
        return self._cuts[seed]

    @property
    def groups(self) -> Mapping[ClientId, int]:
        """The true group of each device, where the partition makes groups."""
        return self.cut().groups

    def __getitem__(self, name: ClientId) -> DeviceData:
        devices = self.cut().devices
        if name not in devices:
            raise KeyError(f"no device {name!r}: there are {len(devices)}, from {min(devices)!r} on")
        return devices[name]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.cut().devices)

    def __len__(self) -> int:
        return len(self.cut().devices)

    def __repr__(self) -> str:
        how = self.options["partition"]
        shown = self._cuts.get(self.seed or 0)
        if shown is None:
            return f"Fleet({self.options['data_set']}, {self.count or 'all'} devices, {how})"
        sizes = [len(local.train) for local in shown.devices.values()]
        one = next(iter(shown.devices.values())).train
        shape, y = list(one.x.shape[1:]), [local.train.y for local in shown.devices.values()]
        named = np.issubdtype(one.y.dtype, np.integer)
        what = f"{max(int(v.max()) for v in y) + 1} classes" if named else f"targets {list(one.y.shape[1:])}"
        size = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        told = f"{len(sizes)} devices with {size} training samples {shape} of {what}"
        return f"Fleet({self.options['data_set']}, {told}, {how})"


def named_fleet(
    name: str,
    *,
    devices: int | None = None,
    partition: str | PartitionScheme = "",
    groups: int | None = None,
    data: Path | None = None,
    seed: int | None = None,
) -> Fleet:
    """The fleet that the command line makes of a data set's name and these options. Raises UsageError."""
    entry = registry.find_data_set(name)
    how = partition or entry.partition
    scheme = partition_schemes.parse_scheme(how, groups=groups) if isinstance(how, str) else how
    return Fleet(
        read=partial(_read_named, name, data),
        scheme=scheme,
        count=_default_count(entry, scheme) if devices is None else devices,
        options={
            "data_set": name,
            "partition": how if isinstance(how, str) else partition_schemes.describe_scheme(how),
            "groups": groups,
            "data": data,
            "data_seed": seed,
        },
        model=entry.model,
        seed=seed,
    )


def _default_count(entry: registry.DataSetEntry, scheme: PartitionScheme) -> int:
    """As many devices as the scheme knows of by itself, else as many as suit the data set."""
    return 0 if getattr(scheme, "knows_devices", False) else entry.devices


def _read_named(name: str, data: Path | None, seed: int) -> DataSet:
    return registry.load_data_set(name, data, seed=seed)
