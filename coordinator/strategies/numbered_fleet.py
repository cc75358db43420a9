"""Fleets of very many devices, which have numbers: a name is made when it is read, what is known of them is an array.

A round then costs as much as the devices that take part in it. The functions here take this and the usual kind of
fleet, a dict, and give the same for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from edge_client.protocol.task import I64, ClientId

PREFIX = "device-"
NO_CENTER = -1  # the center of a device that has none


@dataclass(frozen=True)
class DeviceNames(Sequence[ClientId]):
    """The names of devices 0, 1, ..., `size` - 1, which are sorted: as many digits for each.

    >>> list(DeviceNames(3)), DeviceNames(200)[7], DeviceNames(200).number("device-007")
    (['device-0', 'device-1', 'device-2'], 'device-007', 7)
    """

    size: int

    @cached_property
    def digits(self) -> int:
        return len(str(max(self.size - 1, 0)))

    def number(self, who: object) -> int | None:
        """The number of a device by its name; None for no device."""
        digits = who.removeprefix(PREFIX) if isinstance(who, str) and who.startswith(PREFIX) else ""
        if len(digits) != self.digits or not (digits.isascii() and digits.isdigit()):
            return None
        return number if (number := int(digits)) < self.size else None

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, at: int) -> ClientId: ...

    @overload
    def __getitem__(self, at: slice) -> list[ClientId]: ...

    def __getitem__(self, at: int | slice) -> ClientId | list[ClientId]:
        if isinstance(at, slice):
            return [self[i] for i in range(self.size)[at]]
        return f"{PREFIX}{range(self.size)[at]:0{self.digits}d}"

    def __contains__(self, who: object) -> bool:
        return self.number(who) is not None


class NumberedFleet(Mapping[ClientId, int]):
    """Devices and their numbers of training samples, `samples` [n]."""

    def __init__(self, samples: I64) -> None:
        self.names, self.samples = DeviceNames(len(samples)), samples

    def __getitem__(self, who: ClientId) -> int:
        if (number := self.names.number(who)) is None:
            raise KeyError(who)
        return int(self.samples[number])

    def __contains__(self, who: object) -> bool:
        return who in self.names

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class NumberedAssignment(Mapping[ClientId, int]):
    """The center of each device, `centers` [n] int16; NO_CENTER: it has none, and is not in the mapping."""

    def __init__(self, centers: NDArray[np.int16]) -> None:
        self.names, self.centers = DeviceNames(len(centers)), centers

    def __getitem__(self, who: ClientId) -> int:
        number = self.names.number(who)
        if number is None or self.centers[number] == NO_CENTER:
            raise KeyError(who)
        return int(self.centers[number])

    def __iter__(self) -> Iterator[ClientId]:
        return (self.names[int(number)] for number in np.flatnonzero(self.centers != NO_CENTER))

    def __len__(self) -> int:
        return sum(self.members.values())

    @cached_property
    def members(self) -> Counter[int]:
        """How many devices each center has."""
        numbers, counts = np.unique(self.centers[self.centers != NO_CENTER], return_counts=True)
        return Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


def used_centers(assignment: Mapping[ClientId, int]) -> set[int]:
    """The centers that have a device; those of a numbered fleet are not listed."""
    return {*(assignment.members if isinstance(assignment, NumberedAssignment) else assignment.values())}


def sorted_names(fleet: Mapping[ClientId, int]) -> Sequence[ClientId]:
    """The devices of a fleet; those of a numbered one are not listed."""
    return fleet.names if isinstance(fleet, NumberedFleet) else sorted(fleet)


def mean_samples(fleet: Mapping[ClientId, int]) -> float:
    """The mean number of training samples of a device."""
    total = int(fleet.samples.sum()) if isinstance(fleet, NumberedFleet) else sum(fleet.values())
    return total / max(1, len(fleet))


def all_of_one_center(fleet: Mapping[ClientId, int]) -> Mapping[ClientId, int]:
    """The assignment of a method that has one center."""
    if isinstance(fleet, NumberedFleet):
        return NumberedAssignment(np.zeros(len(fleet), np.int16))
    return dict.fromkeys(sorted(fleet), 0)


def reassigned(
    fleet: Mapping[ClientId, int], before: Mapping[ClientId, int], chosen: Mapping[ClientId, int]
) -> Mapping[ClientId, int]:
    """The assignment `before` with the centers that devices have `chosen` since."""
    if not isinstance(fleet, NumberedFleet):
        return {**before, **chosen}
    centers = (
        before.centers.copy() if isinstance(before, NumberedAssignment) else np.full(len(fleet), NO_CENTER, np.int16)
    )
    for who, center in chosen.items():
        centers[fleet.names.number(who)] = center
    return NumberedAssignment(centers)


def members_of_centers(assignment: Mapping[ClientId, int]) -> Counter[int]:
    """How many devices each center has."""
    return assignment.members if isinstance(assignment, NumberedAssignment) else Counter(assignment.values())
