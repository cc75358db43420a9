"""Fleets of the data sets that the command line knows: `fc.fleets.digits(devices=12)`.

Every function takes the same keywords. `devices`: how many; 0 makes one of every user of the data set. `partition`:
how they share the data, a value of `fc.partitions` or a text of the command line. `groups`: how many true groups the
partition makes. `data`: the folder of data sets, by default the one that FEDCENTERS_DATA names. `seed` cuts the data;
without it the seed of the run does. What is not given suits the data set, as on the command line. The samples are read
when they are first needed; a missing file raises ConfigError, which says where to get it.

>>> import fedcenters as fc
>>> fc.fleets.digits(devices=12)
Fleet(digits, 12 devices, label-permutations:groups=3)
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from edge_client.errors import UsageError
from emulator.api.data.partitions import as_scheme
from emulator.data.fleet import Fleet, named_fleet
from emulator.options import OPTIONS


def named(
    name: str,
    *,
    devices: int | None = None,
    partition: Any = "",  # noqa: ANN401 - what `as_scheme` takes
    groups: int | None = None,
    data: str | Path | None = None,
    seed: int | None = None,
) -> Fleet:
    """The fleet of a data set by the name that the command line takes, `package.module:ENTRY` among them.

    >>> from emulator.api.data import fleets
    >>> fleets.named("digits", devices=6, partition="dirichlet:alpha=0.5")
    Fleet(digits, 6 devices, dirichlet:alpha=0.5)
    """
    for key, value in (("devices", devices or None), ("groups", groups), ("seed", seed)):
        if value is not None:
            OPTIONS[key].check(value)
    if data is not None and not isinstance(data, (str, PathLike)):
        raise UsageError(f"data is {data!r}", hint='give the folder of data sets, as data="datasets"')
    folder = None if data is None else Path(data)
    how = partition if isinstance(partition, str) else as_scheme(partition)
    return named_fleet(name, devices=devices, partition=how, groups=groups, data=folder, seed=seed)


@dataclass(frozen=True)
class NamedFleet:
    """A function that makes fleets of one data set; its keywords are those of `named`, apart from the name."""

    name: str

    def __call__(
        self,
        devices: int | None = None,
        *,
        partition: Any = "",  # noqa: ANN401 - what `as_scheme` takes
        groups: int | None = None,
        data: str | Path | None = None,
        seed: int | None = None,
    ) -> Fleet:
        """A fleet of this data set. Raises UsageError for a setting that does not exist."""
        return named(self.name, devices=devices, partition=partition, groups=groups, data=data, seed=seed)


celeba = NamedFleet("celeba")
cifar10 = NamedFleet("cifar10")
digits = NamedFleet("digits")
emnist_letters = NamedFleet("emnist-letters")
fashion_mnist = NamedFleet("fashion-mnist")
femnist = NamedFleet("femnist")
fsdd = NamedFleet("fsdd")
mnist = NamedFleet("mnist")
mnist_writers = NamedFleet("mnist-writers")
regression = NamedFleet("regression")
regression_8 = NamedFleet("regression-8")
shakespeare = NamedFleet("shakespeare")
wisdm = NamedFleet("wisdm")


def __dir__() -> list[str]:
    return sorted(["named", *(name for name, value in globals().items() if isinstance(value, NamedFleet))])
