"""A fleet as a value: a data set, and how devices share it. The samples are read when they are first needed."""

from __future__ import annotations

import html
import logging
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.dataset import DeviceData
from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.task import Array, ClientId
from emulator.data import partition_schemes, registry
from emulator.data.fleet_split import FleetData
from emulator.data.loaders.samples import DataSet
from emulator.data.partition_schemes import PartitionScheme

log = logging.getLogger(__name__)
SHOWN_DEVICES = 10  # rows in a notebook
MARKED_DEVICES, MARKED_SAMPLES = 10, 4  # by which two cuts are told apart
OTHER_CUT = (
    "this fleet has no seed, so it shows the devices' samples as seed 0 cuts them, and a run with another seed trains "
    "on other ones, also on test samples that are shown here. Take those of `result.split`, or give the fleet a seed"
)
SHOWN_COLUMNS = 4  # of a table, in one line
SHOWN_NAMES = 60  # characters of the names of devices that are left out; longer lists are a number and a checksum


@dataclass(frozen=True, kw_only=True, repr=False)
class SomeDevices:
    """A partition of which the devices `left` do not train: they are its new devices."""

    whole: PartitionScheme
    left: frozenset[ClientId]

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        found = self.whole.split(data, devices=devices, seed=seed)
        if strange := sorted(self.left - found.devices.keys()):
            hint = "fix the seed of the fleet: fc.fleet(..., seed=0)"
            raise ConfigError(f"seed {seed} makes no device {strange[0]!r}", hint=hint)
        return _leave_out(found, self.left)


def _leave_out(found: FleetData, left: Collection[ClientId]) -> FleetData:
    """The devices `left` do not train: they are new devices."""
    out = {who: local for who, local in found.devices.items() if who in left}
    mine = {who: local for who, local in found.devices.items() if who not in left}
    return replace(found, devices=mine, new_devices={**found.new_devices, **out})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fleet(Mapping[ClientId, DeviceData]):
    """Devices and their samples: a mapping from a device's name to its training and its held-out samples.

    `read` gives the data set for a seed, `scheme` shares it among `count` devices (0: as many as the data name).
    `options` are the options of emulator/options.py by which a run's folder names this fleet; `model` is the model that
    suits the data, if there is one; `classes` are the values of labels that were no numbers, `columns` the names of
    the inputs where they are a table's; `pixels`: the user's samples were uint8 and became 0 to 1. `seed` cuts the
    data; None takes the seed of the run, as the command line does. Then the mapping, `groups` and `new_devices` are
    those of seed 0, and `Result.split` has those of the run: a warning says where the two differ. `given` has the name
    of each device by what the user called it, where that is no name that the protocol allows: `fleet[7]` is the device
    `subject-7`.

    >>> from emulator.data.fleet import named_fleet
    >>> fleet = named_fleet("digits", devices=4)
    >>> fleet
    Fleet(digits, 4 devices, label-permutations:groups=3)
    >>> len(fleet["device-00"].train)
    204
    >>> len(fleet.without(["device-00"])), "device-00" in fleet.without(["device-00"]).new_devices
    (3, True)
    """

    read: Callable[[int], DataSet]
    scheme: PartitionScheme
    count: int
    options: Mapping[str, Any]
    model: str = ""
    seed: int | None = None
    classes: Sequence[str | bool] = ()
    columns: Sequence[str] = ()
    pixels: bool = False
    given: Mapping[Any, ClientId] = field(default_factory=dict)
    _cuts: dict[int, FleetData] = field(default_factory=dict, init=False)
    _marks: dict[str, int] = field(default_factory=dict, init=False)  # of the cut that was shown, and of the last run's

    __eq__ = object.__eq__  # a fleet is itself alone: a mapping would compare samples, whose equality is an array
    __hash__ = object.__hash__

    def cut(self, seed: int = 0) -> FleetData:
        """The samples of every device in a run with this seed; the last cut is kept. Raises UsageError, ConfigError."""
        seed = seed if self.seed is None else self.seed
        found = self._cuts.get(seed)  # another thread may cut by another seed meanwhile
        if found is None:
            found = self.scheme.split(self.read(seed), devices=self.count, seed=seed)
            if not isinstance(found, FleetData):
                told = f"{type(self.scheme).__name__}.split returned {type(found).__name__}"
                raise UsageError(told, hint="return make_fleet_data(data, PartitionIndices(train=rows), rng)")
            if not found.devices:
                raise ConfigError("no device has enough samples", hint="give each at least two: to train and to test")
            called = {name: value for value, name in self.given.items() if value != name}
            found = replace(found, classes=self.classes, columns=self.columns, called=called, pixels=self.pixels)
            self._cuts.clear()
            self._cuts[seed] = found
        return found

    def cut_for_run(self, seed: int) -> FleetData:
        """See `cut`. Warns where the user has seen other samples of this fleet than those of the run."""
        found = self.cut(seed)
        self._mark("run", found)
        return found

    def _show(self) -> FleetData:
        """What the user sees. Warns where the last run had other samples."""
        found = self.cut()
        if "shown" not in self._marks:
            self._mark("shown", found)
        return found

    def _mark(self, which: str, found: FleetData) -> None:
        if self.seed is None and "told" not in self._marks:
            self._marks[which] = _mark_of(found)
            if len(set(self._marks.values())) > 1:
                log.warning("%s", OTHER_CUT)
                self._marks["told"] = 1

    @property
    def groups(self) -> Mapping[ClientId, int]:
        """The true group of each device, where the partition makes groups."""
        return self._show().groups

    @property
    def new_devices(self) -> _Called:
        """The devices that do not train, for `Result.nearest`; also by what the user called them."""
        return _Called(self._show().new_devices, self.given)

    def only(self, devices: Iterable[object] | object) -> Fleet:
        """The fleet of these devices; the others become its `new_devices`. Raises UsageError for an unknown one."""
        return self._with({self.name(who) for who in _listed(devices)})

    def without(self, devices: Iterable[object] | object) -> Fleet:
        """The fleet without these devices, which become its `new_devices`. Raises UsageError for an unknown one."""
        left = {self.name(who) for who in _listed(devices)}
        return self._with({who for who in self if who not in left})

    def name(self, who: object) -> ClientId:
        """The name of a device in assignments and files, by what the user called it. Raises UsageError."""
        devices = self.cut().devices
        found = who if isinstance(who, str) and who in devices else self.given.get(who)
        if found is None or found not in devices:
            raise UsageError(f"no device {who!r}", hint=f"there are {len(devices)}, from {min(devices)!r} on")
        return found

    def _with(self, names: set[ClientId]) -> Fleet:
        if not names:
            raise UsageError("a fleet without devices", hint="keep at least one")
        whole, left = self.scheme, frozenset(self.keys() - names)
        cuts = {seed: _leave_out(found, left) for seed, found in self._cuts.items()}
        if isinstance(self.scheme, SomeDevices):
            whole, left = self.scheme.whole, left | self.scheme.left
        told = ", ".join(sorted(left))
        if len(told) > SHOWN_NAMES:
            told = f"{len(left)} devices ({zlib.crc32(told.encode()):08x})"
        how = str(self.options["partition"]).partition(" without ")[0]
        options = {**self.options, "partition": f"{how} without {told}" if left else how}
        made = replace(self, scheme=SomeDevices(whole=whole, left=left), options=options)
        made._cuts.update(cuts)  # noqa: SLF001 - so that nothing is read again
        return made

    def __getitem__(self, name: object) -> DeviceData:
        cut = self._show()
        return _Called(cut.devices, self.given, cut.new_devices)[name]

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
        shape, y = self._shape(one.x), [local.train.y for local in shown.devices.values()]
        named = np.issubdtype(one.y.dtype, np.integer)
        what = f"{max(int(v.max()) for v in y) + 1} classes" if named else f"targets {list(one.y.shape[1:])}"
        size = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        told = f"{len(sizes)} devices with {size} training samples {shape} of {what}"
        return f"Fleet({self.options['data_set']}, {told}, {how})"

    def _shape(self, x: Array) -> str:
        """The shape of a sample, and of a table the first and the last of its columns: one too many may stand there."""
        names = self.columns
        if not names:
            return str(list(x.shape[1:]))
        return f"[{x.shape[1]}: {', '.join(names) if len(names) <= SHOWN_COLUMNS else f'{names[0]} ... {names[-1]}'}]"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{who}</td><td>{len(local.train)}</td><td>{len(local.test) if local.test else 0}</td></tr>"
            for who, local in islice(self.cut().devices.items(), SHOWN_DEVICES)
        )
        more = f"<p>and {len(self) - SHOWN_DEVICES} more</p>" if len(self) > SHOWN_DEVICES else ""
        head = "<tr><th>device</th><th>training samples</th><th>test samples</th></tr>"
        return f"<p>{html.escape(repr(self))}</p><table>{head}{rows}</table>{more}"


def _mark_of(found: FleetData) -> int:
    """A checksum of a few samples of the first devices."""
    some = islice((*found.devices.values(), *found.new_devices.values()), MARKED_DEVICES)
    return zlib.crc32(b"".join(local.train.x[:MARKED_SAMPLES].tobytes() for local in some))


class _Called(Mapping[ClientId, DeviceData]):
    """Devices by name, or by what the user called them."""

    def __init__(
        self,
        devices: Mapping[ClientId, DeviceData],
        given: Mapping[Any, ClientId],
        new: Mapping[ClientId, DeviceData] | None = None,
    ) -> None:
        self._devices, self._given, self._new = devices, given, new or {}

    def __getitem__(self, name: object) -> DeviceData:
        found = name if isinstance(name, str) and name in self._devices else self._given.get(name, str(name))
        if found in self._devices:
            return self._devices[found]
        if found in self._new:
            raise KeyError(f"{name!r} does not train: fleet.new_devices has it")
        some = f", from {min(self._devices)!r} on" if self._devices else ""
        raise KeyError(f"no device {name!r}: there are {len(self._devices)}{some}")

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def __repr__(self) -> str:
        return repr(dict(self._devices))


def _listed(devices: Iterable[object] | object) -> list[object]:
    """A list of devices, also where one is given, as a number of numpy."""
    return [devices] if isinstance(devices, str) or not isinstance(devices, Iterable) else list(devices)


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


def is_named_fleet(data_set: str, partition: str) -> bool:
    """Whether a run's devices can be made again by these words of its file: a part given in Python has none."""
    if registry.is_given_in_python(data_set):
        return False
    try:
        registry.find_data_set(data_set)
        if partition:
            partition_schemes.parse_scheme(partition)
    except (ConfigError, UsageError):
        return False
    return True


def _default_count(entry: registry.DataSetEntry, scheme: PartitionScheme) -> int:
    """As many devices as the scheme knows of by itself, else as many as suit the data set."""
    return 0 if getattr(scheme, "knows_devices", False) else entry.devices


def _read_named(name: str, data: Path | None, seed: int) -> DataSet:
    return registry.load_data_set(name, data, seed=seed)
