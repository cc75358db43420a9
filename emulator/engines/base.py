"""The interface of an emulator's engine: a recipe that any process can open as a learner. All learners are equal.

A recipe is small and can be pickled; each worker process, of this machine or of a cluster, opens its own learner.
"""

from __future__ import annotations

from typing import Protocol

from edge_client.training.learner import Learner


class Recipe(Protocol):
    """The settings of an engine for one model."""

    def open(self) -> Learner:
        """A learner of this process, on one thread. Raises RuntimeMissing when something is not installed."""
