"""The laws of reducers. Rows are drawn with few distinct values too, since ties are where orders show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from coordinator.aggregation.centers import aggregate
from coordinator.aggregation.robust import REDUCER_NAMES, make_reducer, median, trimmed_mean, weighted_mean
from edge_client.errors import ConfigError
from edge_client.protocol.task import Array

RNG = np.random.default_rng(0)
ROWS, A = RNG.standard_normal((5, 3)), RNG.random(5) + 0.1
ROBUST = REDUCER_NAMES[1:]
every = pytest.mark.parametrize("name", REDUCER_NAMES)
robust = pytest.mark.parametrize("name", ROBUST)
SEEDS = st.integers(0, 9_999)
FAR = st.sampled_from([3.0, 1e3, 1e9])  # where the hostile rows are, in units of the honest ones


def rows_of(seed: int, m: int, p: int = 4) -> Array:
    """[m, p] some with ties."""
    rng = np.random.default_rng(seed)
    return rng.integers(-2, 3, (m, p)).astype(float) if seed % 3 == 0 else rng.standard_normal((m, p))


def one(name: str, rows: Array, *, center: Array | None = None, R: Array | None = None, trim: float = 0.2) -> Array:
    """What becomes of a single center [p]."""
    old = np.zeros_like(rows[:1]) if center is None else center[None]
    by = np.ones((len(rows), 1)) if R is None else R[:, None]
    new: Array = aggregate(old, rows, by, np.ones(len(rows)), reduce=make_reducer(name, trim=trim))[0]
    return new


def attacked(seed: int, far: float, honest: int, hostile: int) -> tuple[Array, Array]:
    """Honest rows about a point that is not zero, and hostile ones that agree with each other or do not."""
    rng = np.random.default_rng(seed)
    good = rng.standard_normal((honest, 4)) + rng.standard_normal(4)
    bad = far * rng.standard_normal((1 if seed % 2 else hostile, 4))
    return good, np.broadcast_to(bad, (hostile, 4))


@every
@given(seed=SEEDS, m=st.integers(1, 9))
@example(seed=8034, m=3)  # a geometric median at a row: its distance there is only rounding of the Gram matrix
def test_who_comes_first_is_no_matter(name: str, seed: int, m: int) -> None:
    rows, rng = rows_of(seed, m), np.random.default_rng(seed)
    order, R = rng.permutation(m), rng.integers(1, 4, m).astype(float)
    np.testing.assert_allclose(one(name, rows[order], R=R[order]), one(name, rows, R=R), atol=1e-9)


@every
@given(seed=SEEDS, m=st.integers(1, 9))
def test_equal_rows_are_their_own_mean(name: str, seed: int, m: int) -> None:
    row = rows_of(seed, 1)
    np.testing.assert_allclose(one(name, np.repeat(row, m, axis=0), center=rows_of(seed + 1, 1)[0]), row[0], atol=1e-12)


@every
@given(seed=SEEDS, m=st.integers(1, 9))
def test_moving_everything_moves_the_result(name: str, seed: int, m: int) -> None:
    rows, center = rows_of(seed, m), rows_of(seed + 1, 1)[0]
    by = np.array([7.0, -11.0, 0.5, 100.0])
    moved = one(name, rows + by, center=center + by)
    np.testing.assert_allclose(moved, one(name, rows, center=center) + by, atol=1e-6)


@robust
@given(seed=SEEDS, m=st.integers(1, 9))
def test_no_device_counts_more_for_the_samples_that_it_claims(name: str, seed: int, m: int) -> None:
    rows, claims = rows_of(seed, m), np.random.default_rng(seed).random(m) + 0.1
    by = {"reduce": make_reducer(name, trim=0.2)}
    old = np.zeros((1, 4))
    claimed = aggregate(old, rows, np.ones((m, 1)), claims, **by, n_params=2, n=claims)  # type: ignore[arg-type]
    np.testing.assert_array_equal(claimed, aggregate(old, rows, np.ones((m, 1)), np.ones(m), **by, n_params=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["median", "geometric-median"])  # others cut whole rows off, or count them
@given(seed=SEEDS, m=st.integers(1, 7))
def test_a_responsibility_of_two_counts_as_two_devices(name: str, seed: int, m: int) -> None:
    rows, times = rows_of(seed, m), np.random.default_rng(seed).integers(1, 3, m)
    repeated = one(name, np.repeat(rows, times, axis=0))
    np.testing.assert_allclose(one(name, rows, R=times.astype(float)), repeated, atol=1e-6)


# ---- breakdown points ----


@pytest.mark.parametrize("name", ["trimmed-mean", "median"])
@given(seed=SEEDS, far=FAR, hostile=st.integers(1, 4))
def test_within_its_bound_each_coordinate_stays_in_the_honest_range(
    name: str, seed: int, far: float, hostile: int
) -> None:
    good, bad = attacked(seed, far, 10 - hostile, hostile)
    found = one(name, np.concatenate([good, bad]), trim=0.4)
    assert (good.min(axis=0) - 1e-9 <= found).all()
    assert (found <= good.max(axis=0) + 1e-9).all()


@pytest.mark.parametrize("name", ["trimmed-mean", "multi-krum"])
def test_a_share_whose_product_is_just_below_a_whole_number_leaves_out_that_number(name: str) -> None:
    """0.29 * 100 is 29 less 4e-15."""
    good, bad = np.random.default_rng(0).standard_normal((71, 3)), np.full((29, 3), 1e6)
    assert np.abs(one(name, np.concatenate([good, bad]), trim=0.29)).max() < 10


@pytest.mark.parametrize("name", ["krum", "multi-krum"])
@given(seed=SEEDS, far=FAR, hostile=st.integers(1, 3))
def test_krum_stays_as_near_to_an_honest_row_as_its_score_promises(
    name: str, seed: int, far: float, hostile: int
) -> None:
    """Whoever is chosen scores no worse than an honest row: at most m - f - 2 squared honest diameters."""
    good, bad = attacked(seed, far, 10 - hostile, hostile)
    found = one(name, np.concatenate([good, bad]), trim=hostile / 10)
    diameter = max(float(np.linalg.norm(a - b)) for a in good for b in good)
    bound = diameter * np.sqrt(10 - hostile - 2)
    assert np.linalg.norm(good - found, axis=1).min() <= bound + diameter  # a mean of chosen rows, each that near


@given(seed=SEEDS, far=FAR, hostile=st.integers(1, 4))
def test_the_geometric_median_stays_as_near_as_its_share_of_liars_allows(seed: int, far: float, hostile: int) -> None:
    """At most 2 (1 - h) / (1 - 2 h) honest radii from the honest mean (Lopuhaa and Rousseeuw 1991, theorem 2.2)."""
    good, bad = attacked(seed, far, 10 - hostile, hostile)
    found, middle, h = one("geometric-median", np.concatenate([good, bad])), good.mean(axis=0), hostile / 10
    radius = np.linalg.norm(good - middle, axis=1).max()
    assert np.linalg.norm(found - middle) <= 2 * (1 - h) / (1 - 2 * h) * radius * (1 + 1e-6)


@given(seed=SEEDS, far=FAR, hostile=st.integers(1, 4))
def test_clipped_norms_move_a_center_no_further_than_an_honest_device(seed: int, far: float, hostile: int) -> None:
    good, bad = attacked(seed, far, 10 - hostile, hostile)
    assert np.linalg.norm(one("norm-clip", np.concatenate([good, bad]))) <= np.linalg.norm(good, axis=1).max() + 1e-9


def test_the_mean_has_no_breakdown_point() -> None:
    good, bad = attacked(1, 1e9, 9, 1)
    assert np.abs(one("mean", np.concatenate([good, bad]))).max() > 1e6


# ---- against others' implementations, and edges ----


@given(m=st.integers(1, 12), percent=st.integers(0, 49), seed=SEEDS)
def test_the_trimmed_mean_is_scipys_for_every_coordinate(m: int, percent: int, seed: int) -> None:
    trim = percent / 100
    rows = np.random.default_rng(seed).standard_normal((m, 4))
    np.testing.assert_allclose(trimmed_mean(rows, np.ones(m), trim=trim), trim_mean(rows, trim, axis=0), atol=1e-12)


def test_without_trimming_it_is_the_plain_mean() -> None:
    np.testing.assert_array_equal(trimmed_mean(ROWS, np.ones(5), trim=0.0), weighted_mean(ROWS, np.ones(5)))
    np.testing.assert_allclose(trimmed_mean(ROWS, A, trim=0.0), weighted_mean(ROWS, A), rtol=1e-12)


def test_the_median_is_numpys_and_keeps_the_dtype() -> None:
    np.testing.assert_array_equal(median(ROWS, np.ones(5)), np.median(ROWS, axis=0))
    assert median(ROWS.astype(np.float32), A).dtype == np.float32


def test_krum_takes_the_row_in_the_crowd_and_multi_krum_leaves_the_stray_out() -> None:
    rows = np.array([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [0.05, 0.05], [9.0, 9.0]])
    np.testing.assert_allclose(one("krum", rows), [0.05, 0.05])
    np.testing.assert_allclose(one("multi-krum", rows), rows[:4].mean(axis=0))


@settings(max_examples=30)
@given(seed=SEEDS)
def test_no_small_step_from_the_geometric_median_shortens_its_distances(seed: int) -> None:
    rows, rng = np.random.default_rng(seed).standard_normal((7, 4)), np.random.default_rng(seed + 1)
    found = one("geometric-median", rows)
    least = np.linalg.norm(rows - found, axis=1).sum()
    for step in 1e-3 * rng.standard_normal((20, 4)):
        assert np.linalg.norm(rows - found - step, axis=1).sum() >= least - 1e-9


def test_a_row_beyond_the_median_distance_is_clipped_to_it_and_a_nearer_one_stays() -> None:
    center, apart = np.array([5.0, 5.0]), np.array([[1.0, 0.0], [0.0, 2.0], [-4.0, 0.0]])
    np.testing.assert_allclose(one("norm-clip", center + apart, center=center), center + np.array([1.0 - 2.0, 2.0]) / 3)
    by = np.array([1.0, 1.0, 2.0])
    found = one("norm-clip", center + apart, center=center, R=by)
    np.testing.assert_allclose(found, center + np.array([1.0 - 2.0 * 2.0, 2.0]) / 4)


@robust
def test_without_a_share_of_hostile_rows_none_is_cut_off(name: str) -> None:
    rows = np.array([[0.0], [1.0], [3.0]])
    reducer = make_reducer(name)
    assert aggregate(np.zeros((1, 1)), rows, np.ones((3, 1)), np.ones(3), reduce=reducer).shape == (1, 1)
    if name == "trimmed-mean":
        assert reducer.columns is not None
        assert reducer.columns(rows, np.ones(3)).tolist() == [pytest.approx(4 / 3)]


def test_a_trimmed_mean_cuts_off_the_values_that_weigh_so_much_at_either_end_and_no_more() -> None:
    rows, weights = np.array([[9.0], [0.0], [4.0], [5.0], [1.0]]), np.array([1.0, 2.0, 3.0, 3.0, 1.0])
    rising = [1, 4, 2, 3, 0]  # of weights 2, 1, 3, 3, 1
    for trim, kept in ((0.1, rising[:4]), (0.2, rising[1:4]), (0.29, rising[1:4]), (0.3, rising[2:4])):
        expected = weights[kept] @ rows[kept] / weights[kept].sum()
        np.testing.assert_allclose(trimmed_mean(rows, weights, trim=trim), expected)


@pytest.mark.parametrize(
    ("weights", "expected"), [([1, 1, 2], 3.5), ([1, 2, 3], 3.5), ([1, 1, 3], 5.0), ([3, 1, 1], 1.0), ([1, 3, 1], 2.0)]
)
def test_a_weighted_median_is_the_middle_of_the_weight_or_between_the_two_that_share_it(
    weights: list[float], expected: float
) -> None:
    rows = np.array([[1.0], [2.0], [5.0]])
    for order in ([0, 1, 2], [2, 0, 1]):
        assert median(rows[order], np.array(weights, dtype=float)[order]).tolist() == [expected]


def test_krum_counts_as_many_neighbours_as_its_formula_and_takes_rows_of_one_score_together() -> None:
    """m = 6, f = 1: the distances to three neighbours; multi-krum leaves out one row."""
    rows = np.array([[0.0], [1.0], [3.0], [6.0], [10.0], [15.0]])
    apart = np.sort((rows - rows.T) ** 2, axis=1)[:, 1:4].sum(axis=1)
    assert one("krum", rows, trim=1 / 6).tolist() == rows[int(apart.argmin())].tolist()
    assert one("multi-krum", rows, trim=1 / 6).tolist() == rows[np.argsort(apart)[:5]].mean(axis=0).tolist()
    same = np.array([[-1.0], [1.0], [-3.0], [3.0]])  # two rows of the least score
    assert one("krum", same, trim=0.0).tolist() == [pytest.approx(0.0)]
    by = np.array([3.0, 1.0, 1.0, 1.0])
    assert one("krum", same, R=by, trim=0.0).tolist() == [pytest.approx(-0.5)]
    assert one("krum", np.array([[2.0], [8.0]]), trim=0.4).tolist() == [5.0]  # at least one neighbour


@every
def test_a_buffer_is_no_way_around_the_parameters(name: str) -> None:
    """A model that looks honest but for its running statistics moves those no further than any other hostile row."""
    if name == "mean":
        return
    rows = np.concatenate([RNG.standard_normal((8, 4)), np.zeros((2, 4))])
    rows[8:, 2:] = 1e9
    new = aggregate(
        np.zeros((1, 4)), rows, np.ones((10, 1)), np.ones(10), reduce=make_reducer(name, trim=0.3), n_params=2
    )
    assert np.abs(new).max() < 10


@pytest.mark.parametrize("wrong", [{"name": "max"}, {"name": "krum", "trim": 0.5}, {"name": "mean", "trim": -0.1}])
def test_unknown_reduces_and_trims_that_leave_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        make_reducer(**wrong)  # type: ignore[arg-type]
    assert refused.value.hint
