"""K models that differ before anybody has trained."""

from __future__ import annotations

import numpy as np

from coordinator.rounds.metrics import ari
from coordinator.strategies.common.initial_centers import initial_centers
from coordinator.strategies.common.updates import pack_by_client, unpack_by_client
from coordinator.strategies.fedem import FedEM
from coordinator.strategies.ifca import IFCA
from edge_client.protocol.task import Flat, Probe, Schema, TensorSpec
from tests.support.driven_rounds import DrivenMethod
from tests.support.regression import GAP, world
from tests.support.regression import play as regress
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

SCHEMA = Schema(
    (
        TensorSpec(name="a", role="p", shape=(50, 40)),
        TensorSpec(name="bias", role="p", shape=(30,)),
        TensorSpec(name="norm", role="p", shape=(30,)),
        TensorSpec(name="mean", role="b", shape=(30,)),
    )
)
RNG = np.random.default_rng(0)
MODEL = np.concatenate([0.3 + 0.2 * RNG.standard_normal(2000), np.zeros(30), np.ones(30), RNG.random(30)])
LOCAL = grouped_fleet(6, 2)


def test_the_first_start_is_the_common_model_and_the_others_have_its_scale_and_nothing_else_of_it() -> None:
    drawn = initial_centers(MODEL, SCHEMA, 4, np.random.default_rng(1))
    np.testing.assert_array_equal(drawn[0], MODEL)
    weights = drawn[:, :2000]
    # 2,000 draws: the mean is off by 0.2 / sqrt(2000) = 0.0045, the spread by 0.2 / sqrt(4000) = 0.0032; five times it.
    np.testing.assert_allclose(weights.mean(axis=1), MODEL[:2000].mean(), atol=0.0225)
    np.testing.assert_allclose(weights.std(axis=1), MODEL[:2000].std(), atol=0.016)
    correlation = np.corrcoef(weights) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(2000)


def test_biases_of_zeros_weights_of_ones_and_buffers_stay() -> None:
    drawn = initial_centers(MODEL, SCHEMA, 3, np.random.default_rng(1))
    np.testing.assert_array_equal(drawn[:, 2000:], np.tile(MODEL[2000:], (3, 1)))


def test_starts_keep_the_models_dtype_and_repeat_with_the_seed() -> None:
    one, two = (initial_centers(MODEL.astype(np.float32), SCHEMA, 3, np.random.default_rng(5)) for _ in range(2))
    assert one.dtype == np.float32
    np.testing.assert_array_equal(one, two)
    assert initial_centers(MODEL, SCHEMA, 1, np.random.default_rng(5)).shape == (1, SCHEMA.size)


def probed(run: DrivenMethod) -> list[Flat]:
    """The models that the first probe asks about."""
    task = next(iter(run.asked[0][1].values()))
    assert isinstance(task, Probe)
    return [np.asarray(model) for model in task.models]


def test_random_groups_train_the_starts_apart_once() -> None:
    run = DrivenMethod(FedEM(clusters=3, start="groups", local_steps=4, batch_size=8), devices_of(LOCAL), start_of())
    run.play(2)
    assert [len(asked) for asked in run.asked] == [1 + 1 + 3, 1 + 3]
    first = run.said[0][0]
    assert sorted(first) == sorted(LOCAL)
    # What the models were when the first probe asked about them: means of two devices each, n-weighted.
    models = probed(run)
    pairs = [
        (first[a].n * first[a].update + first[b].n * first[b].update) / (first[a].n + first[b].n)  # type: ignore[operator]
        for a in LOCAL
        for b in LOCAL
        if a < b
    ]
    assert all(any(np.allclose(model, pair, rtol=1e-12) for pair in pairs) for model in models)


def test_k_means_starts_where_the_devices_groups_are() -> None:
    method = IFCA(clusters=2, start="k-means", local_steps=10, learning_rate=0.3, batch_size=8)
    run = DrivenMethod(method, devices_of(LOCAL), start_of())
    chosen = run.play(1).assignment
    assert ari([i % 2 for i in range(len(LOCAL))], [chosen[c] for c in sorted(LOCAL)]) == 1.0


def test_a_silent_fleet_is_dealt_into_groups_again_next_time() -> None:
    run = DrivenMethod(
        FedEM(clusters=2, start="groups", local_steps=4, batch_size=8),
        devices_of(LOCAL),
        start_of(),
        answers=lambda r, _e, _c, _t: r > 1,
    )
    before = run.state
    after = run.play(1)
    np.testing.assert_array_equal(after.centers, before.centers)
    assert after.extra.keys() == before.extra.keys()
    run.play(1)
    assert "ungrouped" not in run.state.extra


def test_a_group_without_devices_keeps_its_drawn_start() -> None:
    two = {c: LOCAL[c] for c in ("d00", "d01")}
    run = DrivenMethod(FedEM(clusters=5, start="groups", local_steps=2, batch_size=8), devices_of(two), start_of())
    drawn = run.state.centers.copy()
    run.play(1)
    models = probed(run)
    kept = [any(np.array_equal(model, start) for start in drawn) for model in models]
    assert sum(kept) == 3
    assert len({model.tobytes() for model in models}) == 5


def test_what_is_kept_per_client_comes_back_by_client() -> None:
    values = {"b": np.array([1.0]), "a": np.array([2.0, 3.0])}
    extra = {**pack_by_client("pi", values), **pack_by_client("u", {"a": np.zeros(1)}), "pi": np.ones(1)}
    found = unpack_by_client(extra, "pi")
    assert list(found) == ["a", "b"]
    assert found["a"].tolist() == [2.0, 3.0]


def collapsed(start: str, seed: int) -> bool:
    """Whether IFCA ends with one model for two distributions, whose error is then at least a quarter of their gap."""
    on = world("10:90", 10, seed=seed)
    full = {"local_steps": 5, "learning_rate": 0.1, "momentum": 0.0, "batch_size": 256}
    states = regress(IFCA(clusters=2, start=start, **full), on, rounds=12, seed=seed)  # type: ignore[arg-type]  # numbers
    return on.own_and_other(states[-1].centers)[0] > GAP / 8


def test_starts_of_groups_do_not_leave_all_devices_with_one_model_as_drawn_ones_do() -> None:
    counts = {start: sum(collapsed(start, seed) for seed in range(5)) for start in ("groups", "redraw")}
    assert counts["groups"] == 0
    assert counts["redraw"] > 0
