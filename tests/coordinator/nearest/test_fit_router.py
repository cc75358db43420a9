"""What a run learns for newcomers: weights that fit, a line that few cross by mistake, and a guide that works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.nearest import fit_router
from coordinator.nearest.answer import answer_near
from coordinator.nearest.fit_router import (
    FALSE_BADS,
    FALSE_NONES,
    CenterMeasurement,
    fit_weights,
    learn_router,
    prediction_limit,
)
from coordinator.nearest.learn_from_replies import learn_from_replies, limits_from_tests
from edge_client.errors import Malformed
from edge_client.protocol import tensors
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.nearest.router import InputSketch, LocalRound
from edge_client.protocol.nearest.router_file import read_router, write_router
from edge_client.protocol.task import F64, Array, Reply
from tests.coordinator.nearest.test_answer import catalog, question
from tests.support.softmax_program import schema
from tests.support.virtual_federation import Federation


def looks(count: int = 40, *, n: int = 20, seed: int = 0, noise: float = 0.3) -> list[CenterMeasurement]:
    """Devices of three centers: their own is near by loss, nearly so by sketch, and entropy says nothing."""
    rng, out = np.random.default_rng(seed), []
    for device in range(count):
        own = device % 3
        far = np.where(np.arange(3) == own, 0.0, 1.0)
        distances = {
            "loss": 0.2 + far + noise * rng.random(3),
            "sketch": 0.1 + 0.5 * far + noise * rng.random(3),
            "entropy": rng.random(3),
        }
        out.append(CenterMeasurement(device=device, n=n, distances=distances, own_center=own))
    return out


def test_the_guide_finds_the_centers_of_devices_it_has_not_seen() -> None:
    guide = learn_router(looks(), sizes=[20], centers=3)
    others = looks(60, seed=1)
    for way in ("loss", "sketch", "labelled", "unlabelled"):
        beliefs = [guide.predict(way, look.distances, 20) for look in others]
        assert np.mean([b.best == look.own_center for b, look in zip(beliefs, others, strict=True)]) > 0.95
    refused = [guide.predict("loss", look.distances, 20).center is None for look in others]
    assert np.mean(refused) < 0.05  # 2 % is meant
    far = {name: np.asarray(d) + 5.0 for name, d in others[0].distances.items()}
    assert guide.predict("labelled", far, 20).center is None


def test_what_says_nothing_weighs_next_to_nothing() -> None:
    way = learn_router(looks(120), sizes=[20], centers=3).ways["unlabelled"]
    weight = dict(zip(way.features, way.weights[0], strict=True))
    assert weight["entropy"] < 0.1 * weight["sketch"]
    assert (way.weights >= 0).all()


def test_sizes_have_numbers_of_their_own() -> None:
    guide = learn_router(looks(n=1, noise=2.0) + looks(n=20), sizes=[1, 20], centers=3)
    assert guide.usual["loss"].spread[0] > guide.usual["loss"].spread[1]
    sure = [guide.predict("loss", {"loss": [0.4, 1.4, 1.4]}, n).probabilities[0] for n in (1, 20)]
    assert sure[0] < sure[1]


@pytest.mark.parametrize("centers", [1, 4])
def test_a_step_that_cannot_gain_enough_is_not_tried_and_no_weights_are_judged_twice(
    centers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit looks at its loss some 20 times more, at its end, if it tries each halving of a step that gains nothing."""
    rng, seen, loss = np.random.default_rng(0), list[F64](), fit_router._loss

    def noted(w: F64, z: Array, own: Array, held: float) -> tuple[float, F64, F64]:
        seen.append(w)
        return loss(w, z, own, held)

    monkeypatch.setattr(fit_router, "_loss", noted)
    fit_weights(rng.normal(size=(30, 2, centers)), rng.integers(centers, size=30))
    assert len({w.tobytes() for w in seen}) == len(seen) < 12


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 3))
def test_a_fit_is_where_no_small_step_is_better(seed: int, features: int) -> None:
    rng = np.random.default_rng(seed)
    z, own = rng.normal(size=(30, features, 4)), rng.integers(4, size=30)
    w = fit_weights(z, own)

    def value(at: np.ndarray) -> float:
        score = -np.einsum("f,rfk->rk", at, z)
        p = np.exp(score - score.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return float(-np.log(p[np.arange(30), own]).mean() + 1e-3 * at @ at)

    assert (w >= 0).all()
    for f in range(features):
        for step in (-1e-2, 1e-2):
            assert value(np.maximum(0, w + step * np.eye(features)[f])) >= value(w) - 1e-9


@pytest.mark.parametrize("devices", [5, 20, 50])
@pytest.mark.parametrize("share", [FALSE_NONES, FALSE_BADS])
def test_one_more_device_is_beyond_a_limit_about_as_often_as_meant(devices: int, share: float) -> None:
    rng = np.random.default_rng(devices)
    draws = np.exp(0.5 * rng.normal(size=(4000, devices + 1)))
    beyond = [one[-1] > prediction_limit(one[:-1], devices, share) for one in draws]
    # Four standard errors; the floor below the logarithm moves limits a little. The largest distance of a large fleet
    # is above the limit for none, which then rejects less.
    chance = 4 * np.sqrt(share / 4000) + 0.1 * share
    assert np.mean(beyond) < share + chance
    assert np.mean(beyond) > (share if share == FALSE_BADS else 0.5 * share) - chance


@given(st.lists(st.floats(0, 100), min_size=2, max_size=50))
def test_no_distance_of_the_fleets_own_devices_is_beyond_the_limit(distances: list[float]) -> None:
    assert max(distances) <= prediction_limit(np.array(distances), len(distances), FALSE_NONES)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=50))
def test_a_good_fit_is_never_further_than_a_bad_one(distances: list[float]) -> None:
    well, none = (prediction_limit(np.array(distances), len(distances), share) for share in (FALSE_BADS, FALSE_NONES))
    assert 0 <= np.median(distances) * 0.999 <= max(well, np.median(distances))
    assert well <= none


def test_one_device_says_nothing_about_the_next() -> None:
    guide = learn_router(looks(1), sizes=[20], centers=3)
    assert guide.fits({"loss": 1e6}, 20) == {}


@pytest.mark.parametrize("large", [1e17, np.inf, np.nan])
def test_a_feature_whose_numbers_a_guide_cannot_hold_is_left_out(large: float) -> None:
    """As the squared error of targets that nothing has scaled."""
    some = [replace(look, distances={**look.distances, "loss": np.full(3, large)}) for look in looks()]
    guide = read_router(write_router(learn_router(some, sizes=[20], centers=3)))
    assert "loss" not in guide.usual
    assert guide.ways["labelled"].features == ("entropy", "sketch")


@pytest.mark.parametrize("losses", [(-2.0, -1.5, -1.8, -1.6, -1.7, -1.9), (-2.0, 0.5, 0.1, 0.3, 0.2, 0.4)])
def test_losses_below_zero_make_a_guide_without_limits_of_the_loss(losses: tuple[float, ...]) -> None:
    replies = {f"d{i}": Reply(n=20, losses=np.array([loss, loss + 1])) for i, loss in enumerate(losses)}
    taught = learn_from_replies(replies, dict.fromkeys(replies, 0), centers=2, round=None, signed=True)
    tested = limits_from_tests(dict(zip("abcdef", losses, strict=True)), samples=20, centers=2, signed=True)
    for guide in (taught, tested):
        read = read_router(write_router(guide))
        assert read.fits({"loss": 0.3}, 20) == {}
        assert read.usual["loss"].middle[0] == pytest.approx(np.median(losses))
    found = taught.predict("loss", {"loss": [-0.7, -1.9]}, 20)
    assert found.best == 1


def test_limits_of_three_devices_alike_refuse_nobody_and_say_on_how_many_they_rest() -> None:
    three = limits_from_tests({"a": 0.2, "b": 0.2, "c": 0.21}, samples=20, centers=2)
    assert three.devices_behind({"loss": 0.0}, 20) == {"loss": 2}  # equal figures come from equal samples
    for loss, center in ((0.21, 0), (0.4, 0), (2.5, None)):  # the last one is worse than guessing
        answer = answer_near(catalog(), question([loss, 3.0, 3.0], n=20), schema(), three)
        assert answer["center"] == center
        assert ("fit" in answer) == (center is None)
    five = limits_from_tests(dict(zip("abcde", (0.2, 0.22, 0.21, 0.19, 0.23), strict=True)), samples=20, centers=2)
    assert five.devices_behind({"loss": 0.0}, 20) == {"loss": 5}
    assert five.fits({"loss": 1.5}, 20) == {"loss": "none"}


def test_a_number_of_samples_between_two_sizes_rests_on_the_devices_of_both() -> None:
    both = [*looks(9, n=5), *looks(7, n=20)]
    guide = learn_router(both, sizes=[5, 20], centers=3)
    assert [guide.devices_behind({"loss": 0.0}, n)["loss"] for n in (1, 5, 9, 20, 99)] == [9, 9, 7, 7, 7]
    assert read_router(write_router(guide)).usual["loss"].devices == [9, 7]


def test_fewer_samples_than_any_device_had_scatter_more() -> None:
    guide = learn_router(looks(), sizes=[20], centers=3)
    just_too_far = 1.01 * guide.usual["loss"].none[0]
    assert guide.fits({"loss": just_too_far}, 20) == {"loss": "none"}
    assert guide.fits({"loss": just_too_far}, 5) != {"loss": "none"}


def test_votes_do_not_tell_whether_a_center_fits() -> None:
    voted = [replace(look, distances={"votes": look.distances["loss"] / 3}) for look in looks()]
    guide = learn_router(voted, sizes=[20], centers=3)
    assert guide.fits({"votes": 1.0}, 20) == {}
    assert guide.predict("votes", {"votes": [0.8, 1.0, 1.0]}, 20).fit is None


# -- what a coordinator answers with it

GUIDE = learn_router(
    looks()
    + [
        CenterMeasurement(device=i, n=20, distances={"round": np.where(np.arange(3) == i, 0.1, 1)}, own_center=i)
        for i in range(3)
    ],
    sizes=[20],
    centers=3,
    sketch=InputSketch(seed=1, width=1.0, centers=np.eye(3)),
    round=LocalRound(representation="all", lr=0.1, momentum=0.0, batch=4, steps=2, centers=np.eye(3)),
)


def sketched(point: list[float], how: str = "sketch") -> dict[str, object]:
    numbers = {"sketch": np.array(point, np.float32)}
    data = tensors.pack_tensors(numbers, kind="sketch", codec="f32", schema=schema().sha256)
    manifest = manifest_of(data, "sketch", inline=True)
    return {"how": how, "sketch": manifest.to_json(), "n": 20}


def test_a_sketch_is_answered_with_how_it_fits() -> None:
    answer = answer_near(catalog(), sketched([0.0, 1.0, 0.0]), schema(), GUIDE)
    assert answer["center"] == 1
    assert answer["fit"] == "well"
    assert answer_near(catalog(), sketched([9.0, 9.0, 9.0]), schema(), GUIDE)["center"] is None
    assert answer_near(catalog(), sketched([0.0, 0.0, 1.0], "round"), schema(), GUIDE)["alternatives"]


def test_losses_of_some_centers_are_an_answer_about_these() -> None:
    answer = answer_near(catalog(), question([0.3, 1.0], centers=[2, 0]), schema(), GUIDE)
    assert answer["center"] == 2
    assert [a["center"] for a in answer["alternatives"]] == [0]
    assert "fit" not in answer_near(catalog(), question([0.3, 1.0], centers=[2, 0]), schema())


def test_a_loss_above_that_of_guessing_fits_no_center_whatever_the_guide_says() -> None:
    lenient = learn_router(looks(noise=20.0), sizes=[20], centers=3)
    assert lenient.fits({"loss": 5.0}, 20) == {"loss": "well"}
    answer = answer_near(catalog(), question([5.0, 9.0, 9.0]), schema(), lenient)
    assert (answer["center"], answer["fit"]) == (None, "none")


def test_losses_of_the_last_test_limit_the_loss_and_teach_nothing_else() -> None:
    guide = limits_from_tests({"a": 0.2, "b": 0.3, "c": 0.25, "d": 0.22, "e": 0.21}, samples=20, centers=3)
    assert read_router(write_router(guide)).ways == {}
    for loss, center, fit in ((0.2, 0, "well"), (1.9, None, "none"), (2.5, None, "none")):
        answer = answer_near(catalog(), question([loss, 3.0, 3.0], n=20), schema(), guide)
        assert (answer["center"], answer["fit"]) == (center, fit)


@pytest.mark.parametrize("centers", [[0, 0], [0, 3], [0]])
def test_losses_that_name_no_such_centers_are_refused(centers: list[int]) -> None:
    with pytest.raises(Malformed):
        answer_near(catalog(), question([0.3, 1.0], centers=centers), schema(), GUIDE)


def test_what_the_run_taught_nothing_about_is_refused() -> None:
    with pytest.raises(Malformed, match="ask by loss"):
        answer_near(catalog(), sketched([0.0, 1.0, 0.0]), schema())
    with pytest.raises(Malformed, match="2 numbers"):
        answer_near(catalog(), sketched([0.0, 1.0]), schema(), GUIDE)


# -- over a whole federation


def test_a_fleet_teaches_newcomers_only_where_that_is_wanted(tmp_path: Path) -> None:
    routers = {}
    for wanted in (False, True):
        fed = Federation.of(tmp_path / str(wanted), teach_newcomers=wanted)
        fed.start_coordinator()
        fed.start_devices(4)
        fed.finish()
        catalog = fed.catalog
        assert catalog is not None
        routers[wanted] = catalog.router
        fed.world.end()
    guides = {}
    for wanted, router in routers.items():
        assert router is not None
        blobs = tmp_path / str(wanted) / "run" / "store" / "blobs"
        guides[wanted] = read_router((blobs / router.sha256).read_bytes())
    plain, guide = guides[False], guides[True]
    assert (set(plain.ways), set(plain.usual)) == (
        set(),
        {"loss"},
    )  # from the last test, which devices have sent anyway
    assert (plain.inputs, plain.round, plain.sketch) == (None, None, None)
    assert set(guide.ways) == {"loss", "entropy", "labelled"}
    assert guide.inputs is not None
    assert guide.answers is not None
    assert set(guide.usual) == {"loss", "entropy", "inputs", "answers"}
    assert guide.sketch is None
    assert guide.round is not None
    np.testing.assert_allclose(np.linalg.norm(guide.round.centers, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("loss", [1e300, 1e9, 0.0])
def test_no_loss_that_a_device_reports_keeps_the_guide_from_being_written(loss: float) -> None:
    losses = {"a": 0.2, "b": 0.3, "c": 0.25, "liar": loss}
    assert read_router(write_router(limits_from_tests(losses, samples=20, centers=3))).centers == 3
    replies = {c: Reply(n=20, losses=np.array([at, at + 1])) for c, at in losses.items()}
    taught = learn_from_replies(replies, dict.fromkeys(losses, 0), centers=2, round=None)
    assert read_router(write_router(taught)).centers == 2
