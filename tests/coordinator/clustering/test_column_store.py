from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from coordinator.clustering import column_store
from coordinator.clustering.backend import select_backend
from coordinator.clustering.column_store import COLUMNS, ColumnStore
from coordinator.clustering.gram import GramMatrix, gram_matrix
from edge_client.errors import ConfigError

ROWS = np.random.default_rng(0).standard_normal((40, 2 * COLUMNS + 50)).astype(np.float32)


@pytest.fixture
def in_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_store, "MEMORY_BYTES", 0)


def filled(capacity: int) -> ColumnStore:
    store = ColumnStore(capacity, ROWS.shape[1], ROWS.dtype)
    for index, row in enumerate(ROWS[:capacity]):
        store.put(index, row)
    return store


@pytest.mark.usefixtures("in_file")
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, COLUMNS), (7, COLUMNS + 3), (COLUMNS, 2 * COLUMNS + 50)])
def test_columns_come_back_from_the_file_as_they_were_put(start: int, stop: int) -> None:
    store = filled(40)
    assert store.in_file
    np.testing.assert_array_equal(store.columns(start, stop), ROWS[:, start:stop])
    np.testing.assert_array_equal(store.columns(start, stop, first=3, last=9), ROWS[3:9, start:stop])


@pytest.mark.usefixtures("in_file")
def test_a_grown_store_holds_what_was_there_and_zeros() -> None:
    more = filled(20).grown(40)
    np.testing.assert_array_equal(more.columns(0, ROWS.shape[1], last=20), ROWS[:20])
    assert not more.columns(0, ROWS.shape[1], first=20).any()


def test_the_gram_matrix_has_the_same_bits_whether_points_are_in_a_file_or_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = gram_matrix(ROWS, where=select_backend("cpu"))
    monkeypatch.setattr(column_store, "MEMORY_BYTES", 0)
    np.testing.assert_array_equal(gram_matrix(ROWS, where=select_backend("cpu")), here)
    grown = GramMatrix(ROWS.mean(axis=0, dtype=np.float64).astype(np.float32), 5, where=select_backend("cpu"))
    for row in ROWS:
        if grown.n == grown.capacity:
            grown.grow(grown.capacity + 7)
        grown.add(row)
    np.testing.assert_array_equal(grown.matrix, here)


def test_nothing_is_written_while_the_rows_fit_into_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
    assert not filled(40).in_file


@pytest.mark.usefixtures("in_file")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(1)
    with Path("/dev/full").open("r+b", buffering=0) as full:
        monkeypatch.setattr(store, "_file", full)
        with pytest.raises(ConfigError, match="No space left on device") as caught:
            store.put(0, ROWS[0])
    assert "TMPDIR" in str(caught.value.hint)
