"""The mean silhouette of a clustering from distances; unlike the objective it need not improve with more clusters."""

from __future__ import annotations

import numpy as np

from edge_client.protocol.task import F64, I64


def silhouette(distances: F64, labels: I64) -> float:
    """Distances [n, n] and labels [n] -> the mean of (b - a) / max(a, b) (Rousseeuw 1987); in -1..1.

    `a` is a point's mean distance to the others of its cluster, `b` the least mean distance to another cluster. A point
    alone in its cluster counts 0, and so does every point where there is one cluster only.
    """
    names = np.unique(labels)
    member: F64 = (labels[:, None] == names).astype(np.float64)  # [n, clusters]
    sizes, sums = member.sum(axis=0), distances @ member
    own = sizes @ member.T  # [n] size of each point's cluster
    if len(names) < 2:  # noqa: PLR2004 - two clusters
        return 0.0
    a = (sums * member).sum(axis=1) / np.maximum(own - 1, 1)
    b = np.where(member > 0, np.inf, sums / sizes).min(axis=1)
    widest = np.maximum(a, b)
    score = np.divide(b - a, widest, out=np.zeros_like(a), where=(own > 1) & (widest > 0))
    return float(score.mean())
