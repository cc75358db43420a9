"""The router of a run: from a device's measurements to the probability of each center, and whether any center fits.

A rule (`ways` in the file) weighs one or several features. A feature is a distance to every center, such as a mean
loss; less is better. The probability of center k is softmax_k(-sum_f weight_f distance_fk / spread_f). The choice is
"none" if a feature exceeds its baseline (training devices at their own center) by more than it does on nearly all of
them. All parameters depend on the number of samples: they are learned for a few sizes and interpolated in between.

coordinator/nearest/fit_router.py learns a router; devices, the coordinator and HTTP servers read it. Pure.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.blocks import KIND_LIMITS
from edge_client.protocol.message_schemas import MAX_CENTERS
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.nearest.sketch import MAX_SKETCH_SIZE
from edge_client.protocol.task import F64, Array

VERSION = 1
MIN_SPREAD = 1e-12
FEATURES = ("loss", "votes", "entropy", "norms", "sketch", "round")
NEED_LABELS = frozenset({"loss", "votes", "round"})
Distances = Mapping[str, Sequence[float] | Array]  # feature -> [centers]

_NUMBERS_FIELD = validators.list_of(validators.number(-validators.MAX_SAFE_INTEGER, validators.MAX_SAFE_INTEGER), 1, 16)
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
            validators.record(validators.required(middle=_NUMBERS_FIELD, spread=_NUMBERS_FIELD)),
            len(FEATURES),
        ),
        ways=validators.map_of(
            _NAME_FIELD,
            validators.record(
                validators.required(
                    features=validators.list_of(_FEATURE_FIELD, 1, len(FEATURES)),
                    weights=validators.list_of(_NUMBERS_FIELD, 1, 16),
                    none=_NUMBERS_FIELD,
                )
            ),
            16,
        ),
        sketch=validators.or_null(_POINTS_SCHEMA),
        round=validators.or_null(_POINTS_SCHEMA),
    )
)


@dataclass(frozen=True, kw_only=True)
class FeatureBaseline:
    """A feature on training devices at their own center: its median and spread, [sizes] each, spread > 0."""

    middle: F64
    spread: F64


@dataclass(frozen=True, kw_only=True)
class FeatureRule:
    """Weights [sizes, features], none below 0; `none` [sizes]: the limit above the baseline, in spreads."""

    features: tuple[str, ...]
    weights: F64
    none: F64


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
    """The probability of each center [K], of sum 1; `outlier_score`: by how many spreads the best one is too far."""

    probabilities: F64
    outlier_score: float  # above 0: none fits

    @property
    def center(self) -> int | None:
        """The most probable center, the lower one on a tie; None: none fits."""
        return None if self.outlier_score > 0 else self.best

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

    def predict(self, way: str, distances: Distances, n: int) -> RouterPrediction:
        """What to think after `n` samples. A center that was not measured has an infinite distance.

        A feature of the way that was not measured counts for nothing.
        """
        rule = self._rule(way)
        score, strange = np.zeros(self.centers), []
        for i, name in enumerate(rule.features):
            if name not in distances:
                continue
            d = np.asarray(distances[name], dtype=np.float64)
            if d.shape != (self.centers,) or np.isnan(d).any():
                raise Malformed("bad_field", f"{name} has {d.shape} distances, there are {self.centers} centers")
            spread = self._at(self.usual[name].spread, n)
            there = np.isfinite(d)
            score -= np.where(there, self._at(rule.weights[:, i], n) / spread * np.where(there, d, 0.0), np.inf)
            strange.append((name, d, spread))
        if not strange or not np.isfinite(score).any():
            raise Malformed("bad_field", f"nothing was measured that the way {way!r} weighs")
        shares = np.exp(score - score.max())
        shares /= shares.sum()
        best = int(shares.argmax())
        above = [(float(d[best]) - self._at(self.usual[name].middle, n)) / spread for name, d, spread in strange]
        return RouterPrediction(probabilities=shares, outlier_score=max(above) - self._at(rule.none, n))

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
                "usual": {f: {"middle": _short(u.middle), "spread": _short(u.spread)} for f, u in self.usual.items()},
                "ways": {
                    name: {
                        "features": list(w.features),
                        "weights": [_short(row) for row in w.weights],
                        "none": _short(w.none),
                    }
                    for name, w in self.ways.items()
                },
                "sketch": None if self.sketch is None else {**_plain(self.sketch), "size": self.sketch.size},
                "round": None if self.round is None else {**_plain(self.round), "size": self.round.centers.shape[1]},
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
            f: FeatureBaseline(middle=_row(u["middle"], sizes), spread=_row(u["spread"], sizes))
            for f, u in raw["usual"].items()
        }
        if any((u.spread < MIN_SPREAD).any() for u in usual.values()):
            raise Malformed("bad_field", f"a spread of a guide is at least {MIN_SPREAD}")
        return Router(
            centers=k,
            sizes=sizes,
            usual=usual,
            ways={name: _way(name, w, sizes, usual) for name, w in raw["ways"].items()},
            sketch=None if raw["sketch"] is None else _read(InputSketch, raw["sketch"], k, ("seed", "width")),
            round=None
            if raw["round"] is None
            else _read(LocalRound, raw["round"], k, ("representation", "lr", "momentum", "batch", "steps")),
        )


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
    return FeatureRule(features=features, weights=weights, none=_row(raw["none"], sizes))


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
    try:
        data = base64.b64decode(raw["centers"], validate=True)
    except ValueError as wrong:
        raise Malformed("bad_field", f"the guide's points are no base64: {wrong}") from wrong
    if len(data) != centers * raw["size"] * 4:
        raise Malformed("bad_field", f"the guide's points have {len(data)} bytes for {centers} times {raw['size']}")
    points = np.frombuffer(data, "<f4").reshape(centers, raw["size"]).astype(np.float64)
    if not np.isfinite(points).all():
        raise Malformed("not_finite", "the guide's points hold NaN or infinity")
    return kind(**{name: raw[name] for name in needed}, centers=points)


def _short(values: Array) -> list[float]:
    return [float(v) for v in np.asarray(values, np.float32)]
