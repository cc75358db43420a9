"""The router of a run: from a device's measurements to the probability of each center, and whether any center fits.

A rule (`ways` in the file) weighs one or several features. A feature is a distance to every center, such as a mean
loss; less is better. The probability of center k is softmax_k(-sum_f weight_f distance_fk / spread_f). It compares the
centers and says nothing about whether any of them fits. That is told by limits of each feature in `TESTED`, at the most
probable center: one that few devices of the fleet exceed ("well" up to there), and one that hardly any does ("badly" up
to there, "none" above). All parameters depend on the number of samples: they are learned for a few sizes and
interpolated in between.

coordinator/nearest/fit_router.py learns a router; devices, the coordinator and HTTP servers read it. Pure.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.blocks import KIND_LIMITS
from edge_client.protocol.message_schemas import MAX_CENTERS
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.nearest.answer_moments import MAX_CLASSES, AnswerProfile
from edge_client.protocol.nearest.input_moments import MAX_FEATURES, InputProfile
from edge_client.protocol.nearest.sketch import MAX_SKETCH_SIZE
from edge_client.protocol.task import F64, Array

VERSION = 3
MIN_SPREAD = 1e-12
MIN_LIMIT_DEVICES = 5  # a limit that rests on fewer is no evidence: whether a center fits is not known then
FEATURES = ("loss", "votes", "entropy", "norms", "sketch", "round", "inputs", "answers")
TESTED = frozenset(FEATURES) - {"votes"}  # some center always has most votes
ONLY_TESTED = frozenset({"inputs", "answers"})  # they tell whether a center fits, not which is nearest
LIMITS = ("middle", "spread", "well", "none")  # of a feature
FITS = ("well", "badly", "none")  # best first
NEED_LABELS = frozenset({"loss", "votes", "round"})
Distances = Mapping[str, Sequence[float] | Array]  # feature -> [centers]

MAX_PROFILE_CHARS = 6 * MAX_FEATURES * (MAX_FEATURES + 2)  # base64 of float32
MAX_ANSWER_CHARS = 6 * MAX_CENTERS * 2 * MAX_CLASSES**2

_NUMBERS_FIELD = validators.list_of(validators.number(-validators.MAX_SAFE_INTEGER, validators.MAX_SAFE_INTEGER), 1, 16)
_COUNTS_FIELD = validators.list_of(validators.integer(0, validators.MAX_SAFE_INTEGER), 1, 16)
_NAME_FIELD = validators.matching("[a-z-]{1,16}")
_FEATURE_FIELD = validators.one_of(*FEATURES)
_POINTS_SCHEMA = validators.record(
    validators.required(
        size=validators.integer(1, MAX_SKETCH_SIZE), centers=validators.text(MAX_CENTERS * MAX_SKETCH_SIZE * 6)
    )
    | validators.optional(
        seed=validators.integer(0, validators.MAX_SAFE_INTEGER),
        width=validators.number(1e-12, validators.MAX_SAFE_INTEGER),
        representation=validators.matching("[a-z-]{1,32}"),
        lr=validators.number(),
        momentum=validators.number(0, 1),
        batch=validators.integer(1, 65_536),
        steps=validators.integer(1, 1_000_000),
    )
)
ROUTER_SCHEMA = validators.record(
    validators.required(
        v=validators.integer(0, validators.MAX_SAFE_INTEGER),
        centers=validators.integer(1, MAX_CENTERS),
        sizes=validators.list_of(validators.integer(1, 2**31), 1, 16),
        usual=validators.map_of(
            _FEATURE_FIELD,
            validators.record(
                validators.required(
                    middle=_NUMBERS_FIELD, spread=_NUMBERS_FIELD, well=_NUMBERS_FIELD, none=_NUMBERS_FIELD
                )
                | validators.optional(devices=_COUNTS_FIELD)
            ),
            len(FEATURES),
        ),
        ways=validators.map_of(
            _NAME_FIELD,
            validators.record(
                validators.required(
                    features=validators.list_of(_FEATURE_FIELD, 1, len(FEATURES)),
                    weights=validators.list_of(_NUMBERS_FIELD, 1, 16),
                )
            ),
            16,
        ),
        sketch=validators.or_null(_POINTS_SCHEMA),
        round=validators.or_null(_POINTS_SCHEMA),
        inputs=validators.or_null(
            validators.record(
                validators.required(
                    features=validators.integer(1, MAX_FEATURES), profile=validators.text(MAX_PROFILE_CHARS)
                )
            )
        ),
        answers=validators.or_null(
            validators.record(
                validators.required(
                    classes=validators.integer(1, MAX_CLASSES), profiles=validators.text(MAX_ANSWER_CHARS)
                )
            )
        ),
    )
)


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

    `fit` is None where nothing was measured that can tell.
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
        return RouterPrediction(probabilities=shares, fit=worst_fit(fits.values()))

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
        well, none = (
            middle * (max(self._at(limit, n), MIN_SPREAD) / middle) ** wider for limit in (usual.well, usual.none)
        )
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

    def to_bytes(self) -> bytes:
        """Canonical JSON; equal guides give equal bytes. Numbers are rounded as float32."""
        return canonical_json(
            {
                "v": VERSION,
                "centers": self.centers,
                "sizes": list(self.sizes),
                "usual": {f: _baseline_json(u) for f, u in self.usual.items()},
                "ways": {
                    name: {
                        "features": list(w.features),
                        "weights": [_short(row) for row in w.weights],
                    }
                    for name, w in self.ways.items()
                },
                "sketch": None if self.sketch is None else {**_plain(self.sketch), "size": self.sketch.size},
                "round": None if self.round is None else {**_plain(self.round), "size": self.round.centers.shape[1]},
                "inputs": None if self.inputs is None else _profile_json(self.inputs),
                "answers": None if self.answers is None else _answers_json(self.answers),
            }
        )

    @staticmethod
    def from_bytes(data: bytes) -> Router:
        """What `to_bytes` wrote, everything checked. Raises Malformed."""
        raw = ROUTER_SCHEMA(parse_json(data, KIND_LIMITS["router"]), "guide")
        if raw["v"] != VERSION:
            raise Malformed("bad_version", f"guide version {raw['v']}; this side reads {VERSION}")
        sizes, k = tuple(raw["sizes"]), int(raw["centers"])
        if list(sizes) != sorted(set(sizes)):
            raise Malformed("bad_field", "the sizes of a guide must rise")
        usual = {
            f: FeatureBaseline(
                **{name: _row(u[name], sizes) for name in LIMITS},
                devices=[int(count) for count in _row(u["devices"], sizes)] if "devices" in u else None,
            )
            for f, u in raw["usual"].items()
        }
        if any((u.spread < MIN_SPREAD).any() for u in usual.values()):
            raise Malformed("bad_field", f"a spread of a guide is at least {MIN_SPREAD}")
        if any((u.well > u.none).any() for u in usual.values()):
            raise Malformed("bad_field", "a limit of a guide for a good fit lies above that for none")
        return Router(
            centers=k,
            sizes=sizes,
            usual=usual,
            ways={name: _way(name, w, sizes, usual) for name, w in raw["ways"].items()},
            sketch=None if raw["sketch"] is None else _read(InputSketch, raw["sketch"], k, ("seed", "width")),
            round=None
            if raw["round"] is None
            else _read(LocalRound, raw["round"], k, ("representation", "lr", "momentum", "batch", "steps")),
            inputs=None if raw["inputs"] is None else _read_profile(raw["inputs"]),
            answers=None if raw["answers"] is None else _read_answers(raw["answers"], k),
        )


def worst_fit(fits: Iterable[str]) -> str | None:
    """The worst of several; None of none."""
    return max(fits, key=FITS.index, default=None)


def _baseline_json(usual: FeatureBaseline) -> dict[str, Any]:
    counted = {} if usual.devices is None else {"devices": list(usual.devices)}
    return {name: _short(getattr(usual, name)) for name in LIMITS} | counted


def _way(
    name: str, raw: Mapping[str, Any], sizes: tuple[int, ...], usual: Mapping[str, FeatureBaseline]
) -> FeatureRule:
    features = tuple(raw["features"])
    if len(raw["weights"]) != len(sizes) or any(len(row) != len(features) for row in raw["weights"]):
        raise Malformed("bad_field", f"way {name!r} needs a weight for each of its features and sizes")
    if set(features) - set(usual) or len(set(features)) < len(features):
        raise Malformed("bad_field", f"way {name!r} weighs a feature without a baseline, or one twice")
    weights = np.array(raw["weights"], dtype=np.float64)
    if (weights < 0).any():
        raise Malformed("bad_field", f"way {name!r} has a weight below 0")
    return FeatureRule(features=features, weights=weights)


def _row(values: Sequence[float], sizes: tuple[int, ...]) -> F64:
    if len(values) != len(sizes):
        raise Malformed("bad_field", f"{len(values)} numbers for {len(sizes)} sizes")
    return np.array(values, dtype=np.float64)


def _plain(kept: InputSketch | LocalRound) -> dict[str, Any]:
    """Its fields for JSON; points as base64 of float32, little-endian, row after row."""
    return vars(kept) | {"centers": base64.b64encode(kept.centers.astype("<f4").tobytes()).decode("ascii")}


def _read(kind: type[Any], raw: Mapping[str, Any], centers: int, needed: tuple[str, ...]) -> Any:  # noqa: ANN401 - of `kind`
    missing = [name for name in needed if name not in raw]
    if missing:
        raise Malformed("bad_field", f"the guide's points lack {', '.join(missing)}")
    points = _numbers(raw["centers"], centers, raw["size"])
    return kind(**{name: raw[name] for name in needed}, centers=points)


def _profile_json(profile: InputProfile) -> dict[str, Any]:
    rows = np.vstack([profile.mean, profile.spread, profile.precision])
    return {"features": rows.shape[1], "profile": base64.b64encode(rows.astype("<f4").tobytes()).decode("ascii")}


def _read_profile(raw: Mapping[str, Any]) -> InputProfile:
    rows = _numbers(raw["profile"], raw["features"] + 2, raw["features"])
    if (rows[1] <= 0).any():
        raise Malformed("bad_field", "a spread of the guide's inputs is not above 0")
    return InputProfile(mean=rows[0], spread=rows[1], precision=rows[2:])


def _answers_json(profiles: Sequence[AnswerProfile]) -> dict[str, Any]:
    rows = np.vstack([part for profile in profiles for part in (profile.means, profile.precision)])
    return {"classes": rows.shape[1], "profiles": base64.b64encode(rows.astype("<f4").tobytes()).decode("ascii")}


def _read_answers(raw: Mapping[str, Any], centers: int) -> list[AnswerProfile]:
    classes = raw["classes"]
    parts = _numbers(raw["profiles"], 2 * centers * classes, classes).reshape(centers, 2, classes, classes)
    return [AnswerProfile(means=means, precision=precision) for means, precision in parts]


def _numbers(text: str, rows: int, columns: int) -> F64:
    """Base64 of float32, little-endian, row after row -> [rows, columns]. Raises Malformed."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as wrong:
        raise Malformed("bad_field", f"numbers of the guide are no base64: {wrong}") from wrong
    if len(data) != rows * columns * 4:
        raise Malformed("bad_field", f"the guide has {len(data)} bytes for {rows} times {columns} numbers")
    points = np.frombuffer(data, "<f4").reshape(rows, columns).astype(np.float64)
    if not np.isfinite(points).all():
        raise Malformed("not_finite", "the guide holds NaN or infinity")
    return points


def _short(values: Array) -> list[float]:
    return [float(v) for v in np.asarray(values, np.float32)]
