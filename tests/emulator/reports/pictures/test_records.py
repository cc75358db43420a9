from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_client.protocol.task import Array
from emulator.reports.pictures.records import (
    CenterImages,
    CenterShares,
    PictureData,
    RoundPoints,
    _packed,
    read_picture_data,
    write_picture_data,
)

FULL = PictureData(
    representation="classifier",
    moments=(
        RoundPoints(round=1, who=("a", "b"), points=np.array([[1.0, 2.0], [1.5, -2.0]], np.float32)),
        RoundPoints(round=4, who=("a",), points=np.array([[3.0, 3.0]], np.float32)),
    ),
    shares=CenterShares(
        name="weight", rounds=(1, 2), who=("a", "b"),
        values=np.array([[[0.25, 0.75], [np.nan, np.nan]], [[0.5, 0.5], [1.0, 0.0]]], np.float32),
    ),
    images=CenterImages(
        pixels=np.arange(64, dtype=np.uint8).reshape(1, 1, 8, 8), center=np.array([2]), label=np.array([7]),
    ),
)  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_picture_data(tmp_path / "pictures.npz", FULL)
    back = read_picture_data(tmp_path / "pictures.npz")
    assert back.representation == "classifier"
    assert [(m.round, m.who) for m in back.moments] == [(1, ("a", "b")), (4, ("a",))]
    for one, other in zip(back.moments, FULL.moments, strict=True):
        np.testing.assert_allclose(one.points, other.points, rtol=1e-3)
    assert back.shares is not None
    assert FULL.shares is not None
    assert (back.shares.name, back.shares.rounds, back.shares.who) == ("weight", (1, 2), ("a", "b"))
    np.testing.assert_array_equal(back.shares.values, FULL.shares.values)
    assert back.images is not None
    assert FULL.images is not None
    np.testing.assert_array_equal(back.images.pixels, FULL.images.pixels)
    assert (back.images.center.tolist(), back.images.label.tolist()) == ([2], [7])


def test_nothing_kept_is_written_and_read_and_a_run_without_the_file_kept_nothing(tmp_path: Path) -> None:
    assert read_picture_data(tmp_path / "pictures.npz") == PictureData()
    write_picture_data(tmp_path / "pictures.npz", PictureData(representation="all"))
    assert read_picture_data(tmp_path / "pictures.npz") == PictureData(representation="all")


POINTS = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.floats(-1e6, 1e6, width=32)
)


@given(POINTS)
@settings(max_examples=60)
def test_points_come_back_to_a_thousandth_of_the_largest_offset(points: Array) -> None:
    held = _packed(points)
    back = held["offsets"].astype(np.float32) * held["scale"] + held["middle"]
    # float16 has 11 bits; the mean and the sum are float32, good to 1e-7 of the largest number
    error = 6e-4 * float(held["scale"]) + 4e-7 * float(np.abs(points).max())
    assert np.abs(back - points).max() <= error


def test_models_that_hardly_differ_stay_apart() -> None:
    points = np.full((3, 4), 1_000.0, np.float32)
    points[1] += 0.25
    held = _packed(points)
    back = held["offsets"].astype(np.float32) * held["scale"] + held["middle"]
    np.testing.assert_allclose(back[1] - back[0], 0.25, rtol=2e-3)
    np.testing.assert_array_equal(back[2], back[0])


@pytest.mark.parametrize("change", ["bytes", "cut", "no rounds", "names", "shares", "images", "pickle"])
def test_a_damaged_file_is_a_value_error(tmp_path: Path, change: str) -> None:
    path = tmp_path / "pictures.npz"
    write_picture_data(path, FULL)
    if change == "bytes":
        path.write_bytes(b"junk")
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        with np.load(path) as arrays:
            held = dict(arrays)
        if change == "no rounds":
            del held["rounds"]
        elif change == "names":
            held["who-1"] = held["who-1"][:1]
        elif change == "shares":
            held["shares-rounds"] = np.array([1, 2, 3])
        elif change == "images":
            held["image-label"] = np.array([1, 2])
        else:
            held["who-1"] = np.array([{}, {}], dtype=object)
        np.savez(path, **held)
    with pytest.raises(ValueError, match=r".+"):
        read_picture_data(path)
