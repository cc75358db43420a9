"""The y of samples: what the port y of a training program takes of it, and which outputs answer it right."""

from __future__ import annotations

import numpy as np

from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.task import Array


def port_targets(program: Program, y: Array) -> Array:
    """One-hot rows or probabilities for a cross-entropy of one label per sample; else the numbers as they are.

    A loss per token or pixel compares labels with the classes inside the graph, and a loss of the user's reads labels.
    """
    if program.loss == "cross-entropy" and not program.own_loss:
        return one_hot(program, y)
    return y.astype(program.dtype)


def one_hot(program: Program, y: Array) -> Array:
    """[b, classes] for class labels [b], targets as they are."""
    if y.dtype.kind in "iu":
        return np.eye(program.classes, dtype=program.dtype)[y]
    return y.astype(program.dtype)


def no_targets(program: Program, n: int) -> Array:
    """What stands for y [n, ...] where there is none."""
    return np.zeros((n, *program.truth), np.int64 if program.has_classes else program.dtype)


def classes_last(outputs: Array, y: Array) -> Array:
    """Outputs of samples with labels y [n, *positions] -> [n, *positions, classes]; the classes may lie first, too."""
    return np.moveaxis(outputs, 1, -1) if y.ndim > 1 and outputs.shape[2:] == y.shape[1:] else outputs


def accuracy_of(outputs: Array, y: Array) -> float:
    """The share of labels y [n, *positions] that the outputs name, without those that are IGNORED."""
    return float((classes_last(outputs, y).argmax(axis=-1) == y)[y != IGNORED].mean())
