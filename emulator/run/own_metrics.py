"""Metrics of the user's own: functions of a device's held-out samples and the outputs of what it is served."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from coordinator.rounds.round import serving_probe
from coordinator.rounds.round_record import MetricRecord
from coordinator.strategies.base import State, Strategy
from edge_client.data.dataset import Dataset
from edge_client.errors import UsageError
from edge_client.protocol.task import Array, ClientId, Probe
from edge_client.training.label_prior import label_counts
from emulator.simulation.emulated_devices import EmulatedDevices
from emulator.simulation.served_outputs import served_outputs

Metric = Callable[[Array, Array], float]  # y [n, ...] and outputs [n, ...] of one device -> a number


def measure_own(
    metrics: Mapping[str, Metric],
    strategy: Strategy,
    state: State,
    devices: EmulatedDevices,
    batch: int,
    *,
    cohort: Sequence[ClientId] | None = None,
) -> dict[str, MetricRecord]:
    """Name -> {"micro", "macro", "per_device"}: means over samples and over devices, and each device's own.

    `cohort`: the devices that the round tests; None: all. A device that is served a mixture has the mean of its models'
    probabilities as outputs, and where targets are no classes the mean of their outputs. Devices without held-out
    samples are left out, and those whose number is not finite. Raises UsageError for a function that gives no number.
    """
    found: dict[str, dict[ClientId, float]] = {name: {} for name in metrics}
    n: dict[ClientId, int] = {}
    for who in sorted(devices.local if cohort is None else cohort):
        test = devices.local[who].test
        if test is None or not len(test):
            continue
        outputs = _outputs(serving_probe(strategy, state, who, batch=batch), test, who, devices)
        n[who] = len(test)
        for name, metric in metrics.items():  # each with arrays of its own, into which it may write
            if math.isfinite(value := _number(name, metric(test.y.copy(), outputs.copy()))):
                found[name][who] = value
    return {name: _averages(values, n) for name, values in found.items()}


def _outputs(task: Probe, test: Dataset, who: ClientId, devices: EmulatedDevices) -> Array:
    train = devices.local[who].train
    return served_outputs(
        devices.learner,
        task,
        test,
        train=lambda: train,
        labels=lambda: label_counts(devices.program, train),
        own=partial(devices.own_model, who),
    )


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(
            f"metric {name} gives {type(value).__name__}", hint="return one number for y [n] and outputs [n, ...]"
        ) from None


def _averages(values: Mapping[ClientId, float], n: Mapping[ClientId, int]) -> MetricRecord:
    if not values:
        return {"micro": None, "macro": None, "per_device": {}}
    each, weights = np.array(list(values.values())), np.array([n[c] for c in values], dtype=np.float64)
    return {"micro": float(weights @ each / weights.sum()), "macro": float(each.mean()), "per_device": dict(values)}
