"""The interface of an emulator's engine: a recipe that any process can open as a learner. All learners are equal.

A recipe is small and can be pickled; each worker process, of this machine or of a cluster, opens its own learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from edge_client.data.dataset import Dataset
from edge_client.protocol.task import F64, Array, Flat
from edge_client.training.learner import Learner

Evaluation = tuple[Sequence[Flat], Dataset]  # models, and the samples that all of them are evaluated on


class Recipe(Protocol):
    """The settings of an engine for one model."""

    def open(self) -> Learner:
        """A learner of this process, on one thread. Raises RuntimeMissing when something is not installed."""


@runtime_checkable
class EvaluatesTogether(Learner, Protocol):
    """A learner that is faster with several evaluations at once; see `Learner.evaluate`."""

    def evaluate_each(self, asked: Sequence[Evaluation], *, batch: int) -> list[tuple[F64, Array]]:
        """-> losses [M, n] float64 and logits [M, n, *target] of each."""
