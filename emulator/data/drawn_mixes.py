"""Devices of a public data set whose samples are drawn when they are used: a mix of labels for each, from its number.

Device i draws shares of the labels from a Dirichlet distribution (Hsu et al. 2019, arXiv:1909.06335), then images of
these labels with replacement, all from the seed and its number. So a fleet of any size needs the images of one data
set. With `groups` above 1 devices of one group, i modulo `groups`, name the labels alike: label y is y + shift, by a
shift of each group (Ghosh et al. 2020 rotate images, this rotates names), which methods with several centers find.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import UsageError
from edge_client.protocol.task import I64, Array


def label_mixes(  # noqa: PLR0913 - a mix has these
    x: Array,
    y: Array,
    *,
    devices: int,
    train: int,
    test: int,
    alpha: float = 0.5,
    groups: int = 1,
    seed: int = 0,
) -> tuple[I64, Callable[[int], DeviceData]]:
    """Images [m, ...] with labels [m] int64 -> the arguments of DrawnDevices: training samples [devices], and `draw`.

    Each device has `train` and `test` samples; a small `alpha` gives each few labels. Raises UsageError.
    """
    if min(devices, train, test, groups) < 1 or not 0 < alpha < np.inf:
        raise UsageError(
            f"{devices} devices of {train} and {test} samples, {groups} groups, alpha {alpha:g}",
            hint="pass counts of at least 1 and a positive alpha",
        )
    classes = int(y.max()) + 1
    order = np.argsort(y, kind="stable")
    first = np.searchsorted(y[order], np.arange(classes + 1))
    known = np.flatnonzero(np.diff(first))  # labels that have images

    def draw(number: int) -> DeviceData:
        rng = np.random.default_rng([seed, number])
        label = known[rng.choice(len(known), size=train + test, p=rng.dirichlet(np.full(len(known), alpha)))]
        rows = order[first[label] + (rng.random(len(label)) * np.diff(first)[label]).astype(np.int64)]
        named = (label + (number % groups) * classes // groups) % classes
        return DeviceData(train=Dataset(x[rows[:train]], named[:train]), test=Dataset(x[rows[train:]], named[train:]))

    return np.full(devices, train), draw
