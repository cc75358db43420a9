"""Partitions that the user gives: lists of sample numbers, of whatever library, or a plain function that makes them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from edge_client.errors import ConfigError
from edge_client.protocol.task import I64
from emulator.data.fleet_split import FleetData, PartitionIndices, device_names, make_fleet_data
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.user_schemes import one_domain_each

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class GivenParts:
    """The samples of each device by number: an array of them, or a pair (to train, to test); a mapping names devices.

    Without pairs each device's samples are split by the data set's `train_share`. Where the data set has a test part,
    the second of a pair counts there.
    """

    parts: Sequence[object] = field(kw_only=False)
    names: Sequence[str] = ()

    knows_devices: ClassVar[bool] = True  # 0 devices are as many as there are parts

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        if devices not in (0, len(self.parts)):
            hint = "leave out devices, or give one list of indices for each"
            raise ConfigError(f"{devices} devices, but the partition has {len(self.parts)}", hint=hint)
        paired = {isinstance(part, tuple) for part in self.parts}
        if len(paired) != 1 or (data.test is not None and paired == {False}):
            hint = "give (train, test) pairs of indices for all devices, or indices alone and no test part"
            raise ConfigError("the partition does not say which samples test", hint=hint)
        train, test = [self._index(i, data.train, 0) for i in range(len(self.parts))], None
        if paired == {True}:
            test = [self._index(i, data.test or data.train, 1) for i in range(len(self.parts))]
            if data.test is None:
                _warn_of_trained(np.concatenate(train), np.concatenate(test))
        else:
            _warn_of_repeats(np.concatenate(train))
        groups = one_domain_each(data, train)
        cut = PartitionIndices(names=self.names, train=train, test=test, groups=groups)
        return make_fleet_data(data, cut, np.random.Generator(np.random.PCG64(seed)))

    def _index(self, i: int, samples: RawSamples, place: int) -> I64:
        part = self.parts[i]
        given = part[place] if isinstance(part, tuple) else part
        index = np.asarray(getattr(given, "indices", given))  # a torch Subset has its indices
        who = self.names[i] if self.names else f"device {i}"
        if index.dtype == bool and index.shape == (len(samples),):
            index = np.flatnonzero(index)
        if index.ndim != 1 or not (np.issubdtype(index.dtype, np.integer) or not index.size):
            raise ConfigError(f"the samples of {who} are {index.dtype} {list(index.shape)}", hint="list its numbers")
        least = 1 if isinstance(part, tuple) else 2
        if len(index) < least:
            raise ConfigError(f"{who} has {len(index)} samples", hint=f"give each device at least {least}")
        if index.min() < 0 or index.max() >= len(samples):
            raise ConfigError(
                f"{who} has sample {index.max() if index.max() >= len(samples) else index.min()}",
                hint=f"there are {len(samples)}: use 0 to {len(samples) - 1}",
            )
        return index.astype(np.int64)

    def __repr__(self) -> str:
        return f"{len(self.parts)} given parts"


def _warn_of_repeats(given: I64) -> None:
    """Tell of samples that are listed more than once, since a device may then test what itself or another trains."""
    if repeated := len(given) - len(np.unique(given)):
        log.warning(
            "%s samples of the partition are listed again, so what tests may also train: list each once, or give "
            "(to train, to test) pairs",
            repeated,
        )


def _warn_of_trained(train: I64, test: I64) -> None:
    """Tell of samples that test one device and train another, as those of cross-validation do."""
    tested = np.unique(test)
    if trained := int(np.isin(tested, train).sum()):
        log.warning(
            "%s of %s samples that test also train, if on another device: the accuracy says little of new samples. Let "
            "no device train on them",
            trained,
            len(tested),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class PartsOf:
    """`make(y, devices, seed)` gives what `given_parts` takes; y are the labels [n] or targets [n, ...]."""

    make: Callable[..., object] = field(kw_only=False)

    knows_devices: ClassVar[bool] = True  # 0 devices are as many as there are parts

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        try:
            inspect.signature(self.make).bind(data.train.y, devices, seed)
        except TypeError as wrong:
            raise ConfigError(f"partition {self!r}: {wrong}", hint="write it as make(y, devices, seed)") from None
        return given_parts(self.make(data.train.y, devices, seed)).split(data, devices=devices, seed=seed)

    def __repr__(self) -> str:
        return getattr(self.make, "__name__", repr(self.make))


def given_parts(parts: object) -> GivenParts:
    """A list, a generator or a mapping of index lists as a partition. Raises ConfigError for anything else."""
    if isinstance(parts, dict):
        return GivenParts(list(parts.values()), names=device_names(list(parts)))
    try:
        found = list(parts)  # type: ignore[call-overload]  # a generator of scikit-learn among others
    except TypeError:
        found = []
    if not found:
        raise ConfigError(f"a partition is {type(parts).__name__}", hint="give one list of sample numbers per device")
    return GivenParts(found)
