"""What a sum with Skellam noise reveals: Renyi differential privacy, added up over sums.

    eps(a) <= a D2^2 / (2 mu) + min( ((2 a - 1) D2^2 + 6 D1) / (4 mu^2), 3 D1 / (2 mu) )        a = 2, 3, ...

mu is the variance of the noise in the sum; D1 and D2 are the greatest L1 and L2 norm of what one device adds (Agarwal,
Kairouz and Liu 2021, theorem 3.5). Two data sets differ by one device's: with it, or with a difference of zero in its
place. Rounding moves each of d words by less than 1, so D2 = levels + sqrt(d), and D1 <= sqrt(d) D2.
"""

from __future__ import annotations

import numpy as np

from coordinator.aggregation.privacy import INSTALL_HINT
from edge_client.errors import ConfigError
from edge_client.protocol.summed_task import SumScale
from edge_client.protocol.task import F64

ORDERS: F64 = np.unique(np.round(np.geomspace(2, 4096, 120)))  # a of the formula
SPENT_KEY = "private-sums"  # in State.extra, [2, len(ORDERS)]: the cost of the sums so far, and their number
COLLUDING = 0.1  # the share of a sum's devices whose noise the server may know


def skellam_rdp(variance: float, l2: float, l1: float) -> F64:
    """[len(ORDERS)] eps(a) of one sum."""
    small = np.minimum(((2 * ORDERS - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance))
    spent: F64 = ORDERS * l2**2 / (2 * variance) + small
    return spent


def sum_cost(scale: SumScale, devices: int, parameters: int) -> F64:
    """[len(ORDERS)] eps(a) of a sum of so many devices that came, of which COLLUDING tell their noise."""
    honest = devices - int(np.ceil(COLLUDING * devices))
    l2 = scale.levels + np.sqrt(parameters)
    return skellam_rdp(honest * scale.deviation**2, l2, np.sqrt(parameters) * l2)


def epsilon_of(spent: F64, delta: float) -> float:
    """The epsilon at `delta` of sums that cost eps(a) [len(ORDERS)] together. ConfigError: no dp-accounting."""
    if not spent.any():
        return 0.0
    try:
        from dp_accounting.rdp import compute_epsilon
    except ImportError:
        raise ConfigError("a private run needs an accountant", hint=INSTALL_HINT) from None
    return float(compute_epsilon(ORDERS, spent, delta)[0])
