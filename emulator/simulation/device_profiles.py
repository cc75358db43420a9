"""How fast and how reliable emulated devices are, in virtual seconds.

Whether a device is reachable at some moment is a function of the seed, its name and the moment. The built-in numbers
are round and plausible, not measured. profile_files.py reads others from a file.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.strategies.numbered_fleet import NumberedFleet
from edge_client.protocol.task import ClientId

CYCLE_S = 3_600.0


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One kind of device: seconds per batch trained or evaluated, bytes per second each way, seconds per message.

    In every cycle of `cycle_s` seconds the device is reachable for `availability` of them, and away once for the rest;
    when the cycles begin, and when in a cycle it is away, is drawn for each device. `dropout` is the probability that a
    task which reached it is never answered. `share` says how common the kind is beside the others.
    """

    name: str
    step_s: float
    evaluate_s: float
    down_bytes_s: float
    up_bytes_s: float
    latency_s: float
    availability: float = 1.0
    dropout: float = 0.0
    cycle_s: float = CYCLE_S
    share: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.availability <= 1 and 0 <= self.dropout <= 1):
            raise ValueError(f"availability and dropout are 0 to 1, got {self.availability} and {self.dropout}")
        if min(self.step_s, self.evaluate_s, self.latency_s) < 0:
            raise ValueError("a device takes no negative time")
        if min(self.down_bytes_s, self.up_bytes_s, self.cycle_s, self.share) <= 0:
            raise ValueError("bytes per second, the cycle and the share are positive")

    def work_s(self, steps: int, models: int, *, samples: int, batch: int) -> float:
        """Virtual seconds of so many local steps and of so many models that are evaluated on so many samples."""
        return steps * self.step_s + models * -(-samples // batch) * self.evaluate_s

    def down_s(self, size: int) -> float:
        """Virtual seconds to receive `size` bytes."""
        return self.latency_s + size / self.down_bytes_s

    def up_s(self, size: int) -> float:
        """Virtual seconds to send `size` bytes."""
        return self.latency_s + size / self.up_bytes_s

    def reachable_s(self, who: ClientId, at_s: float, *, seed: int) -> float:
        """The first moment from `at_s` on at which the device can be talked to; infinity: it never can."""
        if self.availability in (0.0, 1.0):
            return at_s if self.availability else math.inf
        away_s = (1 - self.availability) * self.cycle_s
        shift_s = uniform_hash(seed, who, "cycle") * self.cycle_s
        cycle = math.floor((at_s + shift_s) / self.cycle_s)
        leaves_s = cycle * self.cycle_s - shift_s + uniform_hash(seed, who, "away", cycle) * (self.cycle_s - away_s)
        return max(at_s, leaves_s + away_s) if at_s >= leaves_s else at_s

    def silent_after(self, who: ClientId, *task: int, seed: int) -> float | None:
        """The part of the work, 0 to 1, after which the device drops out of a task; None: it does not."""
        lot = uniform_hash(seed, who, "dropout", *task)
        return lot / self.dropout if lot < self.dropout else None


DEVICE_PROFILES = (
    DeviceProfile(name="board", step_s=0.02, evaluate_s=0.008, down_bytes_s=2e6, up_bytes_s=1e6, latency_s=0.05),
    DeviceProfile(name="phone", step_s=0.008, evaluate_s=0.003, down_bytes_s=5e6, up_bytes_s=1.5e6, latency_s=0.08),
    DeviceProfile(name="sensor", step_s=0.08, evaluate_s=0.03, down_bytes_s=3e5, up_bytes_s=1e5, latency_s=0.2),
)


def uniform_hash(*by: object) -> float:
    """A number in [0, 1) that follows from these alone; their texts must tell them apart."""
    digest = hashlib.sha256("/".join(map(str, by)).encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / 2**53  # 53 bits: all that a float64 below 1 can hold


class DrawnProfiles(Mapping[ClientId, DeviceProfile]):
    """The profile of each client, drawn when it is read."""

    def __init__(self, clients: Collection[ClientId], seed: int, kinds: Sequence[DeviceProfile]) -> None:
        ends = np.cumsum([kind.share for kind in kinds])
        self._clients, self._seed, self._kinds, self._ends = clients, seed, kinds, (ends / ends[-1]).tolist()

    def __getitem__(self, who: ClientId) -> DeviceProfile:
        if who not in self._clients:
            raise KeyError(who)
        return self._kinds[bisect_right(self._ends, uniform_hash(self._seed, who, "profile"))]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def draw_profiles(
    clients: Iterable[ClientId], seed: int, kinds: Sequence[DeviceProfile] = DEVICE_PROFILES
) -> Mapping[ClientId, DeviceProfile]:
    """A profile for each client, by the shares of the kinds; the same seed gives a client the same one in any fleet.

    No stream of random numbers is shared with what cuts the data, or its speed would follow from how much it holds.
    """
    if isinstance(clients, NumberedFleet):
        return DrawnProfiles(clients, seed, kinds)
    return dict(DrawnProfiles(dict.fromkeys(sorted(clients)), seed, kinds))
