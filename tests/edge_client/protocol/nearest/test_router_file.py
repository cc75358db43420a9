"""A guide's file gives back what went in, and is refused beyond its limits."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.nearest.fleet_profiles import make_profile
from edge_client.errors import Malformed
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.nearest.answer_moments import AnswerProfile
from edge_client.protocol.nearest.input_moments import moments_of
from edge_client.protocol.nearest.router_file import read_router, write_router
from tests.support.router_guides import FEW, GUIDE, K


def test_a_guide_is_read_back_as_it_was() -> None:
    data = write_router(GUIDE)
    assert write_router(read_router(data)) == data
    read = read_router(data)
    assert read.sketch is not None
    np.testing.assert_array_equal(read.sketch.centers, GUIDE.sketch.centers if GUIDE.sketch else None)
    assert read.round is not None
    assert (read.round.representation, read.round.steps) == ("classifier", 3)
    assert read.inputs is not None
    moments = moments_of(np.random.default_rng(1).normal(size=(9, 5)))
    assert read.inputs.distance(moments) == pytest.approx(
        GUIDE.inputs.distance(moments) if GUIDE.inputs else 0, rel=1e-5
    )


RAW = parse_json(write_router(GUIDE), 1 << 20)


@pytest.mark.parametrize(
    "changed",
    [
        {"v": 1},
        {"centers": 0},
        {"centers": 2},
        {"sizes": [16, 1]},
        {"sizes": [1]},
        {"usual": {}},
        {"usual": {**RAW["usual"], "loss": {**RAW["usual"]["loss"], "spread": [0.0, 1.0]}}},
        {"usual": {**RAW["usual"], "loss": {**RAW["usual"]["loss"], "well": [9.0, 9.0]}}},
        {"ways": {"loss": {"features": ["loss"], "weights": [[1.0]]}}},
        {"ways": {"loss": {"features": ["loss"], "weights": [[-1.0], [1.0]]}}},
        {"ways": {"loss": {"features": ["loss", "loss"], "weights": [[1.0, 1.0]] * 2}}},
        {"ways": {"loss": {"features": ["luck"], "weights": [[1.0]] * 2}}},
        {"inputs": {**RAW["inputs"], "features": 7}},
        {"inputs": {**RAW["inputs"], "profile": "%"}},
        {"sketch": {**RAW["sketch"], "size": 4_096}},
        {"sketch": {**RAW["sketch"], "centers": "%"}},
        {"sketch": {"size": 2, "centers": RAW["sketch"]["centers"]}},
        {"sketch": {**RAW["sketch"], "width": 0}},
        {"round": {**RAW["round"], "steps": 0}},
    ],
)
def test_a_guide_that_breaks_a_rule_is_malformed(changed: dict[str, object]) -> None:
    with pytest.raises(Malformed):
        read_router(canonical_json({**RAW, **changed}))


def points_of(**changes: object) -> dict[str, object]:
    return {**RAW["sketch"], **changes}


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"sizes": [1, 2**31]}, None),
        ({"sizes": [1, 2**31 + 1]}, "bad_field"),
        ({"sizes": [0, 16]}, "bad_field"),
        ({"sizes": [16, 16]}, "bad_field"),
        ({"usual": {**RAW["usual"], "loss": {**RAW["usual"]["loss"], "spread": [1e-12, 1.0]}}}, None),
        ({"usual": {**RAW["usual"], "loss": {**RAW["usual"]["loss"], "spread": [0.9e-12, 1.0]}}}, "bad_field"),
        ({"usual": {**RAW["usual"], "loss": {**RAW["usual"]["loss"], "well": [2.5, 1.25]}}}, None),
        ({"usual": {**RAW["usual"], "loss": {**RAW["usual"]["loss"], "well": [2.5, 1.26]}}}, "bad_field"),
        ({"usual": {**RAW["usual"], "loss": {**RAW["usual"]["loss"], "devices": [0, 3]}}}, None),
        ({"usual": {**RAW["usual"], "loss": {**RAW["usual"]["loss"], "devices": [3]}}}, "bad_field"),
        ({"usual": {**RAW["usual"], "loss": {**RAW["usual"]["loss"], "none": [9.0] * 3}}}, "bad_field"),
        ({"usual": {**RAW["usual"], "luck": RAW["usual"]["loss"]}}, "bad_field"),
        ({"ways": {"loss": {"features": ["loss"], "weights": [[0.0], [0.0]]}}}, None),
        ({"ways": {"loss": {"features": ["loss"], "weights": [[1.0], [1.0, 1.0]]}}}, "bad_field"),
        ({"ways": {"loss": {"features": ["entropy"], "weights": [[1.0]] * 2}}}, "bad_field"),  # without a baseline
        ({"ways": {"a" * 17: {"features": ["loss"], "weights": [[1.0]] * 2}}}, "bad_field"),
        ({"sketch": None, "round": None, "inputs": None, "answers": None}, None),
        ({"sketch": points_of(width=1e-12)}, None),
        ({"sketch": points_of(seed=-1)}, "bad_field"),
        ({"sketch": points_of(size=0)}, "bad_field"),
        ({"sketch": points_of(size=1, centers=base64.b64encode(bytes(12)).decode())}, None),
        ({"sketch": points_of(centers="AAAAAA==")}, "bad_field"),
        ({"sketch": points_of(centers=base64.b64encode(np.full(6, np.nan, "<f4").tobytes()).decode())}, "not_finite"),
        ({"sketch": {k: v for k, v in RAW["sketch"].items() if k != "seed"}}, "bad_field"),
        ({"round": {**RAW["round"], "momentum": 1.0, "batch": 65_536, "steps": 1_000_000}}, None),
        ({"round": {**RAW["round"], "momentum": 1.01}}, "bad_field"),
        ({"round": {**RAW["round"], "batch": 65_537}}, "bad_field"),
        ({"round": {**RAW["round"], "batch": 0}}, "bad_field"),
        ({"round": {**RAW["round"], "steps": 1_000_001}}, "bad_field"),
        ({"round": {**RAW["round"], "lr": -0.1}}, "bad_field"),
        ({"inputs": {**RAW["inputs"], "features": 0}}, "bad_field"),
        ({"inputs": {"features": 1, "profile": "A" * 4_000_000}}, "too_big"),
        ({"answers": {"classes": 2, "profiles": "A" * 4_000_000}}, "too_big"),
        (
            {"inputs": {"features": 1, "profile": base64.b64encode(np.array([0, 0, 1], "<f4").tobytes()).decode()}},
            "bad_field",
        ),
        ({"inputs": {"features": 1, "profile": base64.b64encode(np.array([0, 1, 1], "<f4").tobytes()).decode()}}, None),
    ],
)
def test_a_guide_is_read_up_to_its_limits_and_refused_beyond(changed: dict[str, object], code: str | None) -> None:
    data = canonical_json({**RAW, **changed})
    if code is None:
        assert read_router(data).centers == K
        return
    with pytest.raises(Malformed) as refused:
        read_router(data)
    assert refused.value.code == code


def test_the_most_features_and_classes_of_a_guide_fit_into_it() -> None:
    most = make_profile([moments_of(np.random.default_rng(0).normal(size=(90, 4, 4, 4, 4)))])
    assert len(most.mean) == 68
    rng = np.random.default_rng(1)
    answers = [AnswerProfile(means=rng.normal(size=(32, 32)), precision=np.eye(32)) for _ in range(K)]
    read = read_router(write_router(replace(GUIDE, inputs=most, answers=answers)))
    assert read.inputs is not None
    assert read.answers is not None
    np.testing.assert_allclose(read.inputs.precision, most.precision, rtol=1e-6)
    np.testing.assert_allclose(read.inputs.spread, most.spread, rtol=1e-6)
    for mine, theirs in zip(read.answers, answers, strict=True):
        np.testing.assert_allclose(mine.means, theirs.means, rtol=1e-6)
        np.testing.assert_array_equal(mine.precision, theirs.precision)
    assert read_router(write_router(FEW)).usual["loss"].devices == [4, 9]


@pytest.mark.parametrize(("version", "hint"), [(1, "publishes again"), (4, "install the version")])
def test_a_guide_of_another_version_is_refused_with_what_to_do_whatever_its_fields(version: int, hint: str) -> None:
    with pytest.raises(Malformed, match=f"guide version {version}; this side reads 3") as refused:
        read_router(canonical_json({"v": version, "centers": 2}))
    assert hint in refused.value.hint


def test_numbers_in_another_spelling_of_base64_are_refused() -> None:
    recorded = json.loads((Path(__file__).parents[3] / "golden" / "vectors.json").read_text(encoding="utf-8"))
    guide = recorded["spelled"]["guide"].encode()
    assert guide.count(b"QA==") == 1
    with pytest.raises(Malformed, match=r"^bad_field: "):
        read_router(guide.replace(b"QA==", b"QB=="))
