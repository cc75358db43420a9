"""Which of several models has the least loss, without an evaluation of each of them on all samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.protocol.task import F64

SAMPLES_AT_ONCE = 64  # with fewer a call takes longer than its work


def least_losses(evaluate: Callable[[int, Dataset], F64], models: int, data: Dataset, *, at_once: int) -> F64:
    """[models, n] losses, none negative; 0 for the samples that a model was not evaluated on.

    The model whose sum is the least so far goes on, by `at_once` samples, until it has all of them: no other can end
    with less. So has each model that ends with the same sum. `evaluate` gives the losses [m] of a model, by its
    number, on some samples.

    >>> data = Dataset(np.zeros((200, 1), np.float32), np.zeros(200, np.int64))
    >>> least_losses(lambda m, some: np.full(len(some), float(m)), 2, data, at_once=64).sum(axis=1).tolist()
    [0.0, 64.0]
    """
    cuts = [slice(at, at + at_once) for at in range(0, len(data), at_once)]
    parts = [Dataset(data.x[cut], data.y[cut]) for cut in cuts]
    losses, sums, seen = np.zeros((models, len(data))), np.zeros(models), np.zeros(models, dtype=np.int64)
    while len(least := np.flatnonzero((sums == sums.min()) & (seen < len(cuts)))):
        m = int(least[0])
        cut, some = cuts[seen[m]], parts[seen[m]]
        losses[m, cut] = evaluate(m, some)
        sums[m] = np.where(np.isnan(losses[m]), np.inf, losses[m])[: cut.stop].compress(data.counted[: cut.stop]).sum()
        seen[m] += 1
    return losses
