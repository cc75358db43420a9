"""How many neighbours a device has and how many of their shares recover its secret, from hypergeometric tails.

A cohort of n devices, of which up to 30 % drop out at any stage and up to 10 % may collude with the coordinator. The
neighbours of one device are k random others (Bell et al. 2020, "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead"), so the number of missing ones among them is hypergeometric. Three events are bounded, each
for all devices together:

* fewer than t neighbours of a device survive: the sum cannot be unmasked (at most 2^-20);
* t neighbours of a device collude: they recover its secrets (at most 2^-40);
* the graph of the honest survivors falls apart: the coordinator learns the sums of its parts (at most 2^-40). A ring in
  which each node is joined to the k/2 nearest on both sides falls apart only where two gaps hold k removed nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

SECURE_MODES = ("off", "updates", "updates+membership")  # what a coordinator is not told, rising
MISSING_PERCENT = 30
COLLUDING_PERCENT = 10
MAX_FAILURE = 2.0**-20
MAX_LEAK = 2.0**-40
LEAST_COHORT = 5
MAX_COHORT = 100_000
MAX_NEIGHBOURS = 255


@dataclass(frozen=True, kw_only=True)
class SumParameters:
    """The graph's degree `neighbours` (k) and the number of shares that recover a secret, `threshold` (t)."""

    neighbours: int
    threshold: int


def threshold_of(devices: int, neighbours: int) -> int:
    """The t of n devices with k neighbours each: the greatest that keeps the bounds, up to k / 2 + 1; 0 without one.

    No other t is taken: with fewer shares, two parts of a device's neighbours that are told different survivors could
    give both of its secrets.
    """
    n, k = devices, neighbours
    missing = n * MISSING_PERCENT // 100
    colluding = max(1, n * COLLUDING_PERCENT // 100)
    if k < n - 1 and n * (n - 1) / 2 * upper_tail(n - 1, missing + colluding, k)[k] > MAX_LEAK:
        return 0
    lost, held = upper_tail(n - 1, missing, k), upper_tail(n - 1, colluding, k)
    kept = (t for t in range(k // 2 + 1, 1, -1) if n * lost[k - t + 1] <= MAX_FAILURE)
    greatest = next(kept, 0)
    return greatest if greatest and n * held[greatest] <= MAX_LEAK else 0


def upper_tail(total: int, marked: int, drawn: int) -> list[float]:
    """P(X >= x) for x = 0 to drawn + 1, X the marked ones among `drawn` of `total` of which `marked` are marked."""
    ways, tail = 0, [0.0] * (drawn + 2)
    all_ways = comb(total, drawn)
    for x in range(drawn, -1, -1):
        ways += comb(marked, x) * comb(total - marked, drawn - x)
        tail[x] = ways / all_ways
    return tail
