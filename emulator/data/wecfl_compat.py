"""The differences of WeCFL's public partition code from a plain reading of the paper; for comparison only.

Shares are rounded to a few decimals, so some samples are not used, or a class ends early. Devices with at most five
test samples are dropped and replaced by exact copies of random others, as long as half of the fleet survives; a group
that holds less than 30% of the average is drawn again. Described from reading `jie-ma-ai/FedBase`; the code is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, I64
from emulator.data import share_matrices
from emulator.data.fleet_split import PartitionIndices
from emulator.data.loaders.samples import DataSet

MIN_TEST_SAMPLES = 5  # a device with no more than that is dropped
MIN_GROUP_SHARE = 0.3  # of the average number of test samples


def cut_like_wecfl(
    data: DataSet, draw: Callable[[], F64], member: I64 | None, rng: np.random.Generator
) -> PartitionIndices:
    """Shares as `draw` gives them, rounded; survivors stand in for the dropped. Needs an official test part."""
    if data.test is None:
        raise ConfigError("paper-quirks need a data set with a test part", hint="leave paper-quirks out")
    test = np.bincount(data.test.y, minlength=data.classes)
    decimals = round(np.log10(len(data.test) / data.classes))

    def rounded() -> F64:
        p = np.round(draw(), decimals)
        over = np.maximum(p.sum(axis=0), 1.0)  # a rounded column may exceed 1: its last devices get less
        return p if (over == 1.0).all() else np.diff(np.minimum(np.cumsum(p, axis=0), 1.0), axis=0, prepend=0.0)

    def fits(p: F64) -> bool:
        size = share_matrices.dealt_sizes(p, test)
        if member is not None:
            groups = np.bincount(member, weights=size)
            if (groups < MIN_GROUP_SHARE * len(data.test or ()) / len(groups)).any():
                return False
        return bool((size > MIN_TEST_SAMPLES).sum() > len(size) / 2)

    p = share_matrices.draw_until(rounded, fits, what="half of the devices enough samples", hint="use fewer devices")
    alive = np.flatnonzero(share_matrices.dealt_sizes(p, test) > MIN_TEST_SAMPLES)
    stand_in = np.concatenate([alive, rng.choice(alive, size=len(p) - len(alive))])
    train, held_out = (share_matrices.deal_by_shares(part.y, p, rng) for part in (data.train, data.test))
    return PartitionIndices(
        train=[train[i] for i in stand_in],
        test=[held_out[i] for i in stand_in],
        groups=None if member is None else member[stand_in],
    )
