"""The names that the commands of the emulator know, ours and those that installed packages registered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points

from coordinator.models.registry import MODELS
from coordinator.strategies.registry import METHODS
from emulator.data.partition_schemes import PARTITION_SCHEMES
from emulator.data.registry import DATA_SETS
from emulator.engines.base import ENGINES
from emulator.experiments.plan import experiment_names


def known_names() -> dict[str, list[str]]:
    """Kind -> its names, each as the command line takes it."""
    ours: Mapping[str, Iterable[str]] = {
        "methods": METHODS,
        "data-sets": DATA_SETS,
        "models": MODELS,
        "partitions": PARTITION_SCHEMES,
    }
    found = {
        kind: [*names, *(p.name for p in entry_points(group=f"fedcenters.{kind}"))] for kind, names in ours.items()
    }
    return {**found, "engines": list(ENGINES), "experiments": experiment_names()}
