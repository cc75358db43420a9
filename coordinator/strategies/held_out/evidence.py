"""What held-out losses decide: whether more centers are clearly better, and the shares of a served mixture. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coordinator.strategies.common.assignment import MAX_COUNTED_LOSS
from edge_client.protocol.task import F64, Array, ClientId

LEAST_DEVICES = 3  # fewer say nothing about the spread of a gain
LIAR_OF = 10  # devices: in so many, or fewer, one may lie
LEAST_WITH_LIAR = 6  # devices: of fewer, less one at either end, a spread says too little
CAP = 0.9  # of so few: gains outside the quantiles 1 - CAP and CAP count as the nearer one
CONFIDENCE = 0.99  # of one side: several numbers of parts are tried in several rounds


def best_candidate(losses: F64, m: F64, least_gain: float) -> int:
    """Which candidate is clearly better than candidate 0; 0 where none is.

    `losses` [n, M] are those of n devices, each on m [n] held-out samples; a device weighs as the median at most. A
    candidate must save the share `least_gain` of the loss, by Student's bound over the devices; of those within one
    standard error of the best, it is the first.

    Gains are winsorized: the g least and the g greatest of n count as the nearest of the others, g being n / LIAR_OF,
    rounded up. So g devices that lie are no farther than honest ones. Error and degrees of freedom, n - 2 g - 1, are
    those of Tukey and McLaughlin's (1963) trimmed mean. Of normal gains around 0 the bound lets 0.9 to 1.5 % pass.
    Below LEAST_WITH_LIAR devices g is 0: one that lies can prevent a split, and 1.5 to 2.6 % pass.

    >>> best_candidate(np.array([[1.0, 0.5], [1.1, 0.5], [0.9, 0.5]]), np.ones(3), 0.2)
    1
    """
    known = np.isfinite(losses).all(axis=1)
    losses, m = losses[known], m[known]
    if len(losses) < LEAST_DEVICES:
        return 0
    from scipy.special import stdtrit  # a third of what a coordinator's process would import

    n = len(losses)
    g = -(-n // LIAR_OF) if n >= LEAST_WITH_LIAR else 0
    losses = losses.clip(-MAX_COUNTED_LOSS, MAX_COUNTED_LOSS)
    gains = _winsorized(losses[:, :1] - losses, g)
    m = np.minimum(m, np.median(m))  # by its own word; one that outweighs all others has no spread to be seen
    weight = m / m.sum()
    mean, usual = weight @ gains, float(weight @ _usual(losses[:, 0], g))
    best = int(mean.argmax())
    bound = float(stdtrit(n - 2 * g - 1, CONFIDENCE))
    clear = mean > np.maximum(bound * _standard_errors(gains, weight, g), least_gain * usual)
    near = mean[best] - mean <= _standard_errors(gains[:, [best]] - gains, weight, g)
    found = np.flatnonzero(clear & near)
    return int(found[0]) if found.size else 0


def blended_shares(
    mean: Mapping[ClientId, Array], m: Mapping[ClientId, int], a: float
) -> tuple[dict[ClientId, F64], F64]:
    """Shares of each device, and of the fleet, from mean responsibilities [P] on m held-out samples each.

    A device's are those of a Dirichlet prior of `a` samples with the fleet's shares.
    """
    samples = np.array([m[c] for c in mean], dtype=np.float64)
    fleet: F64 = samples @ np.stack([*mean.values()]) / samples.sum()
    return {c: (m[c] * r + a * fleet) / (m[c] + a) for c, r in mean.items()}, fleet


def _winsorized(values: F64, g: int) -> F64:
    """[n, ...] with the g least and the g greatest of each column as the nearest of the others."""
    if not g:
        return np.clip(values, *np.quantile(values, [1 - CAP, CAP], axis=0))
    ordered = np.sort(values, axis=0)
    return np.clip(values, ordered[g], ordered[len(values) - 1 - g])


def _usual(losses: F64, g: int) -> F64:
    """The losses [n] at candidate 0, winsorized; below zero only where those of more devices than may lie are."""
    low = float(np.sort(losses)[max(g, 1)])
    return np.maximum(_winsorized(losses, g), min(0.0, low))


def _standard_errors(gains: F64, weight: F64, g: int) -> F64:
    """[M] of the weighted means of winsorized gains [n, M]."""
    n = len(gains)
    kept = 1 - 2 * g / n
    errors: F64 = np.sqrt((weight**2) @ (gains - weight @ gains) ** 2 * n / (n - 1)) / kept
    return errors
