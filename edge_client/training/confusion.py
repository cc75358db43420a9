"""Confusion matrices of a probe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.task import I64, Array
from edge_client.training.learner import log_softmax

MAX_COUNTED_CLASSES = 4096  # of a confusion matrix: 128 MiB of counts


def confusion_counts(program: Program, logits: Array, y: Array, prior: Sequence[float] | None) -> I64:
    """[M, C, C] counts, rows true class, columns predicted; with `prior` [1, C, C] of the mixture of probabilities.

    A sample with a label per position counts once for each position that is not IGNORED.
    """
    if not program.has_classes:
        raise Malformed("bad_task", "a confusion matrix needs a classifier")
    c, axis = program.classes, 2 + program.class_axis
    if c > MAX_COUNTED_CLASSES:
        raise Malformed("bad_task", f"a confusion matrix is of at most {MAX_COUNTED_CLASSES} classes")
    truth = y if np.issubdtype(y.dtype, np.integer) else y.argmax(axis=-1)
    scores = logits
    if prior is not None:
        scores = np.tensordot(np.asarray(prior, dtype=np.float64), np.exp(log_softmax(logits, axis)), axes=1)[None]
    cells = truth * c + scores.argmax(axis=axis)  # [M, n], or [M, n, *positions]
    return np.stack([np.bincount(row[truth != IGNORED], minlength=c * c).reshape(c, c) for row in cells])
