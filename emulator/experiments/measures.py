"""The measures of a cell. Each measure takes a finished run and returns the values that are averaged.

Accuracy and F1 are those of the last three rounds, on the devices' own test samples: f1-of-devices is the mean of the
devices' macro F1, weighted by samples, f1-pooled the macro F1 of all samples. Accuracy is weighted by samples, too;
macro-accuracy and macro-f1 are the same two without weights. What is measured against pure distributions uses the
fleet's hold-outs: a matrix of centers by distributions.

What is measured with other statistics of batch norm is one more evaluation of the final centers, so one training gives
the figures of both. It is after the last round alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from coordinator.rounds.metrics import RoundReport, last_rounds, make_report
from coordinator.rounds.round import serving_probe
from coordinator.strategies.base import Strategy
from edge_client.data.dataset import DeviceData
from edge_client.protocol.task import Array, ClientId, Probe
from emulator.data.fleet_split import FleetData
from emulator.run.execute import SimulationResult
from emulator.simulation.checkpoint import load_models
from emulator.simulation.emulated_devices import EmulatedDevices, own_slots
from emulator.simulation.spill import SpilledModels

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

    @cached_property
    def with_test_batch(self) -> RoundReport | None:
        """The final evaluation in training mode: batch norm with the statistics of a device's whole test part.

        As code evaluates that never leaves training mode; the samples that are judged then influence each other. None
        for a model without such statistics, and where devices correct a center to the labels of their samples.
        """
        program, state = self.devices.program, self.result.state
        if program.schema.n_params == program.schema.size or getattr(self.strategy, "label_prior", "model") != "model":
            return None
        tested = {c: d.test for c, d in self.split.devices.items() if d.test is not None and len(d.test)}
        local = {c: DeviceData(train=test, test=test) for c, test in tested.items()}
        tasks = {
            c: replace(serving_probe(self.strategy, state, c, batch=len(test)), buffers="batch")
            for c, test in tested.items()
        }
        devices = EmulatedDevices(learner=self.devices.learner, local=local, own=self._own_models(tasks))
        replies = {c: r for c, r in devices.answers(tasks).items() if not isinstance(r, str)}
        matrices = {c: r.confusion[0] for c, r in replies.items() if r.confusion is not None}
        return make_report(matrices, state.assignment, n_centers=len(state.centers))

    def _own_models(self, tasks: Mapping[ClientId, Probe]) -> SpilledModels:
        """What the tasks name of the devices' own models, which worker processes may have."""
        found = SpilledModels()
        if any(map(own_slots, tasks.values())):
            with TemporaryDirectory(prefix="fedcenters-") as folder:
                self.devices.keep(Path(folder))
                load_models(Path(folder), tasks, found)
        return found

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

    `slack` is absolute; `relative_slack` is a share of the paper's figure. `lower_is_better`: of errors, for one.
    `of_last_rounds`: a value for each of the last three rounds, else one after the last.
    """

    title: str
    values: Callable[[FinishedRun], list[float]]
    slack: float = 0.0
    relative_slack: float = 0.0
    lower_is_better: bool = False
    of_last_rounds: bool = False


def _of_test_batch(found: FinishedRun, quantity: str) -> list[float]:
    report = found.with_test_batch
    value = None if report is None else getattr(report, quantity).micro
    return [] if value is None else [100 * value]


def _percent(values: list[float]) -> list[float]:
    return [100 * value for value in values]


def _error(title: str, value: Callable[[FinishedRun], float]) -> Measure:
    return Measure(title=title, relative_slack=0.15, lower_is_better=True, values=lambda found: [value(found)])


def _of_rounds(title: str, quantity: str, kind: str = "") -> Measure:
    """A quantity of the records of rounds, in per cent."""

    def values(found: FinishedRun) -> list[float]:
        return _percent(last_rounds(found.result.records, quantity, kind))

    return Measure(title=title, slack=1.0, of_last_rounds=True, values=values)


MEASURES: dict[str, Measure] = {
    "accuracy": _of_rounds("accuracy %", "accuracy", "micro"),
    "f1-of-devices": _of_rounds("F1 of devices %", "f1_of_devices", "weighted"),
    "macro-accuracy": _of_rounds("macro accuracy %", "accuracy", "macro"),
    "macro-f1": _of_rounds("macro F1 of devices %", "f1_of_devices", "unweighted"),
    "f1-pooled": _of_rounds("pooled F1 %", "f1_pooled"),
    "accuracy-test-batch": Measure(
        title="accuracy %, statistics of the test batch", slack=1.0, values=lambda f: _of_test_batch(f, "accuracy")
    ),
    "f1-test-batch": Measure(
        title="F1 of devices %, statistics of the test batch",
        slack=1.0,
        values=lambda f: _of_test_batch(f, "f1_of_devices"),
    ),
    "ari": Measure(title="ARI", slack=0.05, values=lambda f: f.ari),
    "one-center": Measure(
        title="all devices on one center, % of seeds",
        lower_is_better=True,
        values=lambda f: [100.0 * (len(set(f.result.state.assignment.values())) == 1)],
    ),
    "own-error": _error("MSE, best center", lambda f: float(f.holdouts[0].min(axis=0).mean())),
    "other-error": _error("MSE, worst center", lambda f: float(f.holdouts[0].max(axis=0).mean())),
    "least-error": _error("least MSE", lambda f: float(f.holdouts[0].min())),
    "greatest-error": _error("greatest MSE", lambda f: float(f.holdouts[0].max())),
    "spread-error": Measure(
        title="MSE between centers, % of mean",
        lower_is_better=True,
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
