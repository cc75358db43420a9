"""Sums of devices that keep to the task are possible, whatever they learned; garbage and lies are not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregation.possible_sums import why_impossible
from coordinator.aggregation.summed_centers import centers_of_sums
from edge_client.protocol.summed_task import SCORE_LEVELS, SummedFit, SummedProbe, SumScale, Words
from edge_client.protocol.task import Array
from edge_client.training.summed import TrainedChoice, contribution

SIZE, K, SIGMA = 40, 3, 0.01
CENTERS = np.random.default_rng(0).standard_normal((K, SIZE)).astype(np.float32)


def task(stage: str, devices: int, *, bits: int = 32, noise: float = 0.0, seed: int = 0, **more: Any) -> SummedFit:  # noqa: ANN401
    scale = SumScale(bits=bits, devices=devices, clip=1.0, noise=noise)
    told: dict[str, Any] = {"choose": "loss", "open": (0, 1, 2), "centers": CENTERS, "stage": stage, "scale": scale}
    return SummedFit(start=CENTERS[0], steps=1, lr=0.1, batch=1, seed=seed, **(told | more))


def summed(rng: np.random.Generator, devices: int, far: float, **how: Any) -> tuple[list[SummedFit], Words]:  # noqa: ANN401
    """The tasks and the sum of the words of devices that moved `far` from their centers."""
    total: Words = np.zeros(0, np.uint32)
    tasks = list[SummedFit]()
    soft = how.get("choose") in ("shares", "posterior")
    for i in range(devices):
        share = float(rng.uniform(0.01, 1.0))
        asked = task(**({"sigma": SIGMA} | how), devices=devices, seed=i, share=share)
        tasks.append(asked)
        k = int(rng.integers(K))
        models = CENTERS[:: 1 if soft else K] + far * rng.standard_normal((K if soft else 1, SIZE))
        weights: Array = np.maximum(rng.dirichlet(np.ones(K)), SIGMA) if soft else np.eye(K)[k]
        order = None if soft else np.argsort(-weights, kind="stable")
        mine = TrainedChoice(models=models, weights=weights, order=order)
        words = contribution(asked, mine, rng).words
        assert words is not None
        total = total + words.astype(np.uint32) if total.size else words.astype(np.uint32)
    return tasks, np.asarray(total & np.uint32(2**asked.scale.bits - 1))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["choose", "add", "count", "points"]),
    st.sampled_from(["loss", "shares", "posterior"]),
    st.integers(5, 40),
    st.sampled_from([16, 24, 32]),
    st.tuples(st.sampled_from([0.0, 0.2, 2.0]), st.sampled_from([0.0, 0.01, 100.0])),
    st.integers(0, 2**31),
)
def test_the_sum_of_devices_that_keep_to_the_task_is_possible(
    stage: str, choose: str, devices: int, bits: int, moved: tuple[float, float], seed: int
) -> None:
    noise, far = moved
    rng, how = np.random.default_rng(seed), dict[str, Any](choose=choose, bits=bits)
    if stage in ("count", "points"):
        points = rng.standard_normal((2, K, 4))
        how |= {"compare": ((0, 4),), "points": points, "points_open": np.ones((2, K), np.bool_), "choose": "loss"}
    elif stage == "add":
        how["noise"] = noise if bits == 32 else 0.0
    assert why_impossible(*summed(rng, devices, far, stage=stage, **how)) is None


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_garbage_words_of_one_device_make_the_sum_impossible(rng: np.random.Generator) -> None:
    for stage in ("choose", "add"):
        asked, words = summed(rng, 20, 0.01, stage=stage)
        garbage = words + rng.integers(0, 2**32, len(words), np.uint32)
        reason = why_impossible(asked, garbage)
        assert reason is not None
        assert "at least one of 20 devices did not keep to its task" in reason


@pytest.mark.parametrize("extra", [1, 5, -1])
def test_a_count_that_lies_is_told(rng: np.random.Generator, extra: int) -> None:
    for stage in ("choose", "add"):
        asked, words = summed(rng, 20, 0.01, stage=stage)
        words[-1:] += np.uint32(extra % 2**32)
        assert "devices are counted" in (why_impossible(asked, words) or "")


@pytest.mark.parametrize("place", [0, 2, SIZE - 1])
def test_a_center_cannot_be_moved_further_than_the_weights_allow(rng: np.random.Generator, place: int) -> None:
    asked, words = summed(rng, 20, 0.01, stage="add")
    words[place : place + 1] += np.uint32(21 * asked[0].scale.levels)
    assert "times as long as the weights allow" in (why_impossible(asked, words) or "")


@pytest.mark.parametrize(("bits", "noise", "least"), [(32, 0.0, 1e6), (32, 0.2, 1e7), (24, 0.2, 1e4), (16, 0.0, 10)])
@pytest.mark.parametrize("choose", ["loss", "posterior"])
def test_a_weight_by_which_one_device_cancels_the_others_moves_a_center_far_and_is_told(
    rng: np.random.Generator, bits: int, noise: float, least: float, choose: str
) -> None:
    """The differences are those of honest devices, and where noise or rounding is long they tell nothing."""
    asked, words = summed(rng, 20, 0.01, stage="add", bits=bits, noise=noise, choose=choose)
    assert why_impossible(asked, words) is None
    words[SIZE] = 1
    moved, _ = centers_of_sums(CENTERS, words, asked[0].scale, asked[0].open)
    assert np.linalg.norm(moved[0] - CENTERS[0]) > least * asked[0].scale.clip
    assert "the weights are" in (why_impossible(asked, words) or "")


def test_a_weight_that_one_device_moves_to_another_center_is_told(rng: np.random.Generator) -> None:
    asked, words = summed(rng, 20, 0.01, stage="add")
    blocks = asked[0].scale.signed(words).reshape(K, -1)
    blocks[:2, SIZE] += (1 - blocks[0, SIZE]) * np.array([1, -1])
    assert "the weights are" in (why_impossible(asked, asked[0].scale.modulo(blocks.ravel())) or "")


def test_an_evaluation_counts_each_device_once_and_no_score_above_one() -> None:
    asked = SummedProbe(
        models=[CENTERS[0]], want=frozenset({"confusion"}), split="test", batch=8, seed=0, served="asked", usual=0,
        scale=SumScale(bits=32, devices=6, clip=1.0),
    )  # fmt: skip
    right = np.array([10, 12, 5 * SCORE_LEVELS, 6 * SCORE_LEVELS, 6], dtype=np.uint32)
    for possible in (right, np.array([12, 12, 0, 0, 6]), np.array([0, 6, 0, 0, 6])):
        assert why_impossible([asked] * 6, possible.astype(np.uint32)) is None
    for place, value in ((4, 5), (4, 7), (3, 6 * SCORE_LEVELS + 1), (2, 2**32 - 1), (0, 13), (0, 2**32 - 1)):
        wrong = right.copy()
        wrong[place] = value
        assert why_impossible([asked] * 6, wrong)


@pytest.mark.parametrize("samples", [0, 5, -1])
def test_an_evaluation_of_fewer_samples_than_devices_is_told(samples: int) -> None:
    """One device subtracts what the others have: 0 of 0 samples would be an accuracy that is no number."""
    asked = SummedProbe(
        models=[CENTERS[0]], want=frozenset({"confusion"}), split="test", batch=8, seed=0, served="asked", usual=0,
        scale=SumScale(bits=32, devices=6, clip=1.0),
    )  # fmt: skip
    words = asked.scale.modulo(np.array([0, samples, 0, 0, 6]))
    assert f"{samples} samples are counted" in (why_impossible([asked] * 6, words) or "")


def blocks(*rows: tuple[int, int, int, int]) -> tuple[SummedFit, Words]:
    """The sums of a task of 16 devices at most, with two parameters: of each center the two, the weight, the count."""
    asked = task("add", 16, centers=CENTERS[:, :2], open=tuple(range(len(rows))))
    return asked, asked.scale.modulo(np.array(rows).ravel())


LEVELS = blocks((0, 0, 0, 0))[0].scale.levels


TENTH = LEVELS // 10
HALF = LEVELS // 2  # the weight of a device with the share 1/2, or one more


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (((0, 0, 6 * LEVELS, 8), (0, 0, 0, 0)), "the weights are"),  # of eight devices two have half a share
        (((0, 0, 6 * LEVELS + 2 * HALF, 8), (0, 0, 0, 0)), ""),
        (((0, 0, 6 * LEVELS + 2 * HALF + 8, 8), (0, 0, 0, 0)), ""),  # each rounded up
        (((0, 0, 6 * LEVELS + 2 * HALF + 9, 8), (0, 0, 0, 0)), "the weights are"),
        (((0, 0, 6 * LEVELS + 2 * HALF - 1, 8), (0, 0, 0, 0)), "the weights are"),
        (((0, 0, 6 * LEVELS, 6), (0, 0, 2 * HALF, 2)), ""),  # at one center are those of a whole share
        (((0, 0, 6 * LEVELS + 7, 6), (0, 0, 2 * HALF, 2)), "the weights are"),
        (((0, 0, 6 * LEVELS + 1, 6), (0, 0, 2 * HALF - 1, 2)), "the weights are"),
        (((0, 0, 6 * LEVELS + 2 * HALF, 9), (0, 0, 0, -1)), "the weights are"),
        (((0, 0, 6 * LEVELS + 2 * HALF, 7), (0, 0, 0, 0)), "7 devices are counted"),
        (((0, 0, 6 * LEVELS, 7), (0, 0, 2 * HALF, 2)), "9 devices are counted"),
    ],
)
def test_counts_and_weights_are_believed_up_to_what_devices_can_give(
    rows: tuple[tuple[int, int, int, int], ...], wrong: str
) -> None:
    asked, words = blocks(*rows)
    found = why_impossible([replace(asked, share=share) for share in (1, 0.5, 1, 1, 0.5, 1, 1, 1)], words)
    assert found is None if not wrong else found is not None and found.startswith(wrong)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_a_difference_is_believed_up_to_the_weights_the_rounding_and_the_noise(noise: float) -> None:
    """Of eight devices with the weight w: w + 8, the rounding of two words 8 sqrt(2), and the noise's 14 deviations."""
    asked, _ = blocks((0, 0, 0, 0))
    asked = replace(asked, share=0.5, scale=replace(asked.scale, noise=noise))
    weight = 8 * (asked.scale.levels // 2)
    most = weight + 8 + 8 * math.sqrt(2) + asked.scale.deviation * math.sqrt(8) * (math.sqrt(2) + 12) + 1
    for length, possible in ((math.floor(most), True), (math.ceil(most), False)):
        words = asked.scale.modulo(np.array([length, 0, weight, 8]))
        assert (why_impossible([asked] * 8, words) is None) == possible


@pytest.mark.parametrize(
    ("choose", "rows", "possible"),
    [
        ("shares", ((8 * LEVELS, 8), (8 * TENTH, 8)), True),
        ("shares", ((3 * TENTH, 3), (0, 0)), True),
        ("shares", ((3 * TENTH - 1, 3), (0, 0)), False),
        ("shares", ((8 * LEVELS + 9, 8), (8 * TENTH, 8)), False),
        ("shares", ((8 * LEVELS, 8), (8 * LEVELS, 9)), False),
        ("shares", ((0, -1), (8 * LEVELS, 8)), False),
        ("posterior", ((8 * LEVELS, 8), (8 * LEVELS + 8, 8)), True),
        ("posterior", ((8 * LEVELS, 8), (8 * LEVELS - 1, 8)), False),
        ("posterior", ((8 * LEVELS, 8), (7 * LEVELS, 7)), False),
        ("posterior", ((8 * LEVELS, 8), (8 * LEVELS, 9)), False),
    ],
)
def test_a_device_with_shares_of_each_center_has_sigma_at_least_and_with_a_posterior_counts_in_each(
    choose: str,
    rows: tuple[tuple[int, int], ...],
    possible: bool,  # noqa: FBT001 - a row
) -> None:
    asked, words = blocks(*((0, 0, weight, count) for weight, count in rows))
    assert (why_impossible([replace(asked, choose=choose, sigma=0.1)] * 8, words) is None) == possible


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ((0, 0, 0, 8), ""),
        ((0, 0, 8 * (LEVELS + 1), 8), ""),
        ((0, 0, 8 * (LEVELS + 1) + 1, 8), "squared lengths"),
        ((0, 0, -1, 8), "squared lengths"),
        ((8 * LEVELS + 12, 0, 0, 8), ""),  # rounding of two words: 8 sqrt(2), and less than one more
        ((8 * LEVELS + 13, 0, 0, 8), "times as long"),
        ((0, 0, 0, 9), "9 devices are counted"),
        ((0, 0, 0, 7), ""),  # another did not tell its own of this cluster
    ],
)
def test_sums_of_points_are_believed_up_to_what_devices_can_give(row: tuple[int, ...], wrong: str) -> None:
    points = np.zeros((1, 1, 2))
    asked = replace(blocks((0, 0, 0, 0))[0], stage="points", points=points, points_open=np.ones((1, 1), np.bool_))
    found = why_impossible([asked] * 8, asked.scale.modulo(np.array(row)))
    assert found is None if not wrong else found is not None and wrong in found


@pytest.mark.parametrize(("counts", "possible"), [((5, 3), True), ((5, 2), False), ((5, 4), False), ((9, -1), False)])
@pytest.mark.parametrize("stage", ["choose", "count"])
def test_each_device_is_counted_at_one_center_or_cluster(stage: str, counts: tuple[int, int], possible: bool) -> None:  # noqa: FBT001 - a row
    more: dict[str, Any] = {"stage": stage}
    if stage == "count":
        more |= {"points": np.zeros((1, 2, 2)), "points_open": np.ones((1, 2), np.bool_)}
    asked = replace(blocks((0, 0, 0, 0))[0], **more)
    assert (why_impossible([asked] * 8, asked.scale.modulo(np.array(counts))) is None) == possible
