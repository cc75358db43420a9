from __future__ import annotations

import numpy as np
import pytest

from coordinator.strategies.base import Exchange, Replies, State
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.fedem import FedEM
from coordinator.strategies.fedsoft import FedSoft
from coordinator.strategies.fesem import FeSEM
from edge_client.protocol.task import Fit, Reply, Schema, TensorSpec
from emulator.reports.pictures.recorder import RunRecorder, narrow_point, sample_shown, spread_rounds
from emulator.reports.pictures.records import MAX_DEVICES, MAX_KEPT_ROUNDS, MAX_SHARE_ROUNDS, MAX_WIDTH
from tests.support.softmax_program import grouped_fleet, play

SCHEMA = Schema(
    (TensorSpec(name="body", role="p", shape=(2,)), TensorSpec(name="head", role="p", shape=(3,))), ("head",)
)
STATE = State(centers=np.zeros((2, 5)))
TASK = Fit(start=np.zeros(5), steps=1, lr=0.1, batch=1, seed=0)


def answering(value: float) -> Replies:
    return {c: Reply(n=1, update=value + np.arange(5.0) + i) for i, c in enumerate(("a", "b"))}


class AlwaysSame:
    def __init__(self, replies: Replies) -> None:
        self.replies, self.asked = replies, list[Exchange]()

    def __call__(self, exchange: Exchange) -> Replies:
        self.asked.append(exchange)
        return self.replies


def test_the_last_model_of_each_device_is_kept_by_its_classifier_in_three_rounds() -> None:
    recorder = RunRecorder({"a": 1, "b": 1}, SCHEMA, rounds=9)
    for number in range(1, 10):
        for value in (0.0, 10.0 * number):
            replies = answering(value)
            assert recorder.record_exchanges(answer := AlwaysSame(replies), number, STATE)({"a": TASK}) is replies
            assert answer.asked == [{"a": TASK}]
    kept = recorder.picture_data()
    assert kept.representation == "classifier"
    assert [m.round for m in kept.moments] == [1, 5, 9]
    assert all(m.who == ("a", "b") for m in kept.moments)
    np.testing.assert_array_equal(kept.moments[1].points, [[52, 53, 54], [53, 54, 55]])


def test_the_methods_own_representation_is_kept_and_an_unknown_one_is_the_classifier() -> None:
    for kind, width in (("all", 5), ("something else", 3)):
        recorder = RunRecorder({"a": 1, "b": 1}, SCHEMA, rounds=1, kind=kind)
        recorder.record_exchanges(lambda _: answering(1.0), 1, STATE)({"a": TASK})
        assert recorder.picture_data().moments[0].points.shape == (2, width)


def test_who_sends_no_model_or_one_that_is_not_finite_is_left_out() -> None:
    def ask(_: Exchange) -> Replies:
        return {
            "a": Reply(n=1, losses=np.ones(1)),
            "b": Reply(n=1, update=np.full(5, np.nan)),
            "c": Reply(n=1, update=np.ones(5)),
        }

    recorder = RunRecorder({"a": 1, "b": 1, "c": 1}, SCHEMA, rounds=1)
    recorder.record_exchanges(ask, 1, STATE)({"a": TASK})
    assert [m.who for m in recorder.picture_data().moments] == [("c",)]
    assert RunRecorder({"a": 1}, SCHEMA, rounds=1).picture_data().moments == ()


def test_shares_are_kept_by_round_and_unknown_ones_are_nan() -> None:
    recorder = RunRecorder({"a": 1, "b": 1}, SCHEMA, rounds=2)
    recorder.record_round_end(1, State(centers=np.zeros((2, 5)), extra={"u/a": np.array([0.25, 0.75])}))
    recorder.record_round_end(
        2, State(centers=np.zeros((2, 5)), extra={"u/a": np.array([0.0, 1.0]), "u/b": np.array([0.5, 0.5])})
    )
    shares = recorder.picture_data().shares
    assert shares is not None
    assert (shares.rounds, shares.who) == ((1, 2), ("a", "b"))
    assert "u" in shares.name
    np.testing.assert_array_equal(shares.values, [[[0.25, 0.75], [np.nan, np.nan]], [[0.0, 1.0], [0.5, 0.5]]])


@pytest.mark.parametrize(
    ("method", "has"),
    [
        (FedSoft(clusters=2, local_steps=1, batch_size=4), True),
        (FedEM(clusters=2, local_steps=1, batch_size=4), True),
        (FeSEM(clusters=2, local_steps=1, batch_size=4), False),
        (FedAvg(local_steps=1, batch_size=4), False),
    ],
)
def test_the_shares_are_found_where_the_methods_put_them(
    method: FedSoft | FedEM | FeSEM | FedAvg, *, has: bool
) -> None:
    local = grouped_fleet(4, 2)
    recorder = RunRecorder({c: len(held.train) for c, held in local.items()}, SCHEMA, rounds=1)
    recorder.record_round_end(1, play(method, local, rounds=1))
    shares = recorder.picture_data().shares
    assert (shares is not None) == has
    if shares is not None:
        np.testing.assert_allclose(shares.values.sum(axis=2), 1.0, atol=1e-3)  # FedSoft adds sigma
        assert shares.who == tuple(sorted(local))


def test_a_large_fleet_is_sampled_and_the_sample_follows_no_stride() -> None:
    fleet = {f"d{i:05d}": 1 for i in range(10 * MAX_DEVICES)}
    chosen = sample_shown(fleet)
    assert len(chosen) == MAX_DEVICES
    assert chosen == sorted(chosen) == sample_shown(dict(reversed(fleet.items())))
    groups = np.bincount([int(c[1:]) % 10 for c in chosen], minlength=10)
    assert groups.min() > MAX_DEVICES // 20  # 40 each in the mean, deviation 5.7: 20 is below three and a half
    assert sample_shown({"b": 1, "a": 1}) == ["a", "b"]


def test_rounds_are_spread_from_the_first_to_the_last() -> None:
    assert [list(spread_rounds(n, MAX_KEPT_ROUNDS)) for n in (1, 2, 3, 4, 9, 100)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 5, 9], [1, 50, 100],
    ]  # fmt: skip
    many = spread_rounds(1_000, MAX_SHARE_ROUNDS)
    assert (len(many), many[0], many[-1]) == (MAX_SHARE_ROUNDS, 1, 1_000)


def test_a_wide_point_keeps_its_distances_and_a_narrow_one_is_itself() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, 20_000)).astype(np.float32)
    rows[3:] = rows[:3] + 0.01 * rows[3:]  # near neighbours of the first three
    narrow = np.stack([narrow_point(row) for row in rows])
    assert narrow.shape == (6, MAX_WIDTH)
    assert narrow.dtype == np.float32
    i, j = np.triu_indices(6, 1)
    before, after = (np.linalg.norm(x[i] - x[j], axis=1) for x in (rows, narrow))
    np.testing.assert_allclose(after, before, rtol=0.1)  # sqrt(2 / 1024) / 2 = 2.2% is one deviation
    flat = narrow_point(np.ones(20_000, np.float32))  # without signs all would add up: 625
    np.testing.assert_allclose(np.linalg.norm(flat), np.sqrt(20_000), rtol=0.1)
    np.testing.assert_array_equal(narrow_point(rows[0, :MAX_WIDTH]), rows[0, :MAX_WIDTH])
