"""Points of devices that are not asked in this round, remembered so that a new clustering still includes them.

`State.extra` holds one point [d] per device and its age in rounds. Points older than `max_age` are dropped, and the
oldest first where they would exceed MAX_VALUES numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from coordinator.strategies.common.updates import pack_by_client, unpack_by_client
from edge_client.protocol.task import Array, ClientId

POINTS_KEY, AGES_KEY = "compared", "compared-rounds-ago"
MAX_VALUES = 2**24  # 64 MiB of float32; a state is stored after every round


def recall_points(extra: Mapping[str, Array], clients: Collection[ClientId], width: int) -> dict[ClientId, Array]:
    """The remembered points [width] of those `clients` that have one, sorted by client."""
    return {
        c: point for c, point in unpack_by_client(extra, POINTS_KEY).items() if c in clients and point.shape == (width,)
    }


def most_points(width: int) -> int:
    """How many points [width] are remembered; of those of one round the first by client."""
    return MAX_VALUES // max(width, 1)


def remember_points(
    extra: Mapping[str, Array], compared: Mapping[ClientId, Array], *, max_age: int
) -> dict[str, Array]:
    """`extra` one round later: with the points `compared` in this round, and all others one round older.

    A point is recalled in the `max_age` rounds that follow.
    """
    points = {**unpack_by_client(extra, POINTS_KEY), **compared}
    ages = {c: int(age) + 1 for c, age in unpack_by_client(extra, AGES_KEY).items()} | dict.fromkeys(compared, 0)
    width = max((point.size for point in points.values()), default=1)
    young = sorted((age, c) for c, age in ages.items() if age < max_age)[: most_points(width)]
    rest = {name: array for name, array in extra.items() if name.partition("/")[0] not in (POINTS_KEY, AGES_KEY)}
    kept = {c: points[c] for _, c in young}
    return {
        **rest,
        **pack_by_client(POINTS_KEY, kept),
        **pack_by_client(AGES_KEY, {c: np.array(age) for age, c in young}),
    }
