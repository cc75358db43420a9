"""The random draws of an exchange: which clients are asked, and with which seed each of them trains."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from coordinator.strategies.base import Fleet
from coordinator.strategies.numbered_fleet import sorted_names
from edge_client.protocol.task import ClientId

MAX_SEED = 2**53  # the protocol's: JSON numbers are exact below it


def part_of(fraction: float, count: int) -> int:
    """ceil(fraction * count) of the numbers as they are written: 0.07 of 100 are 7, and their product is 7 + 9e-16.

    >>> part_of(0.07, 100), part_of(0.071, 100)
    (7, 8)
    """
    return math.ceil(round(fraction * count, 9))


def sample_cohort(fleet: Fleet, fraction: float, rng: np.random.Generator) -> list[ClientId]:
    """ceil(fraction * m) distinct clients of a fleet of m, sorted; nothing is drawn when all of them are asked."""
    clients = sorted_names(fleet)
    count = part_of(fraction, len(clients))
    if count >= len(clients):
        return list(clients)
    return sorted(clients[i] for i in rng.choice(len(clients), size=count, replace=False))


@dataclass(frozen=True)
class TaskSeeds:
    """Task seeds of one exchange: they depend on one draw and the client's name, not on the other clients asked."""

    draw: int

    @staticmethod
    def from_rng(rng: np.random.Generator) -> TaskSeeds:
        return TaskSeeds(int(rng.integers(MAX_SEED)))

    def of(self, client: ClientId) -> int:
        """The client's seed, below MAX_SEED."""
        digest = hashlib.sha256(f"{self.draw}/{client}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % MAX_SEED
