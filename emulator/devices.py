"""How fast emulated devices are, in virtual seconds: a profile is numbers, a draw from the seed, never a clock.

The numbers are round and only meant to be plausible; tests and plots need devices that differ, not a survey.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from edge_client.protocol.task import ClientId, Fit, Probe


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of device: seconds per batch trained or evaluated, bytes per second each way, seconds per message."""

    name: str
    step_s: float
    evaluate_s: float
    down_bytes_s: float
    up_bytes_s: float
    latency_s: float

    def work_s(self, task: Fit | Probe, samples: int) -> float:
        """Virtual seconds that the device computes for a task."""
        if isinstance(task, Fit):
            return task.steps * self.step_s
        return len(task.models) * -(-samples // task.batch) * self.evaluate_s

    def down_s(self, size: int) -> float:
        """Virtual seconds to receive `size` bytes."""
        return self.latency_s + size / self.down_bytes_s

    def up_s(self, size: int) -> float:
        """Virtual seconds to send `size` bytes."""
        return self.latency_s + size / self.up_bytes_s


PROFILES = (
    Profile(name="board", step_s=0.02, evaluate_s=0.008, down_bytes_s=2e6, up_bytes_s=1e6, latency_s=0.05),
    Profile(name="phone", step_s=0.008, evaluate_s=0.003, down_bytes_s=5e6, up_bytes_s=1.5e6, latency_s=0.08),
    Profile(name="sensor", step_s=0.08, evaluate_s=0.03, down_bytes_s=3e5, up_bytes_s=1e5, latency_s=0.2),
)


def draw_profiles(clients: Iterable[ClientId], seed: int) -> Mapping[ClientId, Profile]:
    """A profile for each client; the same seed gives the same fleet."""
    names = sorted(clients)
    rng = np.random.Generator(np.random.PCG64(seed))
    return {c: PROFILES[i] for c, i in zip(names, rng.integers(len(PROFILES), size=len(names)), strict=True)}
