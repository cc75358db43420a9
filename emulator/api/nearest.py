"""The nearest center for a device that never trained, and predictions by the centers of a result."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from coordinator.rounds.round import serving_probe
from coordinator.strategies.common.label_totals import label_counts
from coordinator.strategies.registry import batch_size
from edge_client.data.dataset import Dataset, describe_misfit
from edge_client.engines.targets import no_targets
from edge_client.errors import ConfigError, UsageError
from edge_client.nearest.choose_center import UNSURE, Selection, choose_center
from edge_client.nearest.features import has_batch_norm
from edge_client.protocol.program import IGNORED
from edge_client.protocol.task import Array, Flat, OwnModel
from edge_client.training.label_prior import label_counts as labels_of
from emulator.api.data.columns import as_array, as_numbers
from emulator.api.data.frames import frame_inputs
from emulator.api.data.reading import read_inputs
from emulator.api.data.unread import is_frame
from emulator.data.loaders.samples import to_unit_range
from emulator.run_centers import RunCenters
from emulator.simulation.served_outputs import served_outputs


def choose(source: RunCenters, x: Any, y: Any = None) -> Selection:  # noqa: ANN401 - arrays of any kind
    """The nearest center for samples `x` [n, ...], with labels `y` [n] or without. Raises UsageError for no samples."""
    source.check_trained()
    samples = _samples(source, x)
    labels = no_targets(source.program, len(samples)) if y is None else _labels(source, y)
    if len(labels) != len(samples):
        raise UsageError(f"{len(labels)} labels for {len(samples)} samples", hint="give one label for each sample")
    try:
        data = Dataset(samples, labels)
        misfit = describe_misfit(source.program, data)
    except ValueError as wrong:
        misfit = str(wrong)
    if misfit:
        raise UsageError(misfit, hint="give labels as they are in the run's own data")
    return choose_center(source, data, labels=y is not None)


def predict_samples(
    source: RunCenters,
    x: Any,  # noqa: ANN401
    *,
    device: object,
    center: int | None,
    classes: int | None = None,
) -> Array:
    """Classes [n], or targets [n, ...], for samples `x` [n, ...]. Raises UsageError for an unknown device or center.

    `classes`: of outputs [n, C] only the first so many are predicted.
    """
    if device is not None and center is not None:
        raise UsageError("predict by a device and by a center", hint="give one of them")
    outputs = _of_center(source, x, center) if device is None else _of_device(source, x, device)
    outputs = outputs if classes is None else outputs[:, :classes]
    if not source.program.has_classes:
        return np.asarray(outputs)
    found: Array = outputs.argmax(axis=1 + source.program.class_axis)
    return _class_values(source)[found] if source.data.classes else found


def _class_values(source: RunCenters) -> Array:
    """The user's value of each output [outputs]; an output that no class has is its number as text."""
    known = list(source.data.classes)
    others = [str(k) for k in range(len(known), source.program.classes)]
    return np.array([*known, *others], object if others and isinstance(known[0], bool) else None)


def _labels(source: RunCenters, y: Any) -> Array:  # noqa: ANN401
    """Numbers of classes for the user's own values, or for numbers; targets as they are. Raises UsageError."""
    given = as_numbers(as_array(y))
    if not source.program.has_classes:
        return given.astype(np.float32).reshape(len(given), *source.program.truth)
    if given.ndim == 2 and given.shape[1] == 1 and not source.program.truth:  # noqa: PLR2004 - a column, as fc.fleet takes
        given = given[:, 0]
    known = list(source.data.classes)
    if given.dtype.kind in "iu":
        named = given[given != IGNORED]
        if not named.size or 0 <= named.min() <= named.max() < source.program.classes:
            return given.astype(np.int64)
        raise UsageError(f"labels from {given.min()} to {given.max()}", hint=f"use 0 to {source.program.classes - 1}")
    if given.dtype.kind == "f" and not known:
        told = f"labels are {given.dtype}, and the run's classes are whole numbers from 0"
        raise UsageError(told, hint="give whole numbers: y.astype(int)")
    number = {value: k for k, value in enumerate(known)}
    if unknown := [value for value in given.tolist() if value not in number]:
        hint = f"the run has {', '.join(map(str, known))}" if known else "the run's classes are numbers from 0"
        raise UsageError(f"no class {unknown[0]!r}", hint=hint)
    return np.array([number[value] for value in given.tolist()], np.int64)


def _center(source: RunCenters, x: Array, center: int | None) -> Flat:
    source.check_trained()
    chosen = _chosen(choose(source, x)) if center is None else center
    return source.models([check_center(chosen, source.centers)])[0]


def check_center(center: object, count: int) -> int:
    """The number of one of `count` centers. Raises UsageError for another value."""
    try:
        found = -1 if isinstance(center, (bool, np.bool_)) else operator.index(center)  # type: ignore[arg-type]
    except TypeError:  # 0-d arrays and tensors of whole numbers are numbers, others are none
        found = -1
    if not 0 <= found < count:
        raise UsageError(f"there is no center {center!r}", hint=f"there are {count}, from 0 on")
    return found


def _chosen(found: Selection) -> int:
    """The center that fits, with a warning where several may. Raises UsageError where none is taken."""
    if found.center is None:
        hint = f"look at `nearest(x)`; center={found.best} is nearest all the same"
        said = "it is not known whether a center fits" if found.fit is None else "no center fits"
        raise UsageError(f"{said} these samples", hint=hint)
    likely = found.probabilities.get(found.center, 1.0)
    if likely < UNSURE:
        said = f"these samples tell the centers apart badly: center {found.center} has a probability of {likely:.0%}"
        warnings.warn(f"{said}; give labels to `nearest`, then its center, or a device", stacklevel=6)
    return found.center


def _of_center(source: RunCenters, x: Any, center: int | None) -> Array:  # noqa: ANN401
    """The outputs [n, ...] of a center, or of that which is nearest to the samples."""
    model, data = _center(source, x, center), _inputs(source, x)
    return np.asarray(source.opened.evaluate([model], data, batch=len(data))[1][0])


def _of_device(source: RunCenters, x: Any, device: object) -> Array:  # noqa: ANN401
    """The outputs [n, ...] of what a device is served, as it is scored in the run."""
    from emulator.api.models import is_traced

    if isinstance(device, (list, np.ndarray)) or hasattr(device, "iloc"):
        hint = "give one device and its samples; fc.MultiCenter predicts rows of several"
        raise UsageError(f"device is a {type(device).__name__}", hint=hint)
    who = source.data.name(device)
    if who is None:
        raise UsageError(f"no device {device!r}", hint=f"the run has {', '.join(sorted(source.devices)[:3])} ...")
    source.check_served()
    task = serving_probe(source.method, source.state, who, batch=batch_size(source.method))
    for model in task.models:
        if isinstance(model, OwnModel) and model.init is None and source.own(who, model.slot) is None:
            raise UsageError(f"{who} has no model of its own yet", hint="run more rounds, or predict by a center")
    if task.buffers == "batch" and has_batch_norm(source.program.schema) and is_traced(source.get_model().module):
        told = "batch-norm batch takes statistics of batches, which the folder's traced copy of the model does not"
        raise ConfigError(told, hint="give the run's own: fc.load(folder, model=..., fleet=...)")
    known = label_counts(source.state).get(who)
    return served_outputs(
        source.opened,
        task,
        _inputs(source, x),
        train=lambda: source.devices[who].train,
        labels=lambda: labels_of(source.program, source.devices[who].train) if known is None else known,
        own=partial(source.own, who),
    )


def _inputs(source: RunCenters, x: Any) -> Dataset:  # noqa: ANN401
    samples = _samples(source, x)
    return Dataset(samples, no_targets(source.program, len(samples)))


def _samples(source: RunCenters, x: Any) -> Array:  # noqa: ANN401
    program = source.program
    given = as_numbers(_of_frame(x, source.data.columns) if is_frame(x) else read_inputs(x, program.parts)[0])
    if source.data.pixels and given.dtype == np.uint8:
        given = to_unit_range(given)
    if given.dtype.kind not in "biuf":
        raise UsageError(f"samples are {given.dtype}", hint=f"give an array of numbers {_wanted(program.input)}")
    with np.errstate(over="ignore"):  # what float32 does not hold is infinite, and told below
        samples = np.ascontiguousarray(given, dtype=np.float32)
    if samples.shape[1:] != program.input or not len(samples):
        hint = f"give {_wanted(program.input)}{_with_channels_first(samples.shape, program.input)}"
        raise UsageError(f"samples of shape {samples.shape}", hint=hint)
    if not np.isfinite(samples).all():
        raise UsageError("samples that are not finite", hint="replace NaN and infinity")
    return samples


def _wanted(shape: Sequence[int]) -> str:
    return f"[n, {', '.join(map(str, shape))}]"


def _with_channels_first(shape: Sequence[int], wanted: Sequence[int]) -> str:
    """What makes the inputs of pictures as their files hold them; empty for other samples."""
    if (1, *shape[1:]) == (*wanted,):
        return ": x[:, None]"
    return ": x.transpose(0, 3, 1, 2)" if len(shape) == 4 and (shape[3], *shape[1:3]) == (*wanted,) else ""  # noqa: PLR2004


def _of_frame(x: Any, columns: Sequence[str]) -> Array:  # noqa: ANN401
    """The run's columns by name; all of x where the run's samples had no names. Raises UsageError for a missing one."""
    names = [str(name) for name in x.columns]
    if missing := [name for name in columns if name not in names]:
        told = f"this data frame has no column {missing[0]!r}"
        raise UsageError(told, hint=f"the run's inputs are {', '.join(columns)}; it has {', '.join(names)}")
    return frame_inputs(x, columns or names)
