"""The nearest center for a device that never trained, and predictions by the centers of a result."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.errors import UsageError
from edge_client.nearest.choose_center import Selection, choose_center
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId, Flat, OwnModel
from edge_client.training.learner import log_softmax
from emulator.run_centers import RunCenters

UNSURE = 0.6  # a choice whose probability is below comes with a warning


def choose(source: RunCenters, x: Any, y: Any = None) -> Selection:  # noqa: ANN401 - arrays of any kind
    """The nearest center for samples `x` [n, ...], with labels `y` [n] or without. Raises UsageError for no samples."""
    data = Dataset(_samples(x, source.program), _no_labels(source.program, len(x)) if y is None else np.asarray(y))
    return choose_center(source, data, labels=y is not None)


def predict_samples(source: RunCenters, x: Any, *, device: ClientId | None, center: int | None) -> Array:  # noqa: ANN401
    """Classes [n], or targets [n, ...], for samples `x` [n, ...]. Raises UsageError for an unknown device or center."""
    if device is not None and center is not None:
        raise UsageError("predict by a device and by a center", hint="give one of them")
    served = _served(source, device) if device is not None else [(1.0, _center(source, x, center))]
    samples = _samples(x, source.program)
    data = Dataset(samples, _no_labels(source.program, len(samples)))
    outputs = source.opened.evaluate([model for _, model in served], data, batch=len(data))[1]
    if len(served) > 1:
        outputs = np.tensordot([w for w, _ in served], np.exp(log_softmax(outputs)), axes=1)[None]
    found: Array = outputs[0].argmax(axis=-1) if source.program.loss == "cross-entropy" else outputs[0]
    return found


def _no_labels(program: Program, n: int) -> Array:
    """What stands for y [n, ...] where there is none."""
    return np.zeros(n, np.int64) if program.loss == "cross-entropy" else np.zeros((n, *program.target), np.float32)


def _center(source: RunCenters, x: Array, center: int | None) -> Flat:
    chosen = _chosen(choose(source, x)) if center is None else center
    if not 0 <= chosen < source.centers:
        raise UsageError(f"there is no center {chosen}", hint=f"there are {source.centers}, from 0 on")
    return source.models([chosen])[0]


def _chosen(found: Selection) -> int:
    """The center that fits, with a warning where several may. Raises UsageError where none does."""
    if found.center is None:
        hint = f"look at `nearest(x)`; center={found.best} is nearest all the same"
        raise UsageError("no center fits these samples", hint=hint)
    likely = found.probabilities.get(found.center, 1.0)
    if likely < UNSURE:
        said = f"these samples tell the centers apart badly: center {found.center} has a probability of {likely:.0%}"
        warnings.warn(f"{said}; give labels to `nearest`, then its center, or a device", stacklevel=4)
    return found.center


def _served(source: RunCenters, device: ClientId) -> list[tuple[float, Flat]]:
    if device not in source.devices:
        raise UsageError(f"no device {device!r}", hint=f"the run has {', '.join(sorted(source.devices)[:3])} ...")
    served = source.method.predictor(source.state, device)
    if any(isinstance(model, OwnModel) for _, model in served):
        raise UsageError(f"{device} keeps its model, which no result has", hint="predict by a center: center=0")
    return [(weight, model) for weight, model in served if not isinstance(model, OwnModel)]


def _samples(x: Any, program: Program) -> Array:  # noqa: ANN401
    samples = np.ascontiguousarray(np.asarray(x), dtype=np.float32)
    if samples.shape[1:] != program.input or not len(samples):
        raise UsageError(f"samples of shape {samples.shape}", hint=f"give [n, {', '.join(map(str, program.input))}]")
    if not np.isfinite(samples).all():
        raise UsageError("samples that are not finite", hint="replace NaN and infinity")
    return samples
