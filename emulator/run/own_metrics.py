"""Metrics of the user's own: functions of a device's held-out samples and the outputs of what it is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from coordinator.rounds.round_record import MetricRecord
from coordinator.strategies.base import State, Strategy
from edge_client.errors import UsageError
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId, Flat, OwnModel
from edge_client.training.learner import log_softmax
from emulator.simulation.emulated_devices import EmulatedDevices

Metric = Callable[[Array, Array], float]  # y [n, ...] and outputs [n, ...] of one device -> a number


def measure_own(
    metrics: Mapping[str, Metric], strategy: Strategy, state: State, devices: EmulatedDevices, batch: int
) -> dict[str, MetricRecord]:
    """Name -> {"micro", "macro", "per_device"}: means over samples and over devices, and each device's own.

    A device that is served a mixture has the mean of its models' probabilities as outputs, and where targets are no
    classes the mean of their outputs. Devices without held-out
    samples are left out. Raises UsageError for a function that gives no number.
    """
    found: dict[str, dict[ClientId, float]] = {name: {} for name in metrics}
    n: dict[ClientId, int] = {}
    for who in sorted(devices.local):
        test = devices.local[who].test
        if test is None or not len(test):
            continue
        served = strategy.predictor(state, who)
        models = [_model(model, who, devices) for _, model in served]
        outputs = devices.learner.evaluate(models, test, batch=batch)[1]
        mixed = outputs[0] if len(served) == 1 else _mixture([weight for weight, _ in served], outputs, devices.program)
        n[who] = len(test)
        for name, metric in metrics.items():
            found[name][who] = _number(name, metric(test.y, mixed))
    return {name: _averages(values, n) for name, values in found.items()}


def _model(model: Flat | OwnModel, who: ClientId, devices: EmulatedDevices) -> Flat:
    if not isinstance(model, OwnModel):
        return model
    kept = devices.own.get((who, model.slot), model.init)
    if kept is None or not len(kept):  # a worker process has it
        raise UsageError("metrics of models that the devices keep", hint="use workers=1")
    return kept


def _mixture(weights: Sequence[float], outputs: Array, program: Program) -> Array:
    each = np.exp(log_softmax(outputs, 2 + program.class_axis)) if program.has_classes else outputs
    return np.tensordot(np.asarray(weights), each, axes=1)


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
