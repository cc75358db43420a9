from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.errors import ConfigError
from emulator.data.loaders import leaf
from tests.support.raw_data_files import unknown, write_leaf

WHITE, HALF = [1.0] * 784, [128 / 255] * 784


def test_femnist_comes_by_writer_and_loses_no_grey(tmp_path: Path) -> None:
    write_leaf(tmp_path, "femnist", {"f01": ([WHITE, HALF], [3, 61]), "f02": ([HALF], [0])})
    data = leaf.femnist(unknown(tmp_path))
    assert data.train.x.shape == (3, 1, 28, 28)
    assert data.train.y.tolist() == [3, 61, 0]
    assert data.train.user is not None
    assert data.train.user.tolist() == [0, 0, 1]
    assert data.test is not None
    assert data.test.user is not None
    assert data.test.user.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(data.dataset(data.train).x[1], np.full((1, 28, 28), np.float32(128 / 255)))


@pytest.mark.parametrize("packed", [True, False])
def test_celeba_opens_the_pictures_that_the_users_name(tmp_path: Path, *, packed: bool) -> None:
    from PIL import Image

    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    Image.new("RGB", (178, 218), (10, 20, 30)).save(folder / "000001.png")
    if packed:
        shutil.make_archive(str(folder), "zip", tmp_path / "celeba", "img_align_celeba")
        shutil.rmtree(folder)
    write_leaf(tmp_path, "celeba", {"12": (["000001.png"], [1])})
    data = leaf.celeba(unknown(tmp_path))
    assert data.train.x.shape == (1, 3, 84, 84)
    assert data.train.x[0, :, 40, 40].tolist() == [10, 20, 30]
    assert data.dataset(data.train).x.max() == 30.0  # LEAF does not scale


@pytest.mark.parametrize("name", ["../000001.png", "/etc/passwd", "absent.png", 7])
def test_a_picture_outside_its_folder_is_refused(tmp_path: Path, name: object) -> None:
    write_leaf(tmp_path, "celeba", {"12": ([name], [1])})
    with pytest.raises(ConfigError, match="no image"):
        leaf.celeba(unknown(tmp_path))


@pytest.mark.parametrize(
    "users",
    [
        {"u": ([WHITE], [62])},
        {"u": ([WHITE], [-1])},
        {"u": ([WHITE], [0.5])},
        {"u": ([WHITE], [True])},
        {"u": ([WHITE], [float("inf")])},
        {"u": ([WHITE], [float("nan")])},
        {"u": ([WHITE], [])},
        {"u": ([[2.0] * 784], [0])},
        {"u": ([[0.0] * 783], [0])},
        {"u": ([["a"] * 784], [0])},
        {},
    ],
)
def test_samples_that_are_no_letters_are_refused(tmp_path: Path, users: dict[str, Any]) -> None:
    write_leaf(tmp_path, "femnist", users)
    with pytest.raises(ConfigError) as wrong:
        leaf.femnist(unknown(tmp_path))
    assert "TalwalkarLab/leaf" in wrong.value.hint


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"users": ["a"], "user_data": {}}', "[" * 100_000])
def test_json_that_is_not_leafs_is_refused(tmp_path: Path, text: str) -> None:
    write_leaf(tmp_path, "femnist", {"u": ([WHITE], [0])})
    (tmp_path / "femnist" / "train" / "all_data_0.json").write_text(text)
    with pytest.raises(ConfigError, match="not LEAF's format"):
        leaf.femnist(unknown(tmp_path))


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"femnist/train/\*\.json") as wrong:
        leaf.femnist(unknown(tmp_path))
    assert "preprocess.sh" in wrong.value.hint
    assert json.dumps(wrong.value.message)
