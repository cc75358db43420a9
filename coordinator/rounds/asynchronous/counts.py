"""What happened to the tasks of one round of a run that waits for no device, for its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coordinator.rounds.round_record import AsynchronousRecord


@dataclass(kw_only=True)
class RoundCounts:
    """Tasks that were stopped are `stale`, those without an answer in time `expired`."""

    staleness: list[int] = field(default_factory=list)  # of each update that counted
    stale: int = 0
    expired: int = 0

    def record(self, versions: Sequence[int]) -> AsynchronousRecord:
        """The round's counts, and where the centers are."""
        mean = float(np.mean(self.staleness)) if self.staleness else None
        return {
            "versions": list(versions),
            "counted": len(self.staleness),
            "stale": self.stale,
            "expired": self.expired,
            "staleness": {"mean": mean, "most": max(self.staleness, default=0)},
        }
