"""A folder that changes: only the files that have changed are read again."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.data import images
from edge_client.data.dataset import DataFolder, load_folder
from edge_client.protocol.task import Array

SCHEMA = '[images]\nsize = [2, 3]\nchannels = 1\nclasses = ["cat", "dog"]\n'


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the pictures that were read, in order."""
    names, look = list[str](), images.read_image

    def noted(path: Path, *given: Any, **more: Any) -> tuple[Array, Array]:  # noqa: ANN401 - as the function has it
        names.append(path.name)
        return look(path, *given, **more)

    monkeypatch.setattr(images, "read_image", noted)
    return names


def photo(folder: Path, name: str, shade: int, *, at: int, split: str = "train") -> Path:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (pip install '.[images]')")
    path = folder / split / ("dog" if shade % 2 else "cat") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("L", (6, 4), shade).save(path)
    os.utime(path, (at, at))
    return path


def same(samples: DataFolder, folder: Path, most: int = 0) -> None:
    """The samples after a change are those of a device that starts now."""
    found, fresh = samples.reload_if_changed(), load_folder(folder, limit=most)
    assert found is not None
    for mine, theirs in ((found.train, fresh.train), (found.test, fresh.test)):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert np.array_equal(mine.x, theirs.x)
            assert np.array_equal(mine.y, theirs.y)


@pytest.mark.parametrize("most", [0, 3])
def test_a_new_photo_makes_the_device_read_that_one_alone(tmp_path: Path, read: list[str], most: int) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    for at in range(4):
        photo(tmp_path, f"{at}.png", 10 * at + at % 2, at=at)
    photo(tmp_path, "t.png", 7, at=1, split="test")
    samples = DataFolder(tmp_path, most=most)
    samples.load()
    for at in (4, 5):
        photo(tmp_path, f"{at}.png", 10 * at + at % 2, at=at)
        read.clear()
        again = samples.reload_if_changed()
        assert again is not None
        assert read == [f"{at}.png"]
    photo(tmp_path, "6.png", 66, at=6)
    same(samples, tmp_path, most)


def test_a_photo_that_was_changed_or_removed_is_not_kept(tmp_path: Path, read: list[str]) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    first, second = (photo(tmp_path, f"{at}.png", 20 * at, at=at) for at in (1, 2))
    samples = DataFolder(tmp_path)
    samples.load()
    photo(tmp_path, "1.png", 80, at=3)
    read.clear()
    assert samples.reload_if_changed() is not None
    assert read == ["1.png"]
    second.unlink()
    same(samples, tmp_path)
    first.write_bytes(b"half")
    assert samples.reload_if_changed() is None
    photo(tmp_path, "1.png", 60, at=4)
    same(samples, tmp_path)


def test_another_schema_reads_every_photo_again(tmp_path: Path, read: list[str]) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    for at in (1, 2):
        photo(tmp_path, f"{at}.png", 20 * at, at=at)
    samples = DataFolder(tmp_path)
    samples.load()
    (tmp_path / "schema.toml").write_text(SCHEMA + "mean = 0.5\n")
    read.clear()
    same(samples, tmp_path)
    assert read[:2] == ["2.png", "1.png"]


def test_labels_that_changed_beside_their_samples_are_read(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    np.save(tmp_path / "train" / "a.x.npy", np.zeros((2, 3), np.float32))
    np.save(tmp_path / "train" / "a.y.npy", np.array([0, 1]))
    samples = DataFolder(tmp_path)
    samples.load()
    np.save(tmp_path / "train" / "a.y.npy", np.array([1, 0]))
    os.utime(tmp_path / "train" / "a.y.npy", (1, 1))
    found = samples.reload_if_changed()
    assert found is not None
    assert found.train.y.tolist() == [1, 0]


def test_samples_for_which_there_is_no_memory_leave_those_of_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.savez(tmp_path / "train.npz", x=np.zeros((2, 3), np.float32), y=np.array([0, 1]))
    samples = DataFolder(tmp_path)
    samples.load()
    (tmp_path / "train").mkdir()
    with (tmp_path / "train" / "b.x.npy").open("wb") as file:  # more than any address space
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 46, 3)})
    assert samples.reload_if_changed() is None
    assert "new samples cannot be used, so those before are: " in caplog.text


def test_a_file_that_a_copy_replaced_with_its_size_and_time_is_read(tmp_path: Path) -> None:
    path, samples = tmp_path / "train.npz", DataFolder(tmp_path)
    np.savez(path, x=np.zeros((2, 3), np.float32), y=np.array([0, 1]))
    os.utime(path, (1, 1))
    before = path.stat()
    samples.load()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # for one tick of the clock
        np.savez(path, x=np.ones((2, 3), np.float32), y=np.array([0, 1]))
        os.utime(path, (1, 1))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    same(samples, tmp_path)


def test_a_try_that_fails_at_the_held_out_samples_leaves_no_second_copy_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    x = np.zeros((1_000, 1_000), np.float32)
    np.savez(tmp_path / "train" / "a.npz", x=x, y=np.zeros(1_000, np.int64))
    samples = DataFolder(tmp_path)
    mine = samples.load()
    np.savez(tmp_path / "train" / "b.npz", x=x[:1], y=np.zeros(1, np.int64))
    (tmp_path / "test.npz").write_bytes(b"half")
    tracemalloc.start()
    try:
        assert samples.reload_if_changed() is None
        assert tracemalloc.get_traced_memory()[0] < x.nbytes // 2
    finally:
        tracemalloc.stop()
    assert len(mine.train) == len(x)
