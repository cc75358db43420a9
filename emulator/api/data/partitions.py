"""How devices share a data set, as values: `fc.fleet(train, partition=fc.partitions.Dirichlet(0.1), devices=100)`.

These are the schemes of the command line's `--partition`, with the same settings. In their place `fc.fleet` and
`fc.fleets` also take such a text; one list of sample numbers per device, or a dict that names the devices (torch's
random_split and scikit-learn's splitters give such lists); a plain function `make(y, devices, seed)` that returns them;
and any partitioner of flwr-datasets. An object with a method `split` of your own is a scheme like ours.

>>> import fedcenters as fc
>>> fc.fleets.digits(devices=4, partition=fc.partitions.Dirichlet(0.5))
Fleet(digits, 4 devices, dirichlet:alpha=0.5)
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, cast

from coordinator.strategies.common.setting_checks import check_kind
from emulator.api.data.flower import FlowerParts, for_flower
from emulator.data.given_parts import PartsOf, given_parts
from emulator.data.mixtures import Mixtures
from emulator.data.ordered_schemes import Continuous, Shards, SizeSkew
from emulator.data.partition_schemes import (
    ClusterDirichlet,
    ClusterNClass,
    Dirichlet,
    Iid,
    LabelPermutations,
    NClass,
    PartitionScheme,
    Rotations,
    Shifts,
    parse_scheme,
)
from emulator.data.user_schemes import ByUser

__all__ = [
    "ByUser",
    "ClusterDirichlet",
    "ClusterNClass",
    "Continuous",
    "Dirichlet",
    "Iid",
    "LabelPermutations",
    "Mixtures",
    "NClass",
    "Rotations",
    "Shards",
    "Shifts",
    "SizeSkew",
    "for_flower",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def as_scheme(partition: Any) -> PartitionScheme:  # noqa: ANN401 - what users have
    """What a user gave as a partition, as a scheme. Raises UsageError, ConfigError.

    >>> as_scheme("shards:each=3")
    Shards(each=3)
    >>> as_scheme([[0, 1, 2], [3, 4, 5]])
    2 given parts
    """
    if isinstance(partition, str):
        return parse_scheme(partition)
    if isinstance(partition, type) and getattr(partition, "split", None):
        return cast("PartitionScheme", partition())
    if hasattr(partition, "load_partition") and hasattr(type(partition), "num_partitions"):
        return FlowerParts(partition)
    if hasattr(partition, "split") and not isinstance(partition, type):
        for f in fields(partition) if is_dataclass(partition) else ():
            check_kind(f.name.replace("_", "-"), getattr(partition, f.name), str(f.type))
        return cast("PartitionScheme", partition)
    return PartsOf(partition) if callable(partition) else given_parts(partition)
