"""What happened to the tasks of one round of a run that waits for no device, for its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coordinator.rounds.asynchronous.training import Rules, Training, round_target
from coordinator.rounds.round_record import AsynchronousRecord
from edge_client.protocol.task import ClientId


@dataclass(kw_only=True)
class RoundCounts:
    """Tasks that were stopped are `stale`, those without an answer in time `expired`."""

    staleness: list[int] = field(default_factory=list)  # of each update that counted
    stale: int = 0
    expired: int = 0
    of: Counter[ClientId] = field(default_factory=Counter)  # updates that counted of each device

    def count(self, who: ClientId, staleness: int) -> None:
        """An update of this device counted."""
        self.staleness.append(staleness)
        self.of[who] += 1

    def has_its_part(self, who: ClientId, training: Training, rules: Rules) -> bool:
        """Whether a device has sent half of the round's updates and another is at work: it waits for the next round.

        A quick device that is alone in its center would else use up the run before others have trained.
        """
        part = max(1, round_target(rules) // 2)
        return self.of[who] >= part and bool(training.at_work.keys() - {who})

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
