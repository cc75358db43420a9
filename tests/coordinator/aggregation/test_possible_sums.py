"""Sums of devices that keep to the task are possible, whatever they learned; garbage and lies are not."""

from __future__ import annotations

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
    for place, value in ((4, 5), (4, 7), (3, 6 * SCORE_LEVELS + 1), (2, 2**32 - 1), (0, 13), (0, 2**32 - 1)):
        wrong = right.copy()
        wrong[place] = value
        assert why_impossible(asked, wrong, 6)
