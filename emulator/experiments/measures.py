"""The measures of a cell. Each measure takes a finished run and returns the values that are averaged.

Accuracy and F1 are those of the last three rounds, on the devices' own test samples: f1-of-devices is the mean of the
devices' macro F1, weighted by samples, f1-pooled the macro F1 of all samples. What is measured against pure
distributions uses the fleet's hold-outs: a matrix of centers by distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from coordinator.rounds.metrics import last_rounds
from coordinator.rounds.round import serving_probe
from coordinator.strategies.base import Strategy
from edge_client.protocol.task import Array, ClientId
from emulator.data.fleet_split import FleetData
from emulator.run.execute import SimulationResult
from emulator.simulation.virtual_network import EmulatedDevices

HOLDOUT_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A finished run whose devices can still evaluate models."""

    strategy: Strategy
    result: SimulationResult
    devices: EmulatedDevices
    split: FleetData

    @property
    def ari(self) -> list[float]:
        """How well the run found the true groups; empty for a fleet without true groups."""
        found = self.result.scores(self.split.groups)["ari"]
        return [] if found is None else [found]

    @cached_property
    def holdouts(self) -> tuple[Array, Array]:
        """-> mean loss and accuracy (NaN for a regression), each [centers, distributions]."""
        losses, right = [], []
        for data in self.split.holdouts.values():
            centers = list(self.result.state.centers)
            loss, logits = self.devices.learner.evaluate(centers, data, batch=HOLDOUT_BATCH)
            losses.append(loss.mean(axis=1))
            known = np.issubdtype(data.y.dtype, np.integer)
            right.append((logits.argmax(axis=-1) == data.y).mean(axis=1) if known else np.full(len(loss), np.nan))
        return np.stack(losses, axis=1), np.stack(right, axis=1)

    def training_accuracy(self) -> Mapping[ClientId, float]:
        """Every device's accuracy on what it trained on, with the model that serves it (FedSoft's "local")."""
        tasks = {
            c: replace(serving_probe(self.strategy, self.result.state, c, batch=HOLDOUT_BATCH), split="train")
            for c in self.devices.fleet
        }
        replies = self.devices.answers(tasks)
        matrices = {c: r.confusion[0] for c, r in replies.items() if not isinstance(r, str) and r.confusion is not None}
        return {c: float(np.trace(m) / m.sum()) for c, m in matrices.items()}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How a table names it, how its values are found, and how far from the paper still counts as agreeing.

    `slack` is absolute; `relative_slack` is a share of the paper's figure.
    """

    title: str
    values: Callable[[FinishedRun], list[float]]
    slack: float = 0.0
    relative_slack: float = 0.0


def _percent(values: list[float]) -> list[float]:
    return [100 * value for value in values]


MEASURES: dict[str, Measure] = {
    "accuracy": Measure(
        title="accuracy %", slack=1.0, values=lambda f: _percent(last_rounds(f.result.records, "accuracy", "micro"))
    ),
    "f1-of-devices": Measure(
        title="F1 of devices %",
        slack=1.0,
        values=lambda f: _percent(last_rounds(f.result.records, "f1_of_devices", "weighted")),
    ),
    "f1-pooled": Measure(
        title="pooled F1 %", slack=1.0, values=lambda f: _percent(last_rounds(f.result.records, "f1_pooled"))
    ),
    "ari": Measure(title="ARI", slack=0.05, values=lambda f: f.ari),
    "one-center": Measure(
        title="all devices on one center, % of seeds",
        values=lambda f: [100.0 * (len(set(f.result.state.assignment.values())) == 1)],
    ),
    "own-error": Measure(
        title="MSE, best center", relative_slack=0.15, values=lambda f: [float(f.holdouts[0].min(axis=0).mean())]
    ),
    "other-error": Measure(
        title="MSE, worst center", relative_slack=0.15, values=lambda f: [float(f.holdouts[0].max(axis=0).mean())]
    ),
    "least-error": Measure(title="least MSE", relative_slack=0.15, values=lambda f: [float(f.holdouts[0].min())]),
    "greatest-error": Measure(title="greatest MSE", relative_slack=0.15, values=lambda f: [float(f.holdouts[0].max())]),
    "spread-error": Measure(
        title="MSE between centers, % of mean",
        values=lambda f: _percent([float((np.ptp(f.holdouts[0], axis=0) / f.holdouts[0].mean(axis=0)).mean())]),
    ),
    "best-lower": Measure(
        title="lower case %", slack=1.0, values=lambda f: _percent([float(f.holdouts[1][:, 0].max())])
    ),
    "best-upper": Measure(
        title="upper case %", slack=1.0, values=lambda f: _percent([float(f.holdouts[1][:, 1].max())])
    ),
    "local-training": Measure(
        title="local, training data %",
        slack=1.0,
        values=lambda f: _percent([float(np.mean(list(f.training_accuracy().values())))]),
    ),
}
