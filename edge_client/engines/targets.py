"""What the port y of a training program takes, from the y of samples."""

from __future__ import annotations

import numpy as np

from edge_client.protocol.program import Program
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
    if np.issubdtype(y.dtype, np.integer):
        return np.eye(program.classes, dtype=program.dtype)[y]
    return y.astype(program.dtype)


def no_targets(program: Program, n: int) -> Array:
    """What stands for y [n, ...] where there is none."""
    return np.zeros((n, *program.truth), np.int64 if program.has_classes else program.dtype)
