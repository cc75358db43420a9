from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation import centers as module
from coordinator.aggregation.centers import aggregate, one_hot, row_means
from coordinator.aggregation.robust import REDUCER_NAMES, make_reducer, weighted_mean
from coordinator.aggregation.rows import Rows
from edge_client.protocol.task import Flat

RNG = np.random.default_rng(0)
ROWS, A = RNG.standard_normal((5, 3)), RNG.random(5) + 0.1


def test_the_weighted_mean_is_the_sum_over_the_weights() -> None:
    expected = sum(a * row for a, row in zip(A, ROWS, strict=True)) / A.sum()
    np.testing.assert_allclose(weighted_mean(ROWS, A), expected)


@given(scale=st.floats(1e-6, 1e6), copies=st.integers(1, 4))
def test_scaling_or_duplicating_everybody_changes_no_mean(scale: float, copies: int) -> None:
    mean = weighted_mean(ROWS, A)
    np.testing.assert_allclose(weighted_mean(ROWS, A * scale), mean)
    np.testing.assert_allclose(weighted_mean(np.tile(ROWS, (copies, 1)), np.tile(A, copies)), mean)


@pytest.mark.parametrize("weights", [[0, 0, 0, 0, 0], [1, 1, 1, 1, -1], [1, 1, 1, 1, np.nan], [1, 1, 1, 1, np.inf]])
def test_weights_that_cannot_be_normalised_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        weighted_mean(ROWS, np.array(weights))


def test_float32_rows_are_summed_in_float64() -> None:
    rows = np.full((10_000, 1), 0.1, np.float32)
    rows[0] = 1e7  # in float32 the sum would lose what follows
    expected = np.float32((1e7 + 9_999 * float(np.float32(0.1))) / 10_000)
    mean = weighted_mean(rows, np.ones(len(rows)))
    assert mean.dtype == np.float32
    assert mean[0] == expected


def test_each_center_is_the_mean_of_its_own_and_one_without_any_keeps_its_values() -> None:
    centers = RNG.standard_normal((3, 3))
    before = centers.copy()
    new = aggregate(centers, ROWS, one_hot(np.array([0, 0, 2, 2, 2]), 3), A)
    np.testing.assert_allclose(new[0], weighted_mean(ROWS[:2], A[:2]))
    np.testing.assert_allclose(new[2], weighted_mean(ROWS[2:], A[2:]))
    np.testing.assert_array_equal(new[1], before[1])
    np.testing.assert_array_equal(centers, before)


def test_a_step_moves_part_of_the_way() -> None:
    centers = RNG.standard_normal((1, 3))
    whole, part = (aggregate(centers, ROWS, np.ones((5, 1)), A, step=step) for step in (1.0, 0.25))
    np.testing.assert_allclose(part, 0.75 * centers + 0.25 * whole)


def test_an_update_without_weight_is_not_even_multiplied() -> None:
    rows = ROWS.copy()
    rows[4] = np.inf
    assert np.isfinite(aggregate(np.zeros((1, 3)), rows, np.array([[1.0], [1], [1], [1], [0]]), A)).all()


def test_shapes_and_steps_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="step"):
        aggregate(np.zeros((1, 3)), ROWS, np.ones((5, 1)), A, step=0.0)
    with pytest.raises(ValueError, match="R is"):
        aggregate(np.zeros((2, 3)), ROWS, np.ones((5, 1)), A)


def test_buffers_count_samples_whatever_the_parameters_count() -> None:
    n = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    R = one_hot(np.array([0, 0, 1, 1, 1]), 2)
    new = aggregate(np.zeros((2, 3)), ROWS, R, np.ones(5), n_params=1, n=n)
    np.testing.assert_allclose(new[:, :1], R.T @ ROWS[:, :1] / R.sum(axis=0)[:, None])
    np.testing.assert_allclose(new[:, 1:], (R * n[:, None]).T @ ROWS[:, 1:] / (n @ R)[:, None])


def test_rows_are_aligned_with_the_center_that_they_go_to() -> None:
    centers = np.array([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    new = aggregate(
        centers, ROWS, one_hot(np.array([0, 1, 1, 0, 0]), 2), A, align=lambda rows, center: rows * 0 + center
    )
    np.testing.assert_allclose(new, centers)


@pytest.mark.parametrize("name", REDUCER_NAMES)
def test_the_width_of_a_block_of_columns_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weights = RNG.standard_normal((5, 11)), (np.ones((5, 1)), A)
    settings = {"reduce": make_reducer(name, trim=0.2), "n_params": 7, "n": np.arange(1.0, 6.0)}
    whole = aggregate(np.zeros((1, 11)), rows, *weights, **settings)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "COLUMN_BLOCK", 3)
    np.testing.assert_allclose(aggregate(np.zeros((1, 11)), rows, *weights, **settings), whole)  # type: ignore[arg-type]


def test_a_robust_center_has_robust_buffers_whatever_samples_a_device_claims() -> None:
    rows = np.concatenate([RNG.standard_normal((8, 3)), np.full((2, 3), -1e9)])
    n = np.array([10.0] * 8 + [1e12] * 2)
    new = aggregate(np.zeros((1, 3)), rows, np.ones((10, 1)), n, reduce=make_reducer("median"), n_params=2, n=n)
    assert (new >= rows[:8].min(axis=0)).all()


def test_centers_that_share_rows_are_each_the_mean_of_their_own() -> None:
    R, n = RNG.random((5, 4)), np.arange(1.0, 6.0)
    R[:, 2], R[3] = 0.0, 0.0  # a center without rows, a row without centers
    centers = RNG.standard_normal((4, 3))
    new = aggregate(centers, ROWS, R, A, n_params=2, n=n)
    for k in (0, 1, 3):
        np.testing.assert_allclose(new[k, :2], weighted_mean(ROWS[:, :2], R[:, k] * A), rtol=1e-12)
        np.testing.assert_allclose(new[k, 2:], weighted_mean(ROWS[:, 2:], R[:, k] * n), rtol=1e-12)
    np.testing.assert_array_equal(new[2], centers[2])


def test_an_infinite_update_reaches_only_the_centers_that_it_counts_for() -> None:
    rows, R = ROWS.copy(), np.ones((5, 2))
    rows[4], R[4, 1] = np.inf, 0.0
    new = aggregate(np.zeros((2, 3)), rows, R, A)
    assert np.isinf(new[0]).all()
    np.testing.assert_allclose(new[1], weighted_mean(ROWS[:4], A[:4]))


@pytest.mark.parametrize("soft", [True, False])
def test_a_mean_reads_each_row_once_however_many_centers_share_it(*, soft: bool) -> None:
    read: list[int] = []

    def row(index: int) -> Flat:
        read.append(index)
        found: Flat = ROWS[index]
        return found

    R = np.ones((5, 2)) if soft else one_hot(np.array([0, 1, 0, 1, 1]), 2)
    aggregate(np.zeros((2, 3)), Rows(5, 3, row), R, A)
    assert sorted(read) == [0, 1, 2, 3, 4]


def test_means_of_rows_are_those_of_each_column_of_the_weights() -> None:
    weights = np.stack([A, np.arange(5.0)], axis=1)
    expected = [weighted_mean(ROWS, weights[:, k]) for k in (0, 1)]
    np.testing.assert_allclose(row_means(Rows.of(ROWS), weights), expected, rtol=1e-12)


@pytest.mark.parametrize(("R", "a"), [((5, 2), (5,)), ((4, 1), (5,)), ((5, 1), (4,)), ((5, 1), (5, 1))])
def test_shares_or_weights_that_do_not_fit_are_refused_alone(R: tuple[int, ...], a: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="R is"):
        aggregate(np.zeros((1, 3)), ROWS, np.ones(R), np.ones(a))


def test_a_whole_step_forgets_the_center_even_where_it_is_infinite_and_one_beyond_is_refused() -> None:
    far = np.full((1, 3), np.inf)
    np.testing.assert_allclose(aggregate(far, ROWS, np.ones((5, 1)), A, step=1.0)[0], weighted_mean(ROWS, A))
    with pytest.raises(ValueError, match="step"):
        aggregate(far, ROWS, np.ones((5, 1)), A, step=1.5)
