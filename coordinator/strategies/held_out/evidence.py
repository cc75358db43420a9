"""What held-out losses decide: whether more centers are clearly better, and the shares of a served mixture. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge_client.protocol.task import F64, Array, ClientId

LEAST_DEVICES = 3  # fewer say nothing about the spread of a gain
CAP = 0.9  # gains outside the quantiles 1 - CAP and CAP count as the nearer one: a lie is no farther than honest gains
CONFIDENCE = 0.99  # of one side: several numbers of parts are tried in several rounds


def best_candidate(losses: F64, m: F64, least_gain: float) -> int:
    """Which candidate is clearly better than candidate 0; 0 where none is.

    `losses` [n, M] are those of n devices, each on m [n] held-out samples; a device weighs as the median at most. A
    candidate must save the share `least_gain` of the loss, by Student's bound over the devices; of those within one
    standard error of the best, it is the first.

    >>> best_candidate(np.array([[1.0, 0.5], [1.1, 0.5], [0.9, 0.5]]), np.ones(3), 0.2)
    1
    """
    known = np.isfinite(losses).all(axis=1)
    losses, m = losses[known], m[known]
    if len(losses) < LEAST_DEVICES:
        return 0
    from scipy.special import stdtrit  # a third of what a coordinator's process would import

    gains = losses[:, :1] - losses
    gains = np.clip(gains, *np.quantile(gains, [1 - CAP, CAP], axis=0))
    m = np.minimum(m, np.median(m))  # by its own word; one that outweighs all others has no spread to be seen
    weight = m / m.sum()
    mean, usual = weight @ gains, float(weight @ _usual(losses[:, 0]))
    best = int(mean.argmax())
    bound = float(stdtrit(len(losses) - 1, CONFIDENCE))
    clear = mean > np.maximum(bound * _standard_errors(gains, weight), least_gain * usual)
    near = mean[best] - mean <= _standard_errors(gains[:, [best]] - gains, weight)
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


def _usual(losses: F64) -> F64:
    """The losses [n] at candidate 0, within their quantiles; below zero only where those of more devices are."""
    low = np.quantile(losses, 1 - CAP, method="higher")  # not that of one device alone
    return np.clip(losses, min(0.0, float(low)), np.quantile(losses, CAP))


def _standard_errors(gains: F64, weight: F64) -> F64:
    """[M] of the weighted means of gains [n, M]."""
    n = len(gains)
    errors: F64 = np.sqrt((weight**2) @ (gains - weight @ gains) ** 2 * n / (n - 1))
    return errors
