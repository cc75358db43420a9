"""A guide turns distances into belief: more belief for less distance, none for what is too far, and bytes that last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol.nearest import sketch
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import (
    FeatureBaseline,
    FeatureRule,
    RouterPrediction,
    joint_fit,
    worst_fit,
)
from tests.support.router_guides import FEW, GUIDE, K
from tests.support.softmax_program import schema

losses = st.lists(st.floats(0, 10), min_size=K, max_size=K)


@given(losses, st.integers(1, 1000))
def test_belief_sums_to_one_and_grows_as_the_distance_shrinks(loss: list[float], n: int) -> None:
    belief = GUIDE.predict("loss", {"loss": loss}, n)
    assert belief.probabilities.sum() == pytest.approx(1)
    assert (np.diff(belief.probabilities[np.argsort(loss)]) <= 1e-12).all()
    assert belief.best == int(np.argmin(loss)) or belief.probabilities[belief.best] == pytest.approx(
        belief.probabilities[int(np.argmin(loss))]
    )


@given(losses, st.permutations(range(K)))
def test_the_names_of_centers_change_nothing(loss: list[float], order: list[int]) -> None:
    shares = GUIDE.predict("loss", {"loss": loss}, 4).probabilities
    renamed = GUIDE.predict("loss", {"loss": np.array(loss)[order]}, 4).probabilities
    np.testing.assert_allclose(renamed, shares[order], atol=1e-12)


@pytest.mark.parametrize(("loss", "fit"), [(0.74, "well"), (0.76, "badly"), (1.24, "badly"), (1.26, "none")])
def test_a_fit_is_told_by_two_limits(loss: float, fit: str) -> None:
    belief = GUIDE.predict("loss", {"loss": [loss, 9, 9]}, 16)
    assert (belief.fit, belief.best) == (fit, 0)
    assert belief.center == (None if fit == "none" else 0)


def test_one_strange_feature_of_several_is_enough() -> None:
    assert GUIDE.predict("labelled", {"loss": [0.5, 3, 3], "sketch": [1.0, 2, 2]}, 16).center == 0
    assert joint_fit({"loss": "well", "entropy": "well", "inputs": "none"}) == "none"
    assert joint_fit({"loss": "well", "entropy": "badly"}) == "badly"


@pytest.mark.parametrize("mixed", ["sketch", "norms", "round"])
def test_what_follows_the_frequency_of_classes_refuses_nothing_that_all_else_accepts(mixed: str) -> None:
    far = {mixed: "none"}
    assert joint_fit({"loss": "well", "inputs": "badly", **far}) == "badly"
    assert joint_fit({"loss": "none", **far}) == "none"
    assert joint_fit({"entropy": "well", "inputs": "well", **far}) is None  # few classes, or a stranger: not known
    assert joint_fit({"entropy": "well", "inputs": "none", **far}) == "none"
    assert joint_fit({"entropy": "well", mixed: "badly"}) == "badly"
    assert joint_fit(far) == "none"  # alone it is all that is known
    assert joint_fit({}) is None


def test_a_device_of_few_classes_is_accepted_for_its_loss() -> None:
    belief = GUIDE.predict("labelled", {"loss": [0.5, 3, 3], "sketch": [9.0, 10, 10]}, 16)
    assert (belief.center, belief.fit) == (0, "well")


def test_between_two_sizes_numbers_are_read_on_a_logarithmic_scale() -> None:
    limit = (2.5 + 1.25) / 2  # 4 samples are half way from 1 to 16
    assert GUIDE.predict("loss", {"loss": [limit - 1e-6, 9, 9]}, 4).fit == "badly"
    assert GUIDE.predict("loss", {"loss": [limit + 1e-6, 9, 9]}, 4).fit == "none"
    assert GUIDE.predict("loss", {"loss": [1.26, 9, 9]}, 10**6).fit == "none"


def test_what_was_not_looked_at_is_not_believed_in() -> None:
    belief = GUIDE.predict("labelled", {"loss": [np.inf, 0.5, 0.6], "sketch": [0.1, 1.0, 1.0]}, 16)
    assert belief.probabilities[0] == 0
    assert belief.best == 1
    assert GUIDE.predict("labelled", {"sketch": [0.1, 1.0, 1.0]}, 16).best == 0


def test_candidates_are_the_fewest_that_hold_the_belief() -> None:
    sure = GUIDE.predict("loss", {"loss": [0.0, 9.0, 9.0]}, 16)
    assert sure.candidates(3, 0.99) == [0]
    unsure = GUIDE.predict("loss", {"loss": [1.0, 1.0, 1.0]}, 16)
    assert unsure.candidates(3, 0.99) == [0, 1, 2]
    assert unsure.candidates(2, 0.99) == [0, 1]


@pytest.mark.parametrize(
    ("way", "distances"),
    [
        ("loss", {"loss": [1.0]}),
        ("loss", {"loss": [1.0, 2.0, float("nan")]}),
        ("loss", {"loss": [float("inf")] * K}),
        ("loss", {"sketch": [1.0] * K}),
        ("entropy", {"entropy": [1.0] * K}),
    ],
)
def test_what_cannot_be_weighed_is_refused(way: str, distances: dict[str, list[float]]) -> None:
    with pytest.raises(Malformed):
        GUIDE.predict(way, distances, 4)


# -- sketches


def test_inputs_that_are_alike_have_sketches_that_are_alike() -> None:
    rng = np.random.default_rng(0)
    here, there = rng.normal(size=(2, 400, 6)), rng.normal(1.0, size=(400, 6))
    one, other, far = (sketch.random_features(x, seed=1, size=256, width=3.0) for x in (*here, there))
    assert np.square(one - other).mean() < 0.1 * np.square(one - far).mean()


def test_a_sketch_is_a_mean_over_samples() -> None:
    x = np.random.default_rng(0).normal(size=(8, 3, 2))
    whole, left, right = (sketch.random_features(part, seed=1, size=16, width=1.0) for part in (x, x[:4], x[4:]))
    np.testing.assert_allclose(whole, (left + right) / 2, atol=1e-12)


def test_wide_inputs_are_folded_and_keep_their_distances() -> None:
    x = np.random.default_rng(0).normal(size=(2, 5_000))
    folded = sketch.count_sketch(x, sketch.MAX_INPUT_WIDTH)
    apart, after = (np.linalg.norm(v[0] - v[1]) for v in (x, folded))
    assert after == pytest.approx(apart, rel=0.1)  # a count sketch of 1,024 errs by about 1 / sqrt(1,024)
    assert sketch.random_features(x, seed=1, size=8, width=70.0).shape == (8,)


def test_a_direction_has_length_one_and_forgets_how_far() -> None:
    delta = np.random.default_rng(0).normal(size=schema().size)
    one, twice = (sketch.update_direction(scale * delta, schema(), "all") for scale in (1.0, 2.0))
    assert np.linalg.norm(one) == pytest.approx(1)
    np.testing.assert_allclose(one, twice)
    assert not sketch.update_direction(0 * delta, schema(), "all").any()


# -- trees

FOUR = CenterTree(((0, 1), (0, ~0), (1, ~1), (1, 2), (2, ~2), (2, ~3)), 4)


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4, unique=True))
def test_a_walk_follows_the_nearer_child_to_a_center(values: list[float]) -> None:
    def far(children: object) -> np.ndarray:
        below = {1: min(values[1:]), 2: min(values[2:]), **{~k: values[k] for k in range(4)}}
        return np.array([below[node] for node in children])  # type: ignore[attr-defined]  # node numbers

    assert FOUR.walk(far) == int(np.argmin(values))
    assert CenterTree.from_json(FOUR.to_json(), 4) == FOUR


@pytest.mark.parametrize(
    "edges",
    [
        ((0, 1), (0, ~0)),
        ((0, ~0), (0, ~0)),
        ((0, ~0), (0, ~2)),
        ((0, 1), (1, 0), (0, ~0), (1, ~1)),
        ((1, ~0), (1, ~1)),
        ((0, 0), (0, ~0), (0, ~1)),
        ((0, ~0), (0, ~1), (1, 2), (2, 1)),  # a loop that no walk enters
        ((0, ~0), (0, ~1), (0, ~1)),  # two ways to one center
        ((0, ~0), (0, 2), (2, ~1)),  # no split 1
    ],
)
def test_what_is_no_tree_is_refused(edges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(Malformed):
        CenterTree(edges, 2)


@pytest.mark.parametrize("branch", [[0], [0, -1, -1]])
def test_a_branch_of_a_tree_has_a_start_and_an_end(branch: list[int]) -> None:
    with pytest.raises(Malformed):
        CenterTree.from_json([branch, [0, -2]], 2)


@pytest.mark.parametrize("splits", [1024, 1025])
def test_a_tree_has_at_most_1024_splits(splits: int) -> None:
    chain = [[k, k + 1] for k in range(splits - 1)] + [[splits - 1, ~0], [splits - 1, ~1]]
    if splits == 1024:
        assert CenterTree.from_json(chain, 2).splits == splits
    else:
        with pytest.raises(Malformed, match="an integer from -1024 to 1023"):
            CenterTree.from_json(chain, 2)


def test_the_typical_distance_is_the_median_of_devices_that_trained_read_between_the_sizes() -> None:
    assert [GUIDE.typical("loss", n) for n in (1, 4, 16, 99)] == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert GUIDE.typical("inputs", 4) is None


# -- to the last sample


def test_fewer_samples_than_any_device_had_scatter_more() -> None:
    """By the root of the ratio: a quarter of the samples squares the ratio to the middle."""
    assert FEW.limits("loss", 4) == pytest.approx((2.0, 3.0))
    assert FEW.limits("loss", 1) == pytest.approx((4.0, 9.0))
    assert FEW.limits("loss", 0) == pytest.approx((4.0, 9.0))
    assert FEW.limits("loss", 99) == pytest.approx((2.0, 3.0))
    never = replace(FEW, usual={"loss": replace(FEW.usual["loss"], middle=np.zeros(2), well=np.zeros(2))})
    assert never.limits("loss", 4) == pytest.approx((1e-12, 3.0))  # no logarithm of 0


def test_a_device_with_far_fewer_samples_than_the_fleet_has_limits_beyond_every_number() -> None:
    """A ratio of 1e8 to the root of 2,000: `none` of one sample, which ended the coordinator in an OverflowError."""
    tight = FeatureBaseline(middle=np.array([1e-9]), spread=np.ones(1), well=np.array([0.1]), none=np.array([0.5]))
    guide = replace(FEW, sizes=(2000,), usual={"loss": tight})
    assert guide.limits("loss", 1) == (np.inf, np.inf)
    assert guide.limits("loss", 2000) == pytest.approx((0.1, 0.5))
    assert guide.fits({"loss": 3.0}, 1) == {"loss": "well"}


@pytest.mark.parametrize(("n", "devices"), [(1, 4), (4, 4), (5, 4), (15, 4), (16, 9), (99, 9)])
def test_a_limit_rests_on_the_fewest_devices_of_the_sizes_that_it_is_read_between(n: int, devices: int) -> None:
    assert FEW.devices_behind(["loss", "votes", "unknown"], n) == {"loss": devices}
    assert FEW.fits({"loss": 2.5, "votes": 0.5}, n) == ({} if devices < 5 else {"loss": "badly"})
    assert FEW.fit_of("loss", n)(2.5) == (None if devices < 5 else "badly")


def test_five_devices_are_evidence_and_a_guide_that_does_not_say_how_many_is_believed() -> None:
    for count, told in (([4, 4], {}), ([5, 5], {"loss": "well"}), (None, {"loss": "well"})):
        guide = replace(FEW, usual={"loss": replace(FEW.usual["loss"], devices=count)})
        assert guide.fits({"loss": 2.0}, 16) == told
    assert [FEW.fit_of("loss", 16)(d) for d in (2.0, 2.0001, 3.0, 3.0001)] == ["well", "badly", "badly", "none"]


def test_belief_is_the_soft_minimum_of_the_weighed_distances() -> None:
    loss, far = np.array([0.2, 0.5, 1.0]), np.array([1.0, 0.5, 2.0])
    weighed = np.exp(-(1.0 * loss / 0.5 + 0.5 * far / 1.0))  # of one sample
    guide = replace(GUIDE, ways={"both": FeatureRule(features=("loss", "sketch"), weights=np.array([[1.0, 0.5]] * 2))})
    found = guide.predict("both", {"loss": loss, "sketch": far}, 1).probabilities
    np.testing.assert_allclose(found, weighed / weighed.sum())
    assert guide.predict("both", {"loss": loss, "unknown": [0.0]}, 1).fit == "well"  # no device learned that one


def test_candidates_are_counted_to_the_share_of_belief() -> None:
    half = RouterPrediction(probabilities=np.array([0.25, 0.5, 0.25]), fit=None)
    found = [half.candidates(3, belief) for belief in (0.5, 0.51, 0.75, 0.76, 1.0)]
    assert found == [[1], [1, 0], [1, 0], [1, 0, 2], [1, 0, 2]]
    assert (half.center, half.best) == (1, 1)
    assert replace(half, fit="none").center is None
    assert (worst_fit(["badly", "well"]), worst_fit(["well", "none"]), worst_fit([])) == ("badly", "none", None)
