from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import Array
from emulator.reports import plots
from emulator.reports.pictures.image_grid import MAX_CENTERS, MAX_IMAGES_PER_CENTER, draw_images, pick_images
from emulator.reports.pictures.records import CenterImages


def holding(x: Array, first_label: int = 0) -> DeviceData:
    data = Dataset(x.astype(np.float32), first_label + np.arange(len(x)))
    return DeviceData(train=data, test=data)


def shades(n: int, side: int = 8, channels: int = 1) -> Array:
    """Image i is i everywhere but for one pixel of 255 and one of 0."""
    x = np.tile(np.arange(n, dtype=np.float64)[:, None, None, None], (1, channels, side, side))
    x[:, :, 0, 0], x[:, :, 0, 1] = 255, 0
    return x


def test_the_devices_of_a_center_give_an_image_each_in_turn() -> None:
    devices = {"a": holding(shades(3)), "b": holding(shades(9), 100), "c": holding(shades(2), 50)}
    found = pick_images(devices, {"a": 1, "b": 1, "c": 0})
    assert found is not None
    assert found.center.tolist() == [0, 0, *[1] * MAX_IMAGES_PER_CENTER]
    assert found.label.tolist() == [50, 51, 0, 100, 1, 101, 2, 102, 103, 104, 105, 106, 107, 108]
    assert found.pixels[5, 0, 4].tolist() == [1] * 8  # the second image of the second device is a shade of 1
    assert found.pixels.dtype == np.uint8


def test_pixels_of_any_range_become_black_to_white() -> None:
    found = pick_images({"a": holding(shades(3) / 255 * 2 - 1)}, {"a": 0})
    assert found is not None
    assert (found.pixels.min(), found.pixels.max()) == (0, 255)
    assert found.pixels[2, 0, 4, 4] == 2
    plain = pick_images({"a": holding(np.full((1, 1, 8, 8), 7.0))}, {"a": 0})
    assert plain is not None
    assert not plain.pixels.any()


@pytest.mark.parametrize("shape", [(5, 10), (5, 1, 49, 10), (5, 4, 8, 8), (5, 1, 4, 4)])
def test_what_is_no_square_picture_is_no_image(shape: tuple[int, ...]) -> None:
    assert pick_images({"a": holding(np.zeros(shape))}, {"a": 0}) is None


def test_targets_have_no_images_and_nor_has_a_fleet_without_centers() -> None:
    targets = Dataset(shades(3).astype(np.float32), np.zeros((3, 1), np.float32))
    assert pick_images({"a": DeviceData(train=targets, test=targets)}, {"a": 0}) is None
    assert pick_images({"a": holding(shades(3))}, {}) is None


def test_many_centers_keep_the_images_of_the_first() -> None:
    devices = {f"d{i:02d}": holding(shades(20)) for i in range(MAX_CENTERS + 3)}
    found = pick_images(devices, {c: i for i, c in enumerate(sorted(devices))})
    assert found is not None
    assert np.bincount(found.center).tolist() == [MAX_IMAGES_PER_CENTER] * MAX_CENTERS


@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_is_drawn_in_the_row_of_its_center_over_its_label(channels: int) -> None:
    pixels = np.arange(3 * channels * 64, dtype=np.uint16).astype(np.uint8).reshape(3, channels, 8, 8)
    images = CenterImages(pixels=pixels, center=np.array([0, 4, 4]), label=np.array([7, 8, 9]))
    axes = plots.make_figure(4, 3, lambda ax: draw_images(ax, images)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["center 0", "center 4"]
    for i, (shown, text) in enumerate(zip(axes.get_images(), axes.texts, strict=True)):
        np.testing.assert_array_equal(np.asarray(shown.get_array()), pixels[i].transpose(1, 2, 0).squeeze())
        left, right, bottom, top = shown.get_extent()
        assert left < text.get_position()[0] < right
        assert text.get_position()[1] > max(bottom, top)
        assert text.get_text() == str(images.label[i])
        assert min(bottom, top) == pytest.approx(0.0) if i == 0 else min(bottom, top) > 1
    places = {tuple(shown.get_extent()) for shown in axes.get_images()}
    assert len(places) == 3


def test_keeping_pictures_loads_no_drawing_library() -> None:
    modules = "emulator.reports.pictures.image_grid, emulator.reports.pictures.recorder"
    code = f"import sys, {modules}; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
