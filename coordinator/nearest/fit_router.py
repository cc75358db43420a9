"""Fits a `Router` for newcomers from what a run's own devices measured at every center.

A row is one measurement of one training device on a few of its samples: a distance to each center per feature, and the
center that the run assigned it to. For each rule the weights w >= 0 are those of a conditional logit over the centers,

    p(k | z) = softmax_k(-sum_f w_f z_fk),   min  mean -log p(own | z) + held |w|^2,

with the ridge `held` of least loss on left-out devices; z are distances in units of the feature's spread. A single
weight is one over a temperature.

The limits for a good fit and for none are upper prediction limits for the distance of one more device, from those of m
devices to their own centers: on the logarithm y of the distance, mean(y) + t sd(y) sqrt(1 + 1 / m), with the quantile t
of Student's distribution with m - 1 degrees of freedom (Hahn 1970). A distribution-free limit would need 49 devices to
reject one known device in fifty; with this one, five devices already have a limit, a wide one. Fewer give none: three
that are alike by chance would turn away devices like themselves. The limit for none is never below the largest distance
of the fleet, whose logarithms need not be normal. A loss of the user's own that falls below zero has no such limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordinator.strategies.common.assignment import capped_losses
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.representation import router_word
from edge_client.protocol.nearest.input_moments import InputProfile
from edge_client.protocol.nearest.router import (
    FEATURES,
    MIN_LIMIT_DEVICES,
    ONLY_TESTED,
    FeatureBaseline,
    FeatureRule,
    InputSketch,
    LocalRound,
    Router,
)
from edge_client.protocol.nearest.sketch import UPDATE_SKETCH_SIZE
from edge_client.protocol.task import F64, Array

FALSE_NONES = 0.02  # of devices like those that trained are beyond the limit for none, in each feature
FALSE_BADS = 0.1  # and beyond that for a good fit
DISTANCE_FLOOR = 0.05  # of the mean distance, added before the logarithm: a loss near zero is no better than this one
RIDGES = (1e-3, 1e-2, 1e-1)  # ridges per row to choose from
FOLDS = 5
MAX_NEWTON_STEPS, MAX_STEP_HALVINGS = 100, 20  # of the fit, and of one step
CONVERGENCE_TOLERANCE = 1e-9  # the gain that ends it
MIN_SPREAD = 1e-6
LEAST_WEIGHT = 1e-3  # of a way without any other: without a weight the first center would be the nearest of all
MAX_LOG = 36.0  # of a limit
LARGEST_LIMIT = 2.0**52  # a float32 below the largest number of a guide, 2^53 - 1
# The spread is that of a normal distribution with the same upper quantile: what matters is far above.
SPREAD_QUANTILE, NORMAL_SPREAD_QUANTILE = 0.95, 1.6449
COMBINED_RULES = {
    "labelled": ("loss", "votes", "entropy", "norms", "sketch"),
    "unlabelled": ("entropy", "norms", "sketch"),
}
RULES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in FEATURES if name not in ONLY_TESTED},
    **COMBINED_RULES,
}


@dataclass(frozen=True, kw_only=True)
class CenterMeasurement:
    """`n` samples of training device number `device`: feature -> distances [K], for the features that were measured."""

    device: int
    n: int
    distances: Mapping[str, Array]
    own_center: int


def local_round_of(method: LocalSgd, centers: int) -> LocalRound | None:
    """What a guide says of a local round of this method, with zeros for the `centers` update directions.

    None for another optimiser than SGD, for which a guide has no words.
    """
    if method.task_optimiser is not None:
        return None
    return LocalRound(
        representation=router_word(getattr(method, "representation", "all")),
        lr=method.learning_rate,
        momentum=method.momentum,
        batch=method.batch_size,
        steps=method.local_steps,
        centers=np.zeros((centers, UPDATE_SKETCH_SIZE)),
    )


def learn_router(  # noqa: PLR0913 - what devices measured, and how it is read
    looks: Sequence[CenterMeasurement],
    *,
    sizes: Iterable[int],
    centers: int,
    sketch: InputSketch | None = None,
    round: LocalRound | None = None,  # noqa: A002 - the way's name
    inputs: InputProfile | None = None,
    cap: float = 1.0,
) -> Router:
    """A router for measurements on about `sizes` samples; a rule is learned where its features were measured.

    A feature with larger numbers than a guide can hold is left out.

    Below 1 `cap` is the quantile of the devices beyond which no device's distances decide weights: one that lies would
    make them zero. Limits are those of all measurements.
    """
    bins = tuple(sorted(sizes))
    by_size = [[look for look in looks if look.n == n] for n in bins]
    known = [f for f in FEATURES if _has_room(f, looks)]
    usual, trusted = {f: feature_baseline(f, by_size) for f in known}, by_size
    if cap < 1:
        trusted = [_capped(looks, cap) for looks in by_size]
        usual = {f: replace(one, spread=feature_baseline(f, trusted).spread) for f, one in usual.items()}
    ways = {}
    for name, wanted in RULES.items():
        features = tuple(f for f in wanted if f in known)
        if features and (len(features) > 1 or name in FEATURES):
            ways[name] = _rule(features, trusted, usual)
    return Router(centers=centers, sizes=bins, usual=usual, ways=ways, sketch=sketch, round=round, inputs=inputs)


def _has_room(feature: str, looks: Sequence[CenterMeasurement]) -> bool:
    """Whether it was measured, and a guide can hold its distances: of targets that nothing scaled it cannot."""
    own = [abs(look.distances[feature][look.own_center]) for look in looks if feature in look.distances]
    return bool(own) and bool(np.max(own) <= LARGEST_LIMIT)


def _capped(looks: Sequence[CenterMeasurement], cap: float) -> list[CenterMeasurement]:
    """Measurements of one size, in which no distances of a device are farther from the others' than devices' are."""
    distances = [dict(look.distances) for look in looks]
    for feature in {name for one in distances for name in one}:
        measured = [one for one in distances if feature in one]
        rows = capped_losses(np.stack([np.asarray(one[feature], np.float64) for one in measured]), cap)
        for one, row in zip(measured, rows, strict=True):
            one[feature] = row
    return [replace(look, distances=one) for look, one in zip(looks, distances, strict=True)]


def feature_baseline(feature: str, by_size: Sequence[Sequence[CenterMeasurement]]) -> FeatureBaseline:
    """The median at the own center, how far the upper quantile lies above it, the limits; 1 without measurements.

    Where a distance is below zero the limits rest on no device, so that nothing is told by them.
    """
    middle, spread, well, none, counts = [], [], [], [], []
    found = [look.distances[feature] for looks in by_size for look in looks if feature in look.distances]
    below_zero = any(np.min(distances) < 0 for distances in found)  # limits rest on logarithms
    for looks in by_size:
        measured = [look for look in looks if feature in look.distances]
        own = np.array([look.distances[feature][look.own_center] for look in measured] or [1.0])
        devices = _different_devices(feature, measured) if not below_zero else 0
        counts.append(devices)
        middle.append(float(np.median(own)))
        upper = float(np.quantile(own, SPREAD_QUANTILE)) - middle[-1] if measured else 1.0
        spread.append(max(upper / NORMAL_SPREAD_QUANTILE, MIN_SPREAD * max(1.0, float(np.abs(own).mean()))))
        well.append(prediction_limit(own, devices, FALSE_BADS))
        none.append(prediction_limit(own, devices, FALSE_NONES))
    return FeatureBaseline(
        middle=np.array(middle), spread=np.array(spread), well=np.array(well), none=np.array(none), devices=counts
    )


def _different_devices(feature: str, looks: Sequence[CenterMeasurement]) -> int:
    """How many devices measured it; those with the same figures have the same samples, and count once."""
    found: dict[int, tuple[float, ...]] = {}
    for look in looks:
        found[look.device] = (*found.get(look.device, ()), float(look.distances[feature][look.own_center]))
    return len(set(found.values()))


def prediction_limit(distances: Array, devices: int, share: float) -> float:
    """The distance that one more device exceeds with at most the probability `share`, from those of so many devices.

    The limit for none is never below the largest of them, in case their logarithms are not normal.

    Measurements of one device count as one when the limit's degrees of freedom are counted, since they are alike. From
    fewer than MIN_LIMIT_DEVICES nothing can be told: then the limit is 0 for a good fit and the largest number for
    none.
    """
    if devices < MIN_LIMIT_DEVICES:
        return 0.0 if share == FALSE_BADS else LARGEST_LIMIT
    from scipy.special import stdtrit

    floor = DISTANCE_FLOOR * float(distances.mean()) + MIN_SPREAD
    y = np.log(distances + floor)
    wide = float(stdtrit(devices - 1, 1 - share)) * np.sqrt(1 + 1 / devices)
    limit = min(float(np.exp(min(y.mean() + wide * y.std(ddof=1), MAX_LOG)) - floor), LARGEST_LIMIT)
    return limit if share == FALSE_BADS else max(limit, float(distances.max()))


def _rule(
    features: tuple[str, ...], by_size: Sequence[Sequence[CenterMeasurement]], usual: Mapping[str, FeatureBaseline]
) -> FeatureRule:
    weights = []
    for s, looks in enumerate(by_size):
        spread = np.array([usual[f].spread[s] for f in features])
        z = np.stack([_stacked(look, features) for look in looks]) / spread[:, None]  # [rows, F, K]
        own = np.array([look.own_center for look in looks])
        device = np.array([look.device for look in looks])
        held = RIDGES[0] if len(features) == 1 else _choose_ridge(z, own, device)
        fitted = fit_weights(z, own, held)
        weights.append(fitted if fitted.any() else np.full(len(features), LEAST_WEIGHT))
    return FeatureRule(features=features, weights=np.array(weights))


def _stacked(measurement: CenterMeasurement, features: tuple[str, ...]) -> F64:
    zero = np.zeros(len(next(iter(measurement.distances.values()))))
    return np.stack([np.asarray(measurement.distances.get(f, zero), dtype=np.float64) for f in features])


def _choose_ridge(z: F64, own: Array, device: Array) -> float:
    """The ridge with the least loss on left-out devices; the greatest of equals."""
    fold = np.unique(device, return_inverse=True)[1] % FOLDS

    def surprise(held: float) -> float:
        parts = [(fold != f, fold == f) for f in range(FOLDS)]
        both = [(a, b) for a, b in parts if a.any() and b.any()]
        return sum(_loss(fit_weights(z[a], own[a], held), z[b], own[b])[0] * int(b.sum()) for a, b in both)

    return min(reversed(RIDGES), key=surprise)


def fit_weights(z: Array, own: Array, held: float = RIDGES[0]) -> F64:
    """Standardised distances [rows, F, K] and own centers [rows] -> weights [F] >= 0.

    Minimises mean -log softmax(-w . z)[own] + held |w|^2, which is convex, by projected Newton steps with halving. A
    step gains no more than the gradient says, as the loss is convex; one that cannot gain enough is not tried.
    """
    count = z.shape[1]
    w = np.full(count, 0.5 / count)
    here = _loss(w, z, own, held)
    for _ in range(MAX_NEWTON_STEPS):
        now, gradient, curve = here
        free = (w > 0) | (gradient < 0)
        move = np.zeros(count)
        if free.any():
            move[free] = np.linalg.solve(curve[np.ix_(free, free)], gradient[free])
        steps = (np.maximum(0.0, w - move / 2**halvings) for halvings in range(MAX_STEP_HALVINGS))
        trials = (trial for trial in steps if gradient @ (w - trial) > CONVERGENCE_TOLERANCE)
        tried = ((trial, _loss(trial, z, own, held)) for trial in trials)
        better = next((found for found in tried if found[1][0] < now - CONVERGENCE_TOLERANCE), None)
        if better is None:
            break
        w, here = better
    return w


def _loss(w: F64, z: Array, own: Array, held: float = 0.0) -> tuple[float, F64, F64]:
    """What `fit_weights` minimises at `w`, its gradient [F] and its second derivatives [F, F]."""
    rows = np.arange(len(z))
    score = -np.einsum("f,rfk->rk", w, z)
    score -= score.max(axis=1, keepdims=True)
    p = np.exp(score)
    total = p.sum(axis=1)
    p /= total[:, None]
    mean = np.einsum("rk,rfk->rf", p, z)
    square = np.einsum("rk,rfk,rgk->fg", p, z, z) / len(z) - np.einsum("rf,rg->fg", mean, mean) / len(z)
    gradient = (z[rows, :, own] - mean).mean(axis=0) + 2 * held * w
    value = float((np.log(total) - score[rows, own]).mean() + held * w @ w)
    return value, gradient, square + 2 * held * np.eye(len(w))
