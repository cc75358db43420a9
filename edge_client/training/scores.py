"""What a probe tells of a model's outputs on local samples: confusion matrices, errors, counts of positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.task import F64, I64, Array, Probe
from edge_client.training.learner import log_softmax

MAX_COUNTED_CLASSES = 4096  # of a confusion matrix: 128 MiB of counts
LEAST_PROBABILITY = np.finfo(np.float64).tiny  # of a mixture: its logarithm is finite


def score_outputs(program: Program, logits: Array, y: Array, task: Probe) -> dict[str, Array]:
    """The scores that the task wants of outputs [M, n, *target]; with its `prior` one row, of the mixture.

    Those of some samples and of others add up to those of all, apart from "errors".
    """
    found: dict[str, Array] = {}
    if "confusion" in task.want:
        found["confusion"] = confusion_counts(program, logits, y, task.prior)
    if "positions" in task.want:
        found["positions"] = position_sums(program, logits, y, task.prior)
    if "errors" in task.want:
        found["errors"] = mean_errors(program, logits, y, task.prior)
    return found


def confusion_counts(program: Program, logits: Array, y: Array, prior: Sequence[float] | None) -> I64:
    """[M, C, C] counts, rows true class, columns predicted; with `prior` [1, C, C] of the mixture of probabilities.

    A sample with a label per position counts once for each position that is not IGNORED.
    """
    if not program.has_classes:
        raise Malformed("bad_task", "a confusion matrix needs a classifier")
    c, axis = program.classes, 2 + program.class_axis
    if c > MAX_COUNTED_CLASSES:
        raise Malformed("bad_task", f"a confusion matrix is of at most {MAX_COUNTED_CLASSES} classes")
    truth = _labels(y)
    scores = logits if prior is None else mixed_outputs(program, logits, prior)
    cells = truth * c + scores.argmax(axis=axis)  # [M, n], or [M, n, *positions]
    return np.stack([np.bincount(row[truth != IGNORED], minlength=c * c).reshape(c, c) for row in cells])


def position_sums(program: Program, logits: Array, y: Array, prior: Sequence[float] | None) -> F64:
    """[M, 3]: labels that are not IGNORED, those that the largest output names, and the sum of their cross-entropy."""
    if not program.has_classes:
        raise Malformed("bad_task", "positions need a classifier")
    axis, truth = 2 + program.class_axis, _labels(y)
    counted = truth != IGNORED
    logs = log_softmax(logits, axis)
    if prior is not None:
        logs = np.log(np.maximum(mixed_outputs(program, logits, prior), LEAST_PROBABILITY))
    index = np.expand_dims(np.where(counted, truth, 0), (0, axis))
    entropy = -np.take_along_axis(logs, np.broadcast_to(index, (len(logs), *index.shape[1:])), axis).squeeze(axis)
    right = (logs.argmax(axis=axis) == truth) & counted
    sums = [(counted.sum(), hits.sum(), row[counted].sum()) for hits, row in zip(right, entropy, strict=True)]
    return np.array(sums, dtype=np.float64)


def mean_errors(program: Program, outputs: Array, y: Array, prior: Sequence[float] | None) -> F64:
    """[M, 3]: the mean squared and the mean absolute error of outputs, and the mean variance of each target.

    Means are over samples and targets. The outputs of a mixture are the weighted mean of its models'.
    """
    if program.has_classes:
        raise Malformed("bad_task", "errors are of targets that are no classes")
    if outputs.shape[2:] != y.shape[1:]:
        raise Malformed("bad_task", f"errors compare outputs {outputs.shape[2:]} with targets {y.shape[1:]}")
    truth, found = y.astype(np.float64), outputs.astype(np.float64)
    if prior is not None:
        found = mixed_outputs(program, found, prior)
    variance = float(truth.var(axis=0).mean())
    wrong = (found - truth).reshape(len(found), -1)
    return np.array([((row**2).mean(), np.abs(row).mean(), variance) for row in wrong])


def _labels(y: Array) -> Array:
    """The class of each label; of soft labels the likeliest."""
    return y if y.dtype.kind in "iu" else y.argmax(axis=-1)


def mixed_outputs(program: Program, outputs: Array, prior: Sequence[float]) -> F64:
    """[1, n, ...] of the mixture of models with outputs [M, n, ...]: probabilities of classes, else mean outputs."""
    each = np.exp(log_softmax(outputs, 2 + program.class_axis)) if program.has_classes else outputs
    weights = np.asarray(prior, dtype=np.float64)
    return np.asarray(np.tensordot(weights / weights.sum(), each, axes=1)[None])
