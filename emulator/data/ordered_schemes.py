"""Partitions that put the samples into an order and cut it: skewed sizes, shards of sorted labels, a continuous column.

Both parts of a data set are cut by the same rule. Sources: McMahan 2017 (shards), flwr-datasets (the laws of sizes, and
the continuous column with a strictness).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from coordinator.strategies.common.setting_checks import check_choice
from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, I64
from emulator.data.fleet_split import FleetData, PartitionIndices, make_fleet_data
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.scheme_checks import check_counts, check_devices, check_kinds

SIZE_LAWS: dict[str, Callable[[F64], F64]] = {
    "linear": lambda place: place,
    "square": np.square,
    "exponential": lambda place: np.exp(place - place.max()),
}


@dataclass(frozen=True, kw_only=True)
class SizeSkew:
    """Random samples; device i of 1..N gets a number in proportion to i, i squared or exp(i), after `least` for each.

    `law` is linear, square or exponential.
    """

    law: str = field(default="linear", kw_only=False)
    least: int = 2  # samples of each device before the rest is shared

    def __post_init__(self) -> None:
        check_kinds(self)
        check_choice("law", self.law, tuple(SIZE_LAWS))
        check_counts(self, least=0)

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        check_devices(devices)
        rng = np.random.Generator(np.random.PCG64(seed))
        weight = SIZE_LAWS[self.law](np.arange(1.0, devices + 1))

        def cut(part: RawSamples, least: int) -> list[I64]:
            _enough(len(part), devices, least)
            extra = np.rint(np.cumsum(weight / weight.sum()) * (len(part) - least * devices)).astype(np.int64)
            ends = extra[:-1] + least * np.arange(1, devices)
            return np.split(rng.permutation(len(part)), ends)

        test = None if data.test is None else cut(data.test, 1)
        return make_fleet_data(data, PartitionIndices(train=cut(data.train, max(2, self.least)), test=test), rng)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Samples in the order of their labels are cut into `each` equal shards per device, which are dealt at random."""

    each: int = field(default=2, kw_only=False)

    def __post_init__(self) -> None:
        check_kinds(self)
        check_counts(self, each=1)

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        check_devices(devices)
        if not data.classes:
            raise ConfigError("this data set has no classes to cut by", hint="use continuous, iid or mixtures")
        _enough(len(data.train), devices * self.each, 1)
        rng = np.random.Generator(np.random.PCG64(seed))
        dealt = rng.permutation(devices * self.each).reshape(devices, self.each)

        def cut(part: RawSamples) -> list[I64]:
            _enough(len(part), devices * self.each, 1 if self.each > 1 or data.test is not None else 2)
            order = rng.permutation(len(part))
            shards = np.array_split(order[np.argsort(part.y[order], kind="stable")], devices * self.each)
            return [np.sort(np.concatenate([shards[s] for s in mine])) for mine in dealt]

        test = None if data.test is None else cut(data.test)
        return make_fleet_data(data, PartitionIndices(train=cut(data.train), test=test), rng)


@dataclass(frozen=True, kw_only=True)
class Continuous:
    """Samples in the order of a column are cut into equal parts; noise in place of the order makes devices more alike.

    The column is the user's number where the data set has users, else the label or the first target. The key of the
    order is strictness z + (1 - strictness) noise: z is the standardised column, the noise is standard normal.
    Strictness 1 sorts, 0 shuffles.
    """

    strictness: float = field(default=1.0, kw_only=False)

    def __post_init__(self) -> None:
        check_kinds(self)
        if not 0 <= self.strictness <= 1:
            raise ConfigError(f"strictness is {self.strictness}", hint="use 0 (random) to 1 (sorted)")

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        check_devices(devices)
        rng = np.random.Generator(np.random.PCG64(seed))

        def cut(part: RawSamples, least: int) -> list[I64]:
            _enough(len(part), devices, least)
            value = (part.y.reshape(len(part), -1)[:, 0] if part.user is None else part.user).astype(np.float64)
            z = (value - value.mean()) / (value.std() or 1.0)
            key = self.strictness * z + (1 - self.strictness) * rng.standard_normal(len(part))
            return np.array_split(np.argsort(key, kind="stable"), devices)

        test = None if data.test is None else cut(data.test, 1)
        return make_fleet_data(data, PartitionIndices(train=cut(data.train, 2), test=test), rng)


def _enough(samples: int, parts: int, least: int) -> None:
    if parts < 1 or samples < parts * least:
        raise ConfigError(f"{samples} samples cannot be cut into {parts} parts of {least}", hint="use fewer devices")
