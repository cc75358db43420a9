"""The words of a device: unbiased, bounded, and their sum is the weighted mean within the rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.summed_centers import centers_of_sums
from coordinator.strategies.base import SealedSums, SumByCenter
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import Malformed
from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.summed_task import SummedFit, SummedProbe, SumScale
from edge_client.protocol.task import Array, Flat, Reply
from edge_client.training.learner import EngineLearner, Learner
from edge_client.training.skellam import secret_stream
from edge_client.training.summed import (
    CHOICE_SLOT,
    TrainedChoice,
    choose_after,
    choose_before,
    choose_nearest,
    contribution,
    evaluation_words,
)
from tests.support.softmax_program import SoftmaxEngine, grouped_fleet, program, start_of

SIZE = 6
CENTERS = np.random.default_rng(0).standard_normal((3, SIZE))

NOISE = np.random.default_rng(0)


def task(*, seed: int = 0, devices: int = 20, bits: int = 32, share: float = 1.0, **more: object) -> SummedFit:
    scale = SumScale(bits=bits, devices=devices, clip=4.0)
    told: dict[str, object] = {"scale": scale, "stage": "add", "choose": "given", "open": (0, 1, 2), "centers": CENTERS}
    return SummedFit(
        start=CENTERS[0],
        steps=1,
        lr=0.1,
        batch=1,
        seed=seed,
        share=share,
        **{**told, **more},  # type: ignore[arg-type]
    )


def chosen(model: Array, order: list[int]) -> TrainedChoice:
    return TrainedChoice(models=model[None], weights=np.eye(3)[order[0]], order=np.array(order))


@given(bits=st.sampled_from([16, 20, 32]), devices=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_the_sum_gives_the_weighted_mean_of_each_center_within_the_rounding(bits: int, devices: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    models, shares = 0.3 * rng.standard_normal((devices, SIZE)), rng.uniform(0.1, 1.0, devices)
    labels = rng.integers(3, size=devices)
    replies, scale = {}, task(bits=bits, devices=devices).scale
    for i in range(devices):
        told = task(seed=i, devices=devices, bits=bits, share=float(shares[i]))
        model = CENTERS[labels[i]] + models[i]
        replies[f"d{i:02d}"] = contribution(told, chosen(model, [int(labels[i])]), NOISE)
    words = SealedSums(SumByCenter({}, least=1), replies).sums[0]
    found, counts = centers_of_sums(CENTERS, words, scale, (0, 1, 2))
    assert counts.tolist() == np.bincount(labels, minlength=3).tolist()
    for k in np.flatnonzero(counts):
        mine = labels == k
        mean = CENTERS[k] + shares[mine] @ models[mine] / shares[mine].sum()
        # Each word of a parameter and of a weight is off by less than one level.
        total = shares[mine].sum() * scale.levels
        bound = (scale.clip + np.abs(mean - CENTERS[k])) * counts[k] / max(total - counts[k], 1)
        assert (np.abs(found[k] - mean) <= bound + 1e-12).all()


def test_the_rounding_is_unbiased() -> None:
    scale = SumScale(bits=16, devices=1000, clip=1.0)  # 32 levels
    value = np.full(200_000, 0.3141)
    drawn = scale.signed(scale.to_words(value, np.random.default_rng(0))) / scale.levels
    # The standard deviation of a rounded value is at most half a level; the mean of 200,000 is off by six of its own.
    assert abs(drawn.mean() - 0.3141) < 6 * 0.5 / scale.levels / 200_000**0.5


@given(bits=st.integers(16, 32), devices=st.integers(1, 10_000), sign=st.sampled_from([-1.0, 1.0]))
def test_the_greatest_contributions_of_all_devices_do_not_overflow(bits: int, devices: int, sign: float) -> None:
    scale = SumScale(bits=bits, devices=devices, clip=1.0)
    one = scale.signed(scale.to_words(np.array([sign]), np.random.default_rng(0)))
    assert scale.signed(scale.modulo(one * devices)) == one * devices


def test_a_sum_that_could_overflow_is_refused() -> None:
    with pytest.raises(Malformed, match="overflows words of 16 bits"):
        SumScale(bits=16, devices=40_000, clip=1.0)


def test_a_contribution_is_no_longer_than_the_bound() -> None:
    told = task(devices=1)
    words = contribution(told, chosen(CENTERS[1] + 1e6, [1]), NOISE).words
    assert words is not None
    block = told.scale.signed(words).reshape(3, -1)[1, :-2] * told.scale.clip / told.scale.levels
    # Each number is off by one level at most.
    assert np.linalg.norm(block) <= told.scale.clip * (1 + SIZE**0.5 / told.scale.levels)


def test_blocks_of_other_centers_are_zero_and_a_device_of_a_closed_center_takes_its_next_choice() -> None:
    mine = chosen(CENTERS[1], [1, 2, 0])
    for open_centers, taken in (((0, 1, 2), 1), ((0, 2), 2), ((0,), 0)):
        reply = contribution(task(open=open_centers), mine, NOISE)
        assert reply.words is not None
        blocks = reply.words.reshape(len(open_centers), -1)
        assert [k for k, block in zip(open_centers, blocks, strict=True) if block.any()] == [taken]


@pytest.mark.parametrize(
    ("weights", "open_centers", "counted"),
    [
        ([0.2, 0.4, 0.4], (0, 1, 2), [0, 1, 1]),
        ([0.2, 0.4, 0.4], (0, 2), [0, 0, 1]),
        ([0.2, 0.4, 0.4], (0,), [0, 0, 0]),
        ([1 / 3 - 1e-12, 1 / 3, 1 / 3], (0, 1, 2), [1, 1, 1]),  # equal ones, rounded
        ([0.332, 0.332, 0.336], (0, 1, 2), [0, 0, 1]),
    ],
)
def test_weights_are_counted_where_they_are_1_of_k_and_stay_on_the_device_where_a_center_is_closed(
    weights: list[float], open_centers: tuple[int, ...], counted: list[int]
) -> None:
    mine = TrainedChoice(models=CENTERS[1][None], weights=np.array(weights), order=None)
    reply = contribution(task(stage="choose", choose="shares", open=open_centers), mine, NOISE)
    assert reply.words is not None
    assert reply.words.tolist() == counted
    assert mine.kept(open_centers).tolist() == weights


def test_a_choice_of_one_center_moves_where_it_is_closed() -> None:
    assert chosen(CENTERS[1], [1, 2, 0]).kept((0, 2)).tolist() == [0, 0, 1]


def test_a_device_moves_to_the_nearest_center_unless_hysteresis_holds_it() -> None:
    model = (0.55 * CENTERS[1] + 0.45 * CENTERS[0])[None]
    columns = ((0, SIZE),)
    free = choose_nearest(task(compare=columns), model, np.eye(3)[0])
    held = choose_nearest(task(compare=columns, hysteresis=0.5), model, np.eye(3)[0])
    assert [int(free.weights.argmax()), int(held.weights.argmax())] == [1, 0]


def test_an_answer_to_a_sum_has_words_and_nothing_else() -> None:
    reply = contribution(task(), chosen(CENTERS[1], [1]), NOISE)
    assert reply == Reply(n=1, words=reply.words)


def test_noise_is_added_to_each_parameter_of_each_block_and_to_nothing_else() -> None:
    size, noise = 4_000, 0.5
    scale = SumScale(bits=32, devices=20, clip=4.0, noise=noise)
    told = task(scale=scale, centers=np.zeros((3, size)))
    reply = contribution(told, chosen(np.zeros(size), [1]), np.random.default_rng(0))
    assert reply.words is not None
    blocks = scale.signed(reply.words).reshape(3, size + 2)
    assert blocks[:, -2:].tolist() == [[0, 0], [scale.levels, 1], [0, 0]]
    for block in blocks[:, :-2]:
        # The deviation of 4,000 draws is off by 1.1 % at one deviation of its own, their mean by 1.6 % of theirs.
        assert block.std() == pytest.approx(noise * scale.levels, rel=0.06)
        assert abs(block.mean()) < 0.08 * noise * scale.levels


def test_a_device_draws_its_noise_from_a_secret_that_no_task_has() -> None:
    drawn = [secret_stream().integers(2**62, size=4).tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_the_noise_of_all_devices_leaves_words_without_overflow() -> None:
    scale = SumScale(bits=16, devices=100, clip=1.0, noise=0.3)
    assert 100 * scale.levels + 12 * 10 * scale.deviation <= 2**15 - 1
    with pytest.raises(Malformed, match="overflows"):
        SumScale(bits=16, devices=100, clip=1.0, noise=1_000.0)
    with pytest.raises(Malformed, match="noise"):
        SumScale(bits=16, devices=100, clip=1.0, noise=-1.0)


def test_a_choice_among_other_centers_serves_no_evaluation() -> None:
    """A device that missed the end of the first round chose last among its spare centers, of which there were more."""
    learner, local = EngineLearner(SoftmaxEngine(), program()), grouped_fleet(1, 1)["d00"]
    models = [start_of(k) for k in range(2)]

    def words(choice: Array | None, usual: int) -> list[int]:
        probe = SummedProbe(
            models=models, want=frozenset({"confusion"}), split="test", batch=64, seed=0, served="center",
            usual=usual, scale=SumScale(bits=32, devices=5, clip=1.0), prior=[0.0, 1.0],
        )  # fmt: skip
        own = {CHOICE_SLOT: choice}
        reply = evaluation_words(learner, probe, local, own=own.get, drawn=secret_stream())
        assert reply.words is not None
        return [int(word) for word in reply.words[:2]]

    assert words(np.eye(16)[15], 1) == words(None, 1) == words(np.eye(2)[1], 0) != words(None, 0)


@pytest.mark.parametrize("choose", ["shares", "posterior"])
def test_last_weights_in_another_number_of_centers_count_as_none(choose: str) -> None:
    learner, local = EngineLearner(SoftmaxEngine(), program()), grouped_fleet(1, 1)["d00"]
    work = task(choose=choose, open=(0, 1), centers=np.stack([start_of(k) for k in range(2)]), refresh=False)

    def scores(last: Array | None) -> list[float]:
        found = choose_before(learner, work, local, last, lambda _: None)
        assert found is not None
        return [float(score) for score in found]

    assert scores(np.full(3, 1 / 3)) == scores(None) != scores(np.array([0.9, 0.1]))


@dataclass
class ZeroLearner:
    """Its models answer zero at each of five positions."""

    program: Program = field(default_factory=lambda: replace(program(), loss="token-cross-entropy", target=(5, 7)))
    fixed_batch: int | None = None

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[Array, Array]:
        return np.zeros((len(models), len(data))), np.zeros((len(models), len(data), 5, 7))


@pytest.mark.parametrize("labelled", [0, 1, 15])
def test_a_device_whose_held_out_samples_have_no_label_refuses_an_evaluation(labelled: int) -> None:
    x, y = np.zeros((3, 5)), np.full(15, IGNORED)
    y[:labelled] = 0
    data = Dataset(x, y.reshape(3, 5))
    probe = SummedProbe(
        models=[start_of(0)], want=frozenset({"confusion"}), split="test", batch=64, seed=0, served="asked",
        usual=0, scale=SumScale(bits=32, devices=5, clip=1.0),
    )  # fmt: skip
    learner, local = cast("Learner", ZeroLearner()), DeviceData(train=data, test=data)
    if labelled:
        reply = evaluation_words(learner, probe, local, own=lambda _: None, drawn=secret_stream())
        assert reply.words is not None
        assert reply.words[:2].tolist() == [labelled, labelled]
    else:
        with pytest.raises(Malformed, match="no_data"):
            evaluation_words(learner, probe, local, own=lambda _: None, drawn=secret_stream())


def test_the_only_center_of_several_is_the_first_one_that_is_open() -> None:
    """A choice is an order of all centers, also where a task names more than one only center."""
    learner, local = cast("Learner", None), DeviceData(train=Dataset(np.zeros((1, 1)), np.zeros(1, np.int64)))
    only = task(choose="only", open=(1, 2))
    scores = choose_before(learner, only, local, None, lambda _: None)
    mine = choose_after(only, CENTERS[:1], scores, None)
    assert mine.among(only.open).tolist() == [0, 1, 0]
