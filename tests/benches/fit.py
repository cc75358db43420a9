"""The exponent of a cost that grows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of log(cost) over log(size) by least squares: 0 is constant, 1 is linear. At least two sizes."""
    logs = [(math.log(size), math.log(cost)) for size, cost in points]
    x0, y0 = sum(x for x, _ in logs) / len(logs), sum(y for _, y in logs) / len(logs)
    return sum((x - x0) * (y - y0) for x, y in logs) / sum((x - x0) * (x - x0) for x, _ in logs)
