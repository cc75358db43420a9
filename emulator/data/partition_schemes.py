"""Ways to cut a data set into a fleet, by name: `parse_scheme("dirichlet:alpha=0.1").split(data, devices=200, seed=0)`.

A scheme is a frozen dataclass of its settings. The same data, devices and seed give the same fleet. Unless a scheme
says otherwise every sample is used exactly once. Sources: WeCFL (Ma 2022), FedSoft (Ruan 2022), IFCA (Ghosh 2020).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Protocol, cast

import numpy as np

from coordinator.strategies.common.setting_checks import check_range
from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.task import F64, I64
from emulator.data import share_matrices, wecfl_compat
from emulator.data.fleet_split import (
    FleetData,
    PartitionIndices,
    label_permutation_groups,
    latin_square,
    make_fleet_data,
)
from emulator.data.loaders.samples import DataSet
from emulator.data.mixtures import MAX_QUARTER_TURNS, Mixtures
from emulator.data.ordered_schemes import Continuous, Shards, SizeSkew
from emulator.data.scheme_checks import check_alpha, check_counts, check_devices, check_kinds
from emulator.data.user_schemes import ByUser
from export.plugins import find_by_name, nearest_name_hint

MAX_CLASSES = 1_000_000  # shares have a column for each, also for numbers without samples


class PartitionScheme(Protocol):
    """One way to split a data set."""

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        """A fleet of `devices` (0: as many as the data name). Raises ConfigError when it cannot be made."""


@dataclass(frozen=True, kw_only=True)
class Iid:
    """Every device gets the same number of random samples, up to one."""

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        rng = _rng(seed)
        return make_fleet_data(data, _evenly(data, devices, rng), rng)


@dataclass(frozen=True, kw_only=True)
class SharesOfClasses(ABC):
    """Devices get shares of every class, which are drawn until each device has enough samples."""

    least: int = 10  # samples of the training part that every device must get
    paper_quirks: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        check_counts(self, least=0)

    @abstractmethod
    def draw(self, devices: int, held: I64, rng: np.random.Generator) -> F64:
        """[devices, classes] shares; `held` are the classes that have samples, sorted: the last one is the greatest."""

    def groups_of(self, devices: int) -> I64 | None:  # noqa: ARG002 - schemes with groups override it
        """The true group of each device [devices]; None without groups."""
        return None

    def _check_cover(self, what: str, many: int, each: int, classes: int) -> None:
        if many * each < classes and not self.paper_quirks:
            told = f"{many} {what} with {each} classes each cannot hold all {classes}"
            raise ConfigError(told, hint=f"use more {what}, or more classes of each")

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        """Both parts are dealt by the same shares. Device i belongs to group i mod `groups` where there are groups."""
        rng, classes, member = _rng(seed), _classes(data), self.groups_of(devices)
        check_devices(devices)
        if devices * max(2, self.least) > len(data.train) and not self.paper_quirks:
            raise ConfigError(
                f"{devices} devices of {max(2, self.least)} samples each, and the data have {len(data.train)}",
                hint="use fewer devices, or a smaller `least`",
            )
        parts = [part.y for part in (data.train, data.test) if part is not None]
        held = np.unique(np.concatenate([np.unique(y) for y in parts]))
        draw = partial(self.draw, devices, held, rng)
        if self.paper_quirks:
            cut = wecfl_compat.cut_like_wecfl(data, draw, member, rng)
            return make_fleet_data(data, self.seen_by_devices(cut, classes, rng), rng)
        train = np.bincount(data.train.y, minlength=classes)
        test = None if data.test is None else np.bincount(data.test.y, minlength=classes)
        tested = "" if test is None else " to train and one to test"

        def fits(p: F64) -> bool:
            enough = (share_matrices.dealt_sizes(p, train) >= max(2, self.least)).all() and np.allclose(
                p[:, held].sum(axis=0), 1.0
            )
            return bool(enough and (test is None or (share_matrices.dealt_sizes(p, test) >= 1).all()))

        p = share_matrices.draw_until(
            draw,
            fits,
            what=f"every class a device, and every device {max(2, self.least)} samples{tested}",
            hint="use fewer devices, a smaller `least`, or a larger alpha",
        )
        dealt = share_matrices.deal_by_shares(data.train.y, p, rng)
        tests = None if data.test is None else share_matrices.deal_by_shares(data.test.y, p, rng)
        cut = PartitionIndices(train=dealt, test=tests, groups=member)
        return make_fleet_data(data, self.seen_by_devices(cut, classes, rng), rng)

    def seen_by_devices(self, cut: PartitionIndices, classes: int, rng: np.random.Generator) -> PartitionIndices:  # noqa: ARG002 - schemes that change samples override it
        """The cut with what devices make of their samples: how they turn images, what they call classes."""
        return cut


@dataclass(frozen=True, kw_only=True)
class Dirichlet(SharesOfClasses):
    """Each class is divided by a Dirichlet(alpha) over all devices (WeCFL, client-wise)."""

    alpha: float = field(default=0.1, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha("alpha", self.alpha)

    def draw(self, devices: int, held: I64, rng: np.random.Generator) -> F64:
        return share_matrices.dirichlet_shares(devices, int(held[-1]) + 1, self.alpha, rng)


@dataclass(frozen=True, kw_only=True)
class Shifts(Dirichlet):
    """Labels, images and meanings differ at once (FedRC, Guo 2024): a fleet in which only the meanings are groups.

    Labels: each class is divided by a Dirichlet(alpha) over all devices. Images: device i turns them by i / `groups`
    modulo `turns` quarters of a circle. Meanings: device i writes the classes as group i mod `groups` does, in a
    permutation of its own, no two of which agree for any class.
    """

    alpha: float = field(default=1.0, kw_only=False)
    groups: int = 3
    turns: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, groups=1)
        check_range("turns", self.turns, low=1, high=MAX_QUARTER_TURNS)

    def groups_of(self, devices: int) -> I64:
        return _members(devices, self.groups)

    def seen_by_devices(self, cut: PartitionIndices, classes: int, rng: np.random.Generator) -> PartitionIndices:
        _within(self.groups, classes, "groups")
        turns = np.arange(len(cut.train)) // self.groups % self.turns
        return replace(cut, turns=turns, written=latin_square(classes, self.groups, rng)[cut.groups])


@dataclass(frozen=True, kw_only=True)
class NClass(SharesOfClasses):
    """Every device draws `classes` classes; a class is shared equally by those that drew it (WeCFL, client-wise)."""

    classes: int = field(default=2, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, classes=1)

    def draw(self, devices: int, held: I64, rng: np.random.Generator) -> F64:
        _within(self.classes, len(held), "classes")
        self._check_cover("devices", devices, self.classes, len(held))
        return share_matrices.n_class_shares(devices, held, int(held[-1]) + 1, self.classes, rng)


@dataclass(frozen=True, kw_only=True)
class ClusterDirichlet(SharesOfClasses):
    """Dirichlet(alpha_group) over groups, then Dirichlet(alpha) over the devices of each (WeCFL, "(0.1, 10)")."""

    groups: int = 10
    alpha_group: float = 0.1
    alpha: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, groups=1)
        check_alpha("alpha_group", self.alpha_group)
        check_alpha("alpha", self.alpha)

    def groups_of(self, devices: int) -> I64:
        return _members(devices, self.groups)

    def draw(self, devices: int, held: I64, rng: np.random.Generator) -> F64:
        classes = int(held[-1]) + 1
        whole = share_matrices.dirichlet_shares(self.groups, classes, self.alpha_group, rng)
        return share_matrices.expand_group_shares(
            whole,
            self.groups_of(devices),
            lambda _, size: share_matrices.dirichlet_shares(size, classes, self.alpha, rng),
        )


@dataclass(frozen=True, kw_only=True)
class ClusterNClass(SharesOfClasses):
    """Groups draw `classes_group` classes each, their devices `classes` of these (WeCFL, "(3, 2)-class")."""

    groups: int = 10
    classes_group: int = 3
    classes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, groups=1, classes_group=1, classes=1)

    def groups_of(self, devices: int) -> I64:
        return _members(devices, self.groups)

    def draw(self, devices: int, held: I64, rng: np.random.Generator) -> F64:
        _within(self.classes_group, len(held), "classes-group")
        _within(self.classes, self.classes_group, "classes")
        self._check_cover("groups", self.groups, self.classes_group, len(held))
        self._check_cover("devices", devices // self.groups, self.classes, self.classes_group)
        classes = int(held[-1]) + 1
        whole = share_matrices.n_class_shares(self.groups, held, classes, self.classes_group, rng)

        def within(g: int, size: int) -> F64:
            return share_matrices.n_class_shares(size, np.flatnonzero(whole[g]), classes, self.classes, rng)

        return share_matrices.expand_group_shares(whole, self.groups_of(devices), within)


@dataclass(frozen=True, kw_only=True)
class Rotations:
    """Random equal parts; group g turns its images by g of `groups` equal parts of a circle (IFCA)."""

    groups: int = field(default=4, kw_only=False)

    def __post_init__(self) -> None:
        check_kinds(self)
        check_counts(self, groups=1)

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        if self.groups not in (1, 2, 4):
            raise ConfigError(
                f"rotations of {self.groups} groups", hint="use groups=1, 2 or 4: images turn by quarters"
            )
        rng, member = _rng(seed), _members(devices, self.groups)
        cut = replace(_evenly(data, devices, rng), groups=member, turns=member * (4 // self.groups))
        return make_fleet_data(data, cut, rng)


@dataclass(frozen=True, kw_only=True)
class LabelPermutations:
    """Random equal parts; each group writes the classes in its own permutation. `new` devices only join later."""

    groups: int = field(default=3, kw_only=False)
    new: int = 3

    def __post_init__(self) -> None:
        check_kinds(self)
        check_counts(self, groups=1, new=0)

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        _classes(data)
        return label_permutation_groups(data, devices=devices, new=self.new, groups=self.groups, seed=seed)


PARTITION_SCHEMES: dict[str, type[PartitionScheme]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shifts": Shifts,
    "n-class": NClass,
    "cluster-dirichlet": ClusterDirichlet,
    "cluster-n-class": ClusterNClass,
    "rotations": Rotations,
    "label-permutations": LabelPermutations,
    "mixtures": Mixtures,
    "by-user": ByUser,
    "size-skew": SizeSkew,
    "shards": Shards,
    "continuous": Continuous,
}
_READERS: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: bool(("0", "1").index(text)),
}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "0 or 1"}


def parse_scheme(text: str, **overrides: int | None) -> PartitionScheme:
    """`name` or `name:key=value,key=value`; an override replaces a key, None leaves it.

    A user's own scheme is `package.module:Class`, or registered (export/plugins.py). Raises UsageError for an
    unknown scheme or key, or a value that does not fit.
    """
    name, _, rest = text.partition(":")
    if name not in PARTITION_SCHEMES and (member := rest.partition(":")[0]) and "=" not in member:
        name, rest = f"{name}:{member}", rest.partition(":")[2]
    scheme = find_by_name("partitions", name, PARTITION_SCHEMES)
    if not isinstance(scheme, type) or not is_dataclass(scheme):
        raise UsageError(f"{name} is no partition", hint="a partition is a frozen dataclass with a method split")
    types = {f.name.replace("_", "-"): f.type for f in fields(scheme)}
    kinds = {key: kind.__name__ if isinstance(kind, type) else str(kind) for key, kind in types.items()}
    values: dict[str, object] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key not in kinds:
            raise UsageError(f"{pair!r} is no setting of partition {name!r}", hint=nearest_name_hint(key, kinds))
        if kinds[key] not in _READERS:
            hint = "give it in Python, or declare it as int, float, str or bool"
            raise UsageError(f"{key} of partition {name!r} is {kinds[key]}, which no text can give", hint=hint)
        try:
            values[key.replace("-", "_")] = _READERS[kinds[key]](value)
        except ValueError:
            raise UsageError(
                f"{key} of partition {name!r} is {value!r:.80}", hint=f"use {_KINDS[kinds[key]]}"
            ) from None
    given = {key: value for key, value in overrides.items() if value is not None}
    if unused := sorted(given.keys() - kinds.keys()):
        told = f"the partition {name} has no {unused[0]}, and {unused[0]} is {given[unused[0]]}"
        raise UsageError(told, hint=f"leave {unused[0]} out, or name a partition that has them, as label-permutations")
    values |= given
    return cast("PartitionScheme", scheme(**values))


def describe_scheme(scheme: PartitionScheme) -> str:
    """The text that `parse_scheme` reads, with the settings that are not the defaults; else the scheme's repr."""
    name = next((name for name, kind in PARTITION_SCHEMES.items() if type(scheme) is kind), "")
    if not name or not is_dataclass(scheme):
        return repr(scheme)
    changed = [
        f"{f.name.replace('_', '-')}={int(value) if isinstance(value, bool) else value}"
        for f in fields(scheme)
        if (value := getattr(scheme, f.name)) != f.default
    ]
    return name + (f":{','.join(changed)}" if changed else "")


def _rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _classes(data: DataSet) -> int:
    if not data.classes:
        raise ConfigError("this data set has no classes to cut by", hint="use iid or mixtures")
    if data.classes > MAX_CLASSES:
        hint = "number the classes from 0: y = np.unique(y, return_inverse=True)[1]"
        raise ConfigError(f"y holds the class {data.classes - 1}", hint=hint)
    return data.classes


def _within(value: int, most: int, name: str) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{name} is {value}", hint=f"use 1 to {most}")


def _members(devices: int, groups: int) -> I64:
    if not 1 <= groups <= devices:
        raise ConfigError(f"{groups} groups of {devices} devices", hint="every group needs a device")
    return np.arange(devices, dtype=np.int64) % groups


def _evenly(data: DataSet, devices: int, rng: np.random.Generator) -> PartitionIndices:
    check_devices(devices)
    parts = [part for part in (data.train, data.test) if part is not None]
    if devices > min(map(len, parts)) // 2:
        tests = f" and {len(parts[1])} to test" if len(parts) > 1 else ""
        told = f"{devices} devices for {len(parts[0])} samples{tests}, two of each for a device"
        raise ConfigError(told, hint="use fewer devices")
    dealt = [share_matrices.deal_evenly(len(part), devices, rng) for part in parts]
    return PartitionIndices(train=dealt[0], test=dealt[1] if len(dealt) > 1 else None)
