"""What an emulator's engine promises: a recipe that any process can turn into a learner, equal to all others' learners.

A recipe is small and can be pickled; worker processes of one machine, or of a cluster, open it for themselves.
"""

from __future__ import annotations

from typing import Protocol

from edge_client.training.learner import Learner


class Recipe(Protocol):
    """How to make a learner."""

    def open(self) -> Learner:
        """A learner of this process, on one thread. Raises RuntimeMissing when something is not installed."""
        ...
