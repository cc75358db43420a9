"""The file of a router: canonical JSON, with points as base64 of float32, little-endian, row after row.

Equal routers give equal bytes. What is read is checked in full: it came over a network. Pure.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.blocks import KIND_LIMITS, MAX_INTEGER, decode_base64
from edge_client.protocol.message_schemas import MAX_CENTERS
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.nearest.answer_moments import MAX_CLASSES, AnswerProfile
from edge_client.protocol.nearest.input_moments import MAX_FEATURES, InputProfile
from edge_client.protocol.nearest.router import (
    FEATURES,
    MIN_SPREAD,
    FeatureBaseline,
    FeatureRule,
    InputSketch,
    LocalRound,
    Router,
)
from edge_client.protocol.nearest.sketch import MAX_SKETCH_SIZE
from edge_client.protocol.task import F64, MAX_BATCH, MAX_STEPS, Array

VERSION = 3
_NEWER = "install the version of fedcenters that the coordinator runs"
_OLDER = "start the coordinator with this version, which publishes again; export other bundles again"
LIMITS = ("middle", "spread", "well", "none")  # of a feature

_NUMBERS_FIELD = validators.list_of(validators.number(-MAX_INTEGER, MAX_INTEGER), 1, 16)
_COUNTS_FIELD = validators.list_of(validators.integer(0), 1, 16)
_NAME_FIELD = validators.matching("[a-z-]{1,16}")
_FEATURE_FIELD = validators.one_of(*FEATURES)
_BASE64_FIELD = validators.text(KIND_LIMITS["router"])  # `_numbers` looks how many numbers it has
_POINTS_SCHEMA = validators.record(
    validators.required(size=validators.integer(1, MAX_SKETCH_SIZE), centers=_BASE64_FIELD)
    | validators.optional(
        seed=validators.integer(0),
        width=validators.number(1e-12, MAX_INTEGER),
        representation=validators.matching("[a-z-]{1,32}"),
        lr=validators.number(),
        momentum=validators.number(0, 1),
        batch=validators.integer(1, MAX_BATCH),
        steps=validators.integer(1, MAX_STEPS),
    )
)
_VERSION_SCHEMA = validators.record(validators.required(v=validators.integer(0)))
ROUTER_SCHEMA = validators.record(
    validators.required(
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
            validators.record(validators.required(features=validators.integer(1, MAX_FEATURES), profile=_BASE64_FIELD))
        ),
        answers=validators.or_null(
            validators.record(validators.required(classes=validators.integer(1, MAX_CLASSES), profiles=_BASE64_FIELD))
        ),
    )
)


def write_router(router: Router) -> bytes:
    """Canonical JSON; equal guides give equal bytes. Numbers are rounded as float32."""
    return canonical_json(
        {
            "v": VERSION,
            "centers": router.centers,
            "sizes": list(router.sizes),
            "usual": {f: _baseline_json(u) for f, u in router.usual.items()},
            "ways": {
                name: {
                    "features": list(w.features),
                    "weights": [_short(row) for row in w.weights],
                }
                for name, w in router.ways.items()
            },
            "sketch": None if router.sketch is None else {**_plain(router.sketch), "size": router.sketch.size},
            "round": None if router.round is None else {**_plain(router.round), "size": router.round.centers.shape[1]},
            "inputs": None if router.inputs is None else _profile_json(router.inputs),
            "answers": None if router.answers is None else _answers_json(router.answers),
        }
    )


def read_router(data: bytes) -> Router:
    """What `write_router` wrote, everything checked. Raises Malformed."""
    given = parse_json(data, KIND_LIMITS["router"])
    if (version := _VERSION_SCHEMA(given, "guide")["v"]) != VERSION:
        told = f"guide version {version}; this side reads {VERSION}"
        raise Malformed("bad_version", told, hint=_OLDER if version < VERSION else _NEWER)
    raw = ROUTER_SCHEMA(given, "guide")
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
    data = decode_base64(text, rows * columns * 4)
    if len(data) != rows * columns * 4:
        raise Malformed("bad_field", f"the guide has {len(data)} bytes for {rows} times {columns} numbers")
    points = np.frombuffer(data, "<f4").reshape(rows, columns).astype(np.float64)
    if not np.isfinite(points).all():
        raise Malformed("not_finite", "the guide holds NaN or infinity")
    return points


def _short(values: Array) -> list[float]:
    return [float(v) for v in np.asarray(values, np.float32)]
