"""FEMNIST and CelebA as LEAF's preprocess.sh leaves them: JSON files of users, in `train` and `test` folders.

{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}; x holds 784 numbers in 0..1, or names of image files.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.images import FORMATS
from edge_client.errors import ConfigError, RuntimeMissing, install_hint
from edge_client.protocol.task import Array
from emulator.data.loaders.folder import DataFolderReader
from emulator.data.loaders.samples import DataSet, RawSamples, to_float, to_unit_range

FILE_LIMIT_BYTES, IMAGE_LIMIT_BYTES = 4 << 30, 1 << 24
FEMNIST_CLASSES, FEMNIST_PIXELS = 62, 28 * 28
CELEBA_SIDE, CELEBA_CLASSES = 84, 2
IMAGES = "celeba/img_align_celeba"


def femnist(folder: DataFolderReader) -> DataSet:
    """Digits and letters by writer, [1, 28, 28], 0..1, 62 classes; a user is a writer."""
    return _parts(folder, "femnist", FEMNIST_CLASSES, _femnist_image, ready=to_unit_range)


def celeba(folder: DataFolderReader) -> DataSet:
    """Smiling or not, by celebrity, [3, 84, 84], 0..255 as LEAF has it; a user is a celebrity."""

    def image(name: object) -> Array:
        if not isinstance(name, str) or Path(name).name != name or not folder.has(f"{IMAGES}/{name}"):
            raise ValueError(f"no image {name!r:.60} in {IMAGES} or {IMAGES}.zip")
        return _picture(name, folder.read(f"{IMAGES}/{name}", limit=IMAGE_LIMIT_BYTES))

    return _parts(folder, "celeba", CELEBA_CLASSES, image, ready=to_float)


def _parts(folder: DataFolderReader, home: str, classes: int, image: Any, ready: Any) -> DataSet:  # noqa: ANN401 - two functions
    users: dict[str, int] = {}
    train, test = (_part(folder, f"{home}/{name}", classes, image, users) for name in ("train", "test"))
    return DataSet(train=train, test=test, ready=ready)


def _part(folder: DataFolderReader, name: str, classes: int, image: Any, users: dict[str, int]) -> RawSamples:  # noqa: ANN401 - a function
    """All .json files of one folder; `users` numbers users by their names and grows."""
    files = sorted((folder.path / name).glob("*.json")) if (folder.path / name).is_dir() else []
    if not files:
        raise folder.missing_file_error(f"{name}/*.json")
    x: list[Array] = []
    y: list[int] = []
    who: list[int] = []
    for file in files:
        relative = f"{name}/{file.name}"
        try:
            raw = json.loads(folder.read(relative, limit=FILE_LIMIT_BYTES))
            for user in raw["users"]:
                held = raw["user_data"][user]
                labels = [_label(label, classes) for label in held["y"]]
                x += [image(one) for one in held["x"]]
                y += labels
                who += [users.setdefault(str(user), len(users))] * len(labels)
            if len(x) != len(y):
                raise ValueError(f"{len(x)} samples and {len(y)} labels")  # noqa: TRY301 - joins the parser's own
        except ConfigError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as wrong:
            raise folder.format_error(relative, f"not LEAF's format: {wrong!r:.200}") from wrong
    if not x:
        raise folder.format_error(name, "no samples")
    return RawSamples(x=np.stack(x), y=np.array(y, np.int64), user=np.array(who, np.int64))


def _label(value: object, classes: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < classes or value != int(value):
        raise ValueError(f"label {value!r:.40} of {classes} classes")
    return int(value)


def _femnist_image(values: object) -> Array:
    """784 numbers in 0..1 -> [1, 28, 28] uint8; they were made by dividing by 255, so nothing is lost."""
    row = np.asarray(values, dtype=np.float64)
    if row.shape != (FEMNIST_PIXELS,) or not ((row >= 0) & (row <= 1)).all():
        raise ValueError(f"a sample of shape {row.shape}, expected {FEMNIST_PIXELS} numbers from 0 to 1")
    return np.rint(row * 255).astype(np.uint8).reshape(1, 28, 28)


def _picture(name: str, content: bytes) -> Array:
    """[3, 84, 84] uint8."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as missing:
        raise RuntimeMissing("Pillow is not installed", hint=install_hint("emulator")) from missing
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            small = picture.resize((CELEBA_SIDE, CELEBA_SIDE)).convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as wrong:
        raise ValueError(f"{name} is no image: {wrong}") from wrong
    return np.asarray(small, dtype=np.uint8).transpose(2, 0, 1)
