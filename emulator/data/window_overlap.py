"""Overlapping windows of a recording: a random split puts parts of a test sample into the training samples."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edge_client.protocol.task import I64, Array

MAX_USERS, MAX_PAIRS = 4, 32  # looked at: consecutive samples of the same user
MIN_SHARE = 0.5  # of the pairs that overlap by the same shift
MIN_OVERLAP = 0.25  # of a window: less may be a blank border


def windows_overlap(x: Array, users: Iterable[I64]) -> bool:
    """Whether consecutive samples of `x` [n, ...] repeat each other's values, moved along one axis.

    `users`: each user's rows of `x`, in the order of the data set.
    """
    for rows, _ in zip(users, range(MAX_USERS), strict=False):
        window = np.asarray(x[rows[: MAX_PAIRS + 1]])
        if len(window) > 1 and any(_overlap_along(window[:-1], window[1:], axis) for axis in range(1, window.ndim)):
            return True
    return False


def _overlap_along(before: Array, after: Array, axis: int) -> bool:
    """`before`, `after` [pairs, ...]: whether most pairs share values that differ among themselves, for some shift."""
    first, second = (np.moveaxis(part, axis, 1).reshape(len(part), part.shape[axis], -1) for part in (before, after))
    length = first.shape[1]
    for shift in range(1, int(length * (1 - MIN_OVERLAP)) + 1):
        tails, heads = first[:, shift:], second[:, : length - shift]
        varies = (tails != tails[:, :1]).any(axis=1).all(axis=1)
        same = (tails == heads).all(axis=(1, 2)) & varies
        if same.mean() >= MIN_SHARE:
            return True
    return False
