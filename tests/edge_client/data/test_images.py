"""Pictures that are damaged are named with what is wrong."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from edge_client.data.dataset import load_folder
from edge_client.errors import ConfigError

IMAGE_SCHEMA = '[images]\nsize = [2, 3]\nchannels = 1\nclasses = ["cat", "dog"]\n'


@pytest.mark.parametrize("how", ["holes", "bomb"])
def test_a_picture_that_a_card_damaged_is_named(tmp_path: Path, how: str) -> None:
    """Pillow has exceptions of its own for it, one of them a SyntaxError."""
    from PIL import Image

    (tmp_path / "schema.toml").write_text(IMAGE_SCHEMA)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    path = tmp_path / "train" / "cat" / "1.png"
    Image.fromarray(np.random.default_rng(0).integers(255, size=(200, 200, 3), dtype=np.uint8)).save(path)
    data = bytearray(path.read_bytes())
    if how == "holes":
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    else:
        data[16:24] = struct.pack(">II", 60_000, 60_000)  # width and height
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot use train/cat/1\.png: "):
        load_folder(tmp_path)


def test_a_picture_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow knows a picture by its content, whatever it is called, and draws one of PostScript with Ghostscript."""
    (tmp_path / "schema.toml").write_text(IMAGE_SCHEMA)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.png").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 3\n%%EndComments\nshowpage\n"
    )
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/started'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    with pytest.raises(ConfigError, match=r"cannot use train/cat/1\.png: "):
        load_folder(tmp_path)
    assert not (tmp_path / "started").exists()


def test_a_picture_in_a_format_that_is_not_read_is_told_with_those_that_are(tmp_path: Path) -> None:
    """It was called damaged, or no picture, though a viewer showed it."""
    from PIL import Image

    (tmp_path / "schema.toml").write_text(IMAGE_SCHEMA)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    Image.new("L", (16, 16)).save(tmp_path / "train" / "cat" / "1.jpg", format="PPM")
    with pytest.raises(ConfigError, match=r"1\.jpg: it is damaged, or not PNG, JPEG, .*TIFF: ") as refused:
        load_folder(tmp_path)
    assert "save it as PNG" in refused.value.hint


def test_a_photo_of_several_frames_is_read_as_its_first(tmp_path: Path) -> None:
    """As many phones write them, with the ending of a JPEG file (Pillow's format MPO)."""
    from PIL import Image

    (tmp_path / "schema.toml").write_text(IMAGE_SCHEMA)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    white, black = (Image.new("L", (16, 16), gray) for gray in (255, 0))
    white.save(tmp_path / "train" / "cat" / "1.jpg", format="MPO", save_all=True, append_images=[black])
    assert (load_folder(tmp_path).train.x == 1).all()


def test_a_photo_whose_note_of_the_camera_is_damaged_is_named(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "schema.toml").write_text(IMAGE_SCHEMA)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    path, note = tmp_path / "train" / "cat" / "1.jpg", Image.Exif()
    note[0x0112], note[0x011A] = 6, 72.0  # the orientation, and a fraction
    Image.new("L", (4, 4)).save(path, exif=note)
    for order in (">", "<"):
        fraction, text = (struct.pack(f"{order}HHI", 0x011A, kind, 1) for kind in (5, 7))
        path.write_bytes(path.read_bytes().replace(fraction, text))
    with pytest.raises(ConfigError, match=r"cannot use train/cat/1\.jpg: it is damaged"):
        load_folder(tmp_path)


def album(folder: Path, cats: int, dogs: int) -> list[Path]:
    """So many pictures of each class; the first one of each is half of a file."""
    from PIL import Image

    (folder / "schema.toml").write_text(IMAGE_SCHEMA)
    halves = []
    for name, count in (("cat", cats), ("dog", dogs)):
        for number in range(count):
            path = folder / "train" / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (40, 40), number).save(path)
        first = folder / "train" / name / "0.jpg"
        first.write_bytes(first.read_bytes()[:-200])
        halves.append(first)
    return halves


def test_a_damaged_photo_among_others_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    album(tmp_path, 4, 3)
    assert load_folder(tmp_path).train.y.tolist().count(0) == 3
    assert "2 of 7 files are left out: train/dog/0.jpg, train/cat/0.jpg (it is damaged" in caplog.text


def test_the_newest_samples_are_as_many_beside_a_damaged_photo(tmp_path: Path) -> None:
    for path in album(tmp_path, 4, 4):
        os.utime(path)
    assert len(load_folder(tmp_path, limit=6).train) == 6


def test_a_damaged_photo_of_a_class_whose_other_photos_are_older_than_the_newest_samples_is_left_out(
    tmp_path: Path,
) -> None:
    cat, _ = album(tmp_path, 4, 4)
    for age, path in enumerate([cat, *sorted((tmp_path / "train" / "dog").iterdir(), reverse=True)]):
        os.utime(path, (2e9 - age, 2e9 - age))
    assert load_folder(tmp_path, limit=3).train.y.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("dogs", "empty"), [(1, 0), (4, 3)])
def test_damage_to_all_photos_of_a_class_or_to_most_of_all_is_refused(tmp_path: Path, dogs: int, empty: int) -> None:
    album(tmp_path, 4, dogs)
    for number in range(empty):
        for name in ("cat", "dog"):
            (tmp_path / "train" / name / f"{number}.jpg").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot use train/.*/\d\.jpg: it is damaged") as told:
        load_folder(tmp_path)
    assert told.value.hint == "copy it again, save it as PNG, or remove it"
