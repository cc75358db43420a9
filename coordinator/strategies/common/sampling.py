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


def sample_cohort(fleet: Fleet, fraction: float, rng: np.random.Generator) -> list[ClientId]:
    """ceil(fraction * m) distinct clients of a fleet of m, sorted; nothing is drawn when all of them are asked."""
    clients = sorted_names(fleet)
    count = math.ceil(fraction * len(clients))
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
