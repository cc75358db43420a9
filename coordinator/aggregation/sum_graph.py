"""Who masks with whom: a random ring in which each device is joined to its nearest k on both sides (Bell et al. 2020).

The devices stand on the ring in the order of SHA-256(seed, device id), so the seed and the ids alone give the graph, in
any language. A ring of this kind (Harary's graph) stays connected whichever k - 1 devices are removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from edge_client.errors import ConfigError, Malformed
from edge_client.protocol.secure.parameters import (
    LEAST_COHORT,
    MAX_COHORT,
    MAX_NEIGHBOURS,
    SumParameters,
    threshold_of,
)

SEED_BYTES = 32
COMPLETE_COHORT = 16  # up to here a device has all others as neighbours, which costs less than 2 KB

Graph = Mapping[str, tuple[str, ...]]


def neighbour_graph(seed: bytes, cids: Iterable[str], neighbours: int) -> Graph:
    """The `neighbours` (k) of each device, sorted by id (ASCII). k is even, or n - 1 for the complete graph.

    Raises Malformed("bad_field") for another k, a device that is named twice, or a seed of another size than 32 bytes.
    """
    given = list(cids)
    n, k = len(given), neighbours
    if len(seed) != SEED_BYTES:
        raise Malformed("bad_field", f"the graph's seed has {len(seed)} bytes, not {SEED_BYTES}")
    if len(set(given)) < n:
        raise Malformed("bad_field", "the roster names a device twice")
    if not 1 <= k < n or (k < n - 1 and k % 2):
        raise Malformed("bad_field", f"{k} neighbours among {n} devices: an even number below {n - 1}, or {n - 1}")
    ring = sorted(given, key=lambda cid: hashlib.sha256(seed + cid.encode("ascii")).digest())
    if k == n - 1:
        return {cid: tuple(sorted(set(ring) - {cid})) for cid in ring}
    steps = [step for step in range(-(k // 2), k // 2 + 1) if step]
    return {cid: tuple(sorted(ring[(at + step) % n] for step in steps)) for at, cid in enumerate(ring)}


def sum_parameters(devices: int, *, least_members: int = LEAST_COHORT) -> SumParameters:
    """The least even k whose t keeps all three bounds for a cohort of n devices; k = n - 1 for a small cohort.

    Raises ConfigError for a cohort of fewer than `least_members` devices, or of more than 100,000.
    """
    least = max(least_members, LEAST_COHORT)
    if devices < least:
        raise ConfigError(
            f"secure aggregation of {devices} devices: at least {least} are needed",
            hint=f"wait for {least} devices, or lower least-members to at most {devices} (never below {LEAST_COHORT})",
        )
    if devices > MAX_COHORT:
        raise ConfigError(
            f"secure aggregation of {devices} devices in one sum: at most {MAX_COHORT}",
            hint="ask fewer devices per round (fraction)",
        )
    degrees = range(2, min(devices, MAX_NEIGHBOURS + 1), 2) if devices > COMPLETE_COHORT else ()
    for k in (*degrees, devices - 1):
        if threshold := threshold_of(devices, k):
            return SumParameters(neighbours=k, threshold=threshold)
    raise ConfigError(f"no graph of {devices} devices keeps the bounds", hint="ask more devices per round")
