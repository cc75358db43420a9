"""A user's method with a setting of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coordinator.strategies.baselines.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True, repr=False)
class HasOption(FedAvg):
    """FedAvg with a setting that does nothing."""

    option: Any = None


@dataclass(frozen=True, kw_only=True, repr=False)
class HasDefault(FedAvg):
    """The same with a default that None replaces."""

    option: int | None = 5
