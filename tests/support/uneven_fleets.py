"""Fleets whose devices differ much: one has a single sample, groups are skewed, some devices are away in a round."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from edge_client.data.dataset import DeviceData
from edge_client.protocol.task import ClientId
from tests.support.softmax_program import CLASSES, samples

SIZES = (17, 1, 40, 9, 25, 3, 33, 60)  # training samples; a batch is 8


def uneven_fleet(groups: int, seed: int, *, sizes: tuple[int, ...] = SIZES) -> dict[ClientId, DeviceData]:
    """Device i has sizes[i] samples of group i mod `groups`; group g writes class y as y + g."""
    rng = np.random.default_rng([seed, 77])
    written = [(np.arange(CLASSES) + g) % CLASSES for g in range(groups)]
    return {
        f"d{i:02d}": DeviceData(
            train=samples(rng, n, written=written[i % groups]), test=samples(rng, 6, written=written[i % groups])
        )
        for i, n in enumerate(sizes)
    }


def away(number: int, who: Collection[ClientId], seed: int) -> set[ClientId]:
    """Who does not answer in round `number`: none in the first, up to two in others, all in round 4."""
    if number == 4:
        return {*who}
    rng = np.random.default_rng([seed, number, 5])
    return {*rng.choice(sorted(who), size=int(rng.integers(3)), replace=False).tolist()} if number > 1 else set()
