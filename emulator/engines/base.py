"""The names of the engines, and their interface: a recipe that any process can open as a learner. All are equal.

A recipe is small and can be pickled; each worker process, of this machine or of a cluster, opens its own learner.
"""

from __future__ import annotations

from typing import Protocol

from edge_client.errors import UsageError
from edge_client.protocol.program import ENGINES as RUNTIMES
from edge_client.training.learner import Learner

GPU_ENGINES = ("stacked", "graphs")
ENGINES = ("auto", "lean", *GPU_ENGINES, *RUNTIMES)


def check_engine(name: str) -> None:
    """Raises UsageError for a name that is none of ENGINES."""
    if name not in ENGINES:
        hint = f"use one of {', '.join(ENGINES)}; auto takes a GPU where torch finds one and it is faster"
        raise UsageError(f"unknown engine {name!r}", hint=hint)


class Recipe(Protocol):
    """The settings of an engine for one model."""

    def open(self) -> Learner:
        """A learner of this process, on one thread. Raises RuntimeMissing when something is not installed."""
