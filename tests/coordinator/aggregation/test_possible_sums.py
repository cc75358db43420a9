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

SIZE, K = 40, 3
CENTERS = np.random.default_rng(0).standard_normal((K, SIZE)).astype(np.float32)


def task(stage: str, devices: int, *, bits: int = 32, noise: float = 0.0, seed: int = 0, **more: Any) -> SummedFit:  # noqa: ANN401
    scale = SumScale(bits=bits, devices=devices, clip=1.0, noise=noise)
    told: dict[str, Any] = {"choose": "loss", "open": (0, 1, 2), "centers": CENTERS, "stage": stage, "scale": scale}
    return SummedFit(start=CENTERS[0], steps=1, lr=0.1, batch=1, seed=seed, **(told | more))


def summed(rng: np.random.Generator, devices: int, far: float, **how: Any) -> tuple[SummedFit, Words]:  # noqa: ANN401
    """A task and the sum of the words of devices that moved `far` from their centers."""
    total: Words = np.zeros(0, np.uint32)
    soft = how.get("choose") in ("shares", "posterior")
    for i in range(devices):
        share = float(rng.uniform(0.01, 1.0))
        asked = task(**how, devices=devices, seed=i, share=share)
        k = int(rng.integers(K))
        models = CENTERS[:: 1 if soft else K] + far * rng.standard_normal((K if soft else 1, SIZE))
        weights: Array = rng.dirichlet(np.ones(K)) if soft else np.eye(K)[k]
        order = None if soft else np.argsort(-weights, kind="stable")
        mine = TrainedChoice(models=models, weights=weights, order=order)
        words = contribution(asked, mine, rng).words
        assert words is not None
        total = total + words.astype(np.uint32) if total.size else words.astype(np.uint32)
    return asked, np.asarray(total & np.uint32(2**asked.scale.bits - 1))


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
    elif stage == "choose":
        how["choose"] = "loss"
    else:
        how["noise"] = noise if bits == 32 else 0.0
    asked, words = summed(rng, devices, far, stage=stage, **how)
    assert why_impossible(asked, words, devices) is None


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_garbage_words_of_one_device_make_the_sum_impossible(rng: np.random.Generator) -> None:
    for stage in ("choose", "add"):
        asked, words = summed(rng, 20, 0.01, stage=stage)
        garbage = words + rng.integers(0, 2**32, len(words), np.uint32)
        reason = why_impossible(asked, garbage, 20)
        assert reason is not None
        assert "at least one of 20 devices did not keep to its task" in reason


@pytest.mark.parametrize("extra", [1, 5, -1])
def test_a_count_that_lies_is_told(rng: np.random.Generator, extra: int) -> None:
    for stage in ("choose", "add"):
        asked, words = summed(rng, 20, 0.01, stage=stage)
        words[-1:] += np.uint32(extra % 2**32)
        assert "devices are counted" in (why_impossible(asked, words, 20) or "")


def test_a_center_cannot_be_moved_further_than_the_weights_allow(rng: np.random.Generator) -> None:
    asked, words = summed(rng, 20, 0.01, stage="add")
    words[0] += np.uint32(21 * asked.scale.levels)
    assert "times as long as the weights allow" in (why_impossible(asked, words, 20) or "")


def test_weights_that_one_device_cancels_move_a_center_by_a_billion_and_are_told(rng: np.random.Generator) -> None:
    asked, words = summed(rng, 20, 0.01, stage="add")
    words[0], words[SIZE] = 2**30, 1
    moved, _ = centers_of_sums(CENTERS, words, asked.scale, asked.open)
    assert moved[0, 0] > 1e9 * asked.scale.clip
    assert "times as long as the weights allow" in (why_impossible(asked, words, 20) or "")


def test_an_evaluation_counts_each_device_once_and_no_score_above_one() -> None:
    asked = SummedProbe(
        models=[CENTERS[0]], want=frozenset({"confusion"}), split="test", batch=8, seed=0, served="asked", usual=0,
        scale=SumScale(bits=32, devices=6, clip=1.0),
    )  # fmt: skip
    right = np.array([10, 12, 5 * SCORE_LEVELS, 6 * SCORE_LEVELS, 6], dtype=np.uint32)
    assert why_impossible(asked, right, 6) is None
    assert why_impossible(asked, np.array([12, 12, 0, 0, 6], dtype=np.uint32), 6) is None
    assert why_impossible(asked, np.array([0, 6, 0, 0, 6], dtype=np.uint32), 6) is None
    for place, value in ((4, 5), (4, 7), (3, 6 * SCORE_LEVELS + 1), (2, 2**32 - 1), (0, 13), (0, 2**32 - 1)):
        wrong = right.copy()
        wrong[place] = value
        assert why_impossible(asked, wrong, 6)


@pytest.mark.parametrize("samples", [0, 5, -1])
def test_an_evaluation_of_fewer_samples_than_devices_is_told(samples: int) -> None:
    """One device subtracts what the others have: 0 of 0 samples would be an accuracy that is no number."""
    asked = SummedProbe(
        models=[CENTERS[0]], want=frozenset({"confusion"}), split="test", batch=8, seed=0, served="asked", usual=0,
        scale=SumScale(bits=32, devices=6, clip=1.0),
    )  # fmt: skip
    words = asked.scale.modulo(np.array([0, samples, 0, 0, 6]))
    assert f"{samples} samples are counted" in (why_impossible(asked, words, 6) or "")


def blocks(*rows: tuple[int, int, int, int]) -> tuple[SummedFit, Words]:
    """The sums of a task of 16 devices at most, with two parameters: of each center the two, the weight, the count."""
    asked = task("add", 16, centers=CENTERS[:, :2], open=tuple(range(len(rows))))
    return asked, asked.scale.modulo(np.array(rows).ravel())


LEVELS = blocks((0, 0, 0, 0))[0].scale.levels


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (((0, 0, 0, 8), (0, 0, 0, 0)), ""),  # all devices are at one center
        (((0, 0, 0, 9), (0, 0, 0, -1)), "the weights are"),
        (((0, 0, -1, 8), (0, 0, 0, 0)), "the weights are"),
        (((0, 0, 8 * (LEVELS + 1), 8), (0, 0, 0, 0)), ""),  # each rounded up
        (((0, 0, 8 * (LEVELS + 1) + 1, 8), (0, 0, 0, 0)), "the weights are"),
        (((0, 0, 7 * (LEVELS + 1), 7), (0, 0, 2 * (LEVELS + 1), 1)), "the weights are"),
        (((0, 0, 100, 7), (0, 0, 0, 0)), "7 devices are counted"),
        (((0, 0, 100, 7), (0, 0, 0, 2)), "9 devices are counted"),
    ],
)
def test_counts_and_weights_are_believed_up_to_what_devices_can_give(
    rows: tuple[tuple[int, int, int, int], ...], wrong: str
) -> None:
    found = why_impossible(*blocks(*rows), 8)
    assert found is None if not wrong else found is not None and found.startswith(wrong)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_a_difference_is_believed_up_to_the_weights_the_rounding_and_the_noise(noise: float) -> None:
    """Of eight devices with the weight w: w + 8, the rounding of two words 8 sqrt(2), and the noise's 14 deviations."""
    asked, _ = blocks((0, 0, 0, 0))
    asked = replace(asked, scale=replace(asked.scale, noise=noise))
    weight = 3 * asked.scale.levels
    most = weight + 8 + 8 * math.sqrt(2) + asked.scale.deviation * math.sqrt(8) * (math.sqrt(2) + 12) + 1
    for length, possible in ((math.floor(most), True), (math.ceil(most), False)):
        words = asked.scale.modulo(np.array([length, 0, weight, 8]))
        assert (why_impossible(asked, words, 8) is None) == possible


@pytest.mark.parametrize("choose", ["shares", "posterior"])
def test_where_devices_have_shares_of_each_center_each_counts_at_most_all_of_them(choose: str) -> None:
    asked, _ = blocks((0, 0, 0, 0), (0, 0, 0, 0))
    asked = replace(asked, choose=choose)
    for counts, possible in (((8, 8), True), ((3, 0), True), ((8, 9), False), ((-1, 8), False)):
        words = asked.scale.modulo(np.array([[0, 0, 0, count] for count in counts]).ravel())
        assert (why_impossible(asked, words, 8) is None) == possible


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
    found = why_impossible(asked, asked.scale.modulo(np.array(row)), 8)
    assert found is None if not wrong else found is not None and wrong in found


@pytest.mark.parametrize(("counts", "possible"), [((5, 3), True), ((5, 2), False), ((5, 4), False), ((9, -1), False)])
@pytest.mark.parametrize("stage", ["choose", "count"])
def test_each_device_is_counted_at_one_center_or_cluster(stage: str, counts: tuple[int, int], possible: bool) -> None:  # noqa: FBT001 - a row
    more: dict[str, Any] = {"stage": stage}
    if stage == "count":
        more |= {"points": np.zeros((1, 2, 2)), "points_open": np.ones((1, 2), np.bool_)}
    asked = replace(blocks((0, 0, 0, 0))[0], **more)
    assert (why_impossible(asked, asked.scale.modulo(np.array(counts)), 8) is None) == possible
