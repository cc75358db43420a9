from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from coordinator.aggregation.centers import aggregate, one_hot
from coordinator.aggregation.robust import REDUCER_NAMES, make_reducer
from coordinator.aggregation.rows import BLOCK_VALUES, Rows, column_blocks
from coordinator.clustering import column_store

RNG = np.random.default_rng(0)
ARRAY = RNG.standard_normal((40, 20_000)).astype(np.float32)


def lazy(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Rows:
    return Rows(len(array), array.shape[1], lambda i: array[i].copy())


def test_rows_are_an_array_that_is_read_when_it_is_used() -> None:
    rows = lazy(ARRAY)
    assert rows.shape == ARRAY.shape
    np.testing.assert_array_equal(np.stack(list(rows)), ARRAY)
    np.testing.assert_array_equal(np.stack(list(rows.select([3, 1]))), ARRAY[[3, 1]])
    np.testing.assert_array_equal(np.stack(list(rows.map(lambda row: row[:7] - 1, 7))), ARRAY[:, :7] - 1)
    np.testing.assert_array_equal(np.stack(list(rows.select([0]).then(rows.select([2])))), ARRAY[[0, 2]])
    np.testing.assert_array_equal(rows[-1], ARRAY[-1])
    with pytest.raises(IndexError):
        rows[40]


def test_rows_are_in_memory_only_where_all_of_them_are() -> None:
    here, elsewhere = Rows.of(ARRAY), lazy(ARRAY)
    assert [a.then(b).held for a in (here, elsewhere) for b in (here, elsewhere)] == [True, False, False, False]
    assert (here.select([1]).held, elsewhere.select([1]).held, here.map(lambda row: row).held) == (True, False, False)


@pytest.mark.parametrize("held", [True, False])
def test_rows_come_by_columns_too(*, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_store, "MEMORY_BYTES", 0)
    read = (Rows.of(ARRAY) if held else lazy(ARRAY)).by_columns()
    np.testing.assert_array_equal(read(slice(5_000, 9_000)), ARRAY[:, 5_000:9_000])


@pytest.mark.parametrize("rows", [0, 1, 1_000, BLOCK_VALUES, 2 * BLOCK_VALUES])
@pytest.mark.parametrize("most", [1, 2, 5_000])
def test_blocks_cover_the_columns_in_order_and_hold_few_values(rows: int, most: int) -> None:
    blocks = list(column_blocks(3, 7_003, rows, most))
    widths = [block.stop - block.start for block in blocks]
    assert (blocks[0].start, blocks[-1].stop) == (3, 7_003)
    assert all(one.stop == following.start for one, following in pairwise(blocks))
    assert max(widths) <= most
    assert max(widths) == 1 or max(widths) * rows <= BLOCK_VALUES


def test_a_block_of_few_rows_has_as_many_values_as_one_of_many() -> None:
    for rows in (0, 1, 2):
        widths = [block.stop - block.start for block in column_blocks(0, BLOCK_VALUES, rows, 2 * BLOCK_VALUES)]
        assert widths == [BLOCK_VALUES // max(rows, 1)] * max(rows, 1)


def test_no_rows_have_no_columns() -> None:
    with pytest.raises(ValueError, match="there are no rows"):
        lazy(ARRAY[:0]).by_columns()


@pytest.mark.parametrize("name", REDUCER_NAMES)
@pytest.mark.parametrize("soft", [True, False])
def test_centers_have_the_same_bits_whether_updates_are_in_memory_or_read(
    *, name: str, soft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    centers, n = RNG.standard_normal((3, 20_000)).astype(np.float32), RNG.random(40) + 0.1
    R = RNG.random((40, 3)) if soft else one_hot(np.arange(40) % 3, 3)
    settings = {"reduce": make_reducer(name, trim=0.2), "n_params": 19_000, "n": n}
    here = aggregate(centers, ARRAY, R, n, **settings)  # type: ignore[arg-type]
    monkeypatch.setattr(column_store, "MEMORY_BYTES", 0)
    np.testing.assert_array_equal(aggregate(centers, lazy(ARRAY), R, n, **settings), here)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REDUCER_NAMES)
def test_the_memory_of_an_aggregation_does_not_grow_with_the_devices(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_store, "MEMORY_BYTES", 0)
    width = 30_000
    value = np.random.default_rng(1).standard_normal(width).astype(np.float32)

    def peak(devices: int) -> int:
        rows = Rows(devices, width, lambda i: value + np.float32(i))
        tracemalloc.start()
        aggregate(value[None], rows, np.ones((devices, 1)), np.ones(devices), reduce=make_reducer(name, trim=0.1))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    # Threads that other tests have left allocate too, in some tries.
    assert any(peak(300) < 1.3 * peak(150) for _ in range(3))
