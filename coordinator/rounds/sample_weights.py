"""How many samples count of a device: what it announced, but no more than a multiple of the fleet's median. Pure.

A number of samples is a device's own claim, and methods weigh by it. Honest fleets are unbalanced too, so the bound is
a wide multiple; beyond it a device still trains on all of its samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

from edge_client.protocol.task import ClientId

MAX_SAMPLES_RATIO = 10.0  # times the median


def max_samples(announced: Collection[int], ratio: float) -> int:
    """The most samples that count of one device: `ratio` times the median of what the fleet's devices announced.

    Of an even number of devices the lower middle is the median, so that half of them may announce any number.

    >>> max_samples([40, 60, 2**31], 10.0)
    600
    """
    return max(1, int(ratio * statistics.median_low(announced)))


def weighed_fleet(announced: Mapping[ClientId, int], ratio: float) -> dict[ClientId, int]:
    """The samples that count of each device, in the same order."""
    most = max_samples(announced.values(), ratio) if announced else 0
    return {cid: min(n, most) for cid, n in announced.items()}
