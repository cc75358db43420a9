"""The router of a run: from a device's measurements to the probability of each center, and whether any center fits.

A rule (`ways` in the file) weighs one or several features. A feature is a distance to every center, such as a mean
loss; less is better. The probability of center k is softmax_k(-sum_f weight_f distance_fk / spread_f). It compares the
centers and says nothing about whether any of them fits. That is told by limits of each feature in `TESTED`, at the most
probable center: one that few devices of the fleet exceed ("well" up to there), and one that hardly any does ("badly" up
to there, "none" above); `joint_fit` joins them. All parameters depend on the number of samples: they are learned for a
few sizes and interpolated in between.

coordinator/nearest/fit_router.py learns a router; devices, the coordinator and HTTP servers read it from its file
(router_file.py). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol.nearest.answer_moments import AnswerProfile
from edge_client.protocol.nearest.input_moments import InputProfile
from edge_client.protocol.task import F64, Array

MIN_SPREAD = 1e-12
MIN_LIMIT_DEVICES = 5  # a limit that rests on fewer is no evidence: whether a center fits is not known then
FEATURES = ("loss", "votes", "entropy", "norms", "sketch", "round", "inputs", "answers")
TESTED = frozenset(FEATURES) - {"votes"}  # some center always has most votes
ONLY_TESTED = frozenset({"inputs", "answers"})  # they tell whether a center fits, not which is nearest
MIXED = frozenset({"sketch", "norms", "round"})  # means over a device's samples: they follow how frequent classes are
FITS = ("well", "badly", "none")  # best first
NEED_LABELS = frozenset({"loss", "votes", "round"})
Distances = Mapping[str, Sequence[float] | Array]  # feature -> [centers]


@dataclass(frozen=True, kw_only=True)
class FeatureBaseline:
    """A feature on training devices at their own center: median, spread > 0, limits of "well" and "badly" [sizes].

    `devices` [sizes]: how many the limits rest on; None in a guide that does not say it.
    """

    middle: F64
    spread: F64
    well: F64
    none: F64
    devices: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class FeatureRule:
    """Weights [sizes, features], none below 0."""

    features: tuple[str, ...]
    weights: F64


@dataclass(frozen=True, kw_only=True)
class InputSketch:
    """Parameters of the inputs' sketch (sketch.random_features), and the centers' sketches [K, size]."""

    seed: int
    width: float
    centers: F64

    @property
    def size(self) -> int:
        """Numbers of a sketch."""
        return int(self.centers.shape[1])


@dataclass(frozen=True, kw_only=True)
class LocalRound:
    """Settings of one local round from the common start, and the centers' update directions [K, size], of norm 1."""

    representation: str
    lr: float
    momentum: float
    batch: int
    steps: int
    centers: F64


@dataclass(frozen=True, kw_only=True)
class RouterPrediction:
    """The probability of each center [K] among them, of sum 1, and how the most probable one fits (`FITS`).

    `fit` is None where what was measured cannot tell (`joint_fit`).
    """

    probabilities: F64
    fit: str | None

    @property
    def center(self) -> int | None:
        """The most probable center, the lower one on a tie; None: none fits."""
        return None if self.fit == "none" else self.best

    @property
    def best(self) -> int:
        """The most probable center, whether it fits or not."""
        return int(self.probabilities.argmax())

    def candidates(self, most: int, belief: float) -> list[int]:
        """The fewest centers, best first, that hold this share of belief, at most so many."""
        order = np.argsort(-self.probabilities, kind="stable")
        enough = int(np.searchsorted(np.cumsum(self.probabilities[order]), belief)) + 1
        return [int(k) for k in order[: min(enough, most)]]


@dataclass(frozen=True, kw_only=True)
class Router:
    """See the module. `sizes` rise."""

    centers: int
    sizes: tuple[int, ...]
    usual: Mapping[str, FeatureBaseline]
    ways: Mapping[str, FeatureRule]
    sketch: InputSketch | None = None
    round: LocalRound | None = field(default=None)
    inputs: InputProfile | None = None
    answers: Sequence[AnswerProfile] | None = None  # of each center

    def predict(self, way: str, distances: Distances, n: int) -> RouterPrediction:
        """What to think after `n` samples. A center that was not measured has an infinite distance.

        A feature of the way that was not measured counts for nothing.
        """
        rule = self._rule(way)
        checked = {name: self._checked(name, distances[name]) for name in distances if name in self.usual}
        used = [(i, name) for i, name in enumerate(rule.features) if name in checked]
        score = np.zeros(self.centers)
        for i, name in used:
            d, weight = checked[name], self._at(rule.weights[:, i], n) / self._at(self.usual[name].spread, n)
            there = np.isfinite(d)
            score -= np.where(there, weight * np.where(there, d, 0.0), np.inf)
        if not used or not np.isfinite(score).any():
            raise Malformed("bad_field", f"nothing was measured that the way {way!r} weighs")
        shares = np.exp(score - score.max())
        shares /= shares.sum()
        best = int(shares.argmax())
        fits = self.fits({name: float(d[best]) for name, d in checked.items()}, n)
        return RouterPrediction(probabilities=shares, fit=joint_fit(fits))

    def fits(self, distances: Mapping[str, float], n: int) -> dict[str, str]:
        """Feature -> how a center fits that is so far; for the features that can tell."""
        behind = self.devices_behind(distances, n)
        return {
            f: self._fit(f, d, n)
            for f, d in distances.items()
            if f in TESTED and f in self.usual and behind.get(f, MIN_LIMIT_DEVICES) >= MIN_LIMIT_DEVICES
        }

    def devices_behind(self, features: Iterable[str], n: int) -> dict[str, int]:
        """Feature -> on how many devices its limits for `n` samples rest; for those that have limits and say it."""
        at = int(np.searchsorted(self.sizes, n, side="right"))
        used = slice(max(0, at - 1), max(1, at if n in self.sizes else at + 1))  # the sizes around n
        counts = {f: self.usual[f].devices for f in features if f in TESTED and f in self.usual}
        return {f: min(count[used]) for f, count in counts.items() if count is not None}

    def without(self, features: Iterable[str]) -> Router:
        """This router, which neither weighs these features nor tells by them how a center fits."""
        gone, ways = frozenset(features), {}
        for name, way in self.ways.items():
            left = [i for i, feature in enumerate(way.features) if feature not in gone]
            if left:
                ways[name] = replace(way, features=tuple(way.features[i] for i in left), weights=way.weights[:, left])
        return replace(self, ways=ways, usual={f: known for f, known in self.usual.items() if f not in gone})

    def fit_of(self, feature: str, n: int) -> Callable[[float], str | None]:
        """A distance by one feature of `n` samples -> how such a center fits, None where the feature cannot tell."""
        return lambda distance: self.fits({feature: distance}, n).get(feature)

    def typical(self, feature: str, n: int) -> float | None:
        """The feature's median on devices that trained, if it was measured."""
        return self._at(self.usual[feature].middle, n) if feature in self.usual else None

    def limits(self, feature: str, n: int) -> tuple[float, float]:
        """By this feature of `n` samples a center fits well below the first, and not at all above the second.

        Fewer samples than any device of the run had scatter more: the limits' logarithms are further from the median's,
        by the square root of the ratio.
        """
        usual, wider = self.usual[feature], max(1.0, self.sizes[0] / max(1, n)) ** 0.5
        middle = max(self._at(usual.middle, n), MIN_SPREAD)
        told = np.maximum([self._at(limit, n) for limit in (usual.well, usual.none)], MIN_SPREAD)
        with np.errstate(over="ignore"):  # of far fewer samples: then every distance is below
            well, none = (middle * (told / middle) ** wider).tolist()
        return well, none

    def _fit(self, feature: str, distance: float, n: int) -> str:
        """How a center fits that is so far by this feature of `n` samples."""
        return FITS[int(np.searchsorted(self.limits(feature, n), distance))]

    def _checked(self, name: str, distances: Sequence[float] | Array) -> F64:
        d = np.asarray(distances, dtype=np.float64)
        if d.shape != (self.centers,) or np.isnan(d).any():
            raise Malformed("bad_field", f"{name} has {d.shape} distances, there are {self.centers} centers")
        return d

    def _rule(self, way: str) -> FeatureRule:
        if way not in self.ways:
            raise Malformed("bad_field", f"this run has learned no way {way!r:.20}; it knows {', '.join(self.ways)}")
        return self.ways[way]

    def _at(self, values: Array, n: int) -> float:
        """Read between the sizes, on a logarithmic scale; the first and the last go on for ever."""
        return float(np.interp(np.log(max(1, n)), np.log(self.sizes), values))


def joint_fit(fits: Mapping[str, str]) -> str | None:
    """How a center fits by all features together, feature -> its fit; None where that is not known.

    A device with few classes, or with classes in other proportions than on the devices that trained, is far off by the
    features in `MIXED`, though its center may know each of its samples. So these do not count beside a loss. Without
    one, such a device cannot be told from a stranger: what they refuse and all others accept is not known.
    """
    plain = worst_fit(fit for feature, fit in fits.items() if feature not in MIXED)
    if plain == FITS[-1] or "loss" in fits:
        return plain
    found = worst_fit(fits.values())
    return None if found == FITS[-1] and plain is not None else found


def worst_fit(fits: Iterable[str]) -> str | None:
    """The worst of several; None of none."""
    return max(fits, key=FITS.index, default=None)
