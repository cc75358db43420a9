"""Whether a sum is one that devices can give which keep to the rules; the bounds hold for every sum of their words.

Masks hide a single device's words, and so a wrong one is seen in the sum only. V, the sum of the weights, follows from
the tasks' shares and the number of devices, up to the rounding: a device that lowered it would move a center further
than `clip`, unseen where noise or rounding is long. The sum of a block's parameters is at most V long, but for what
rounding adds, less than 1 for each word and device, and noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edge_client.protocol.summed_task import SCORE_LEVELS, SOFT, SummedFit, SummedProbe, SumScale, Words
from edge_client.protocol.task import I64, Task

NOISE_TAIL = 12  # deviations; a normal deviate is beyond them with a probability of 1e-31


def why_impossible(tasks: Sequence[Task], words: Words) -> str | None:
    """Why no devices that keep to these tasks, one of each device in the sum, give it; None where they can."""
    work, devices = tasks[0], len(tasks)
    if not isinstance(work, SummedFit | SummedProbe):
        return None
    numbers = work.scale.signed(words)
    if isinstance(work, SummedProbe):
        wrong = _wrong_evaluation(numbers, devices)
    elif work.stage == "choose":
        soft = work.choose in SOFT  # a device counts itself at some centers, or with closed ones at none
        wrong = _first_wrong(numbers, devices, every=False) if soft else _wrong_counts(numbers, devices, every=True)
    elif work.stage == "add" or work.points is None:
        wrong = _wrong_blocks(work, numbers, [task.share for task in tasks if isinstance(task, SummedFit)])
    else:
        wrong = _wrong_points(work, numbers.reshape(*work.points.shape[:2], -1), devices)
    return None if wrong is None else f"{wrong}: at least one of {devices} devices did not keep to its task"


def _wrong_counts(counts: I64, devices: int, *, every: bool) -> str | None:
    total = int(counts.sum())
    if (counts < 0).any() or total > devices or (every and total < devices):
        return f"{total} devices are counted"
    return None


def _first_wrong(counts: I64, devices: int, *, every: bool) -> str | None:
    """`_wrong_counts` of each of the numbers alone."""
    return next(filter(None, (_wrong_counts(np.atleast_1d(count), devices, every=every) for count in counts)), None)


def _wrong_blocks(work: SummedFit, numbers: I64, shares: Sequence[float]) -> str | None:
    scale, blocks, devices = work.scale, numbers.reshape(len(work.open), -1), len(shares)
    counts, weights = blocks[:, -1], blocks[:, -2]
    each = counts if work.choose in SOFT else counts.sum(keepdims=True)
    if wrong := _first_wrong(each, devices, every=work.choose != "shares"):
        return wrong
    if (counts < 0).any() or _wrong_weights(work, counts, weights, shares):
        return f"the weights are {weights.min()} to {weights.max()}, of {scale.levels} a device at most"
    for block, weight, count in zip(blocks, weights, counts, strict=True):
        if wrong := _too_long(block[:-2], int(weight + count), scale, int(count), devices):
            return wrong
    return None


def _wrong_weights(work: SummedFit, counts: I64, weights: I64, shares: Sequence[float]) -> bool:
    """Whether no devices of these shares have these weights [K]: of a center, that of its `counts` lightest or more."""
    words = np.sort(np.floor(np.array(shares) * work.scale.levels)).astype(np.int64)  # or one more, by the rounding
    least = np.floor(words * work.sigma).astype(np.int64) if work.choose == "shares" else words
    lightest, heaviest = (np.concatenate([[0], np.cumsum(some)]) for some in (least, words[::-1]))
    if (weights < lightest[counts]).any() or (weights > heaviest[counts] + counts).any():
        return True
    return work.choose not in SOFT and not 0 <= weights.sum() - words.sum() <= len(words)


def _too_long(moved: I64, most: int, scale: SumScale, summed: int, devices: int) -> str | None:
    """`most` is the greatest length of the sum without rounding, `summed` the devices whose words are rounded."""
    width = math.sqrt(moved.size)
    noise = scale.deviation * math.sqrt(devices) * (width + NOISE_TAIL)
    length = float(np.linalg.norm(moved.astype(np.float64)))
    if length > most + summed * width + noise + 1:
        return f"the differences are {length / max(most, 1):.3g} times as long as the weights allow"
    return None


def _wrong_points(work: SummedFit, sums: I64, devices: int) -> str | None:
    """[restarts, K, 1], or [restarts, K, columns + 2]."""
    levels = work.scale.levels
    for run in sums:
        counts = run[:, -1]
        if wrong := _wrong_counts(counts, devices, every=work.stage == "count"):
            return wrong
        if work.stage == "count":
            continue
        if (run[:, -2] < 0).any() or (run[:, -2] > counts * (levels + 1)).any():
            return "the squared lengths are out of their range"
        for block, count in zip(run, counts, strict=True):
            if wrong := _too_long(block[:-2], int(count) * levels, work.scale, int(count), 0):
                return wrong
    return None


def _wrong_evaluation(numbers: I64, devices: int) -> str | None:
    """Of right answers, samples, accuracy, F1 and devices. A device without held-out samples refuses its task."""
    if wrong := _wrong_counts(numbers[-1:], devices, every=True):
        return wrong
    right, samples, *scores, _ = numbers.tolist()
    if samples < devices:
        return f"{samples} samples are counted"
    if not 0 <= right <= samples:
        return f"{right} of {samples} samples are right"
    if not all(0 <= score <= devices * SCORE_LEVELS for score in scores):
        return "the scores of the tests are out of their range"
    return None
