"""One image file as one sample, by Pillow: x [1, channels, height, width] float32 and its class.

`[images]` of schema.toml: `size` = [height, width], `channels` = 1 or 3, `classes` = the folders' names in their order,
and perhaps `mean` and `scale`: pixels become (value / 255 - mean) / scale. Pictures are turned as their camera says,
and those of 16 bits have the range of others, as in a browser. Where one is transparent it lies on white.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_client.errors import RuntimeMissing, install_hint
from edge_client.protocol.task import Array

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")  # whatever a file is called; for EPS Pillow starts a program
IMAGE_KEYS = ("size", "channels", "classes", "mean", "scale")
PILLOW_MODES = {1: "L", 3: "RGB"}
SIXTEEN_BITS = ("I", "I;16")  # modes of a PNG file of 16 bits, by the version of Pillow
MAX_PIXELS = 64_000_000  # a picture that says it is larger is not opened


class DamagedPicture(ValueError):
    """A file that is no picture, or that cannot be read."""


def read_image(path: Path, table: Mapping[str, Any], *, label: str) -> tuple[Array, Array]:
    """-> (x [1, channels, height, width], y [1]). Raises DamagedPicture, and ValueError for a picture of no class."""
    try:
        from PIL import Image, ImageOps
    except ImportError as missing:
        raise RuntimeMissing(
            "pictures need Pillow, which is not installed",
            hint=f"{install_hint('images')}, or flash the board with --images",
        ) from missing
    height, width = (int(side) for side in table["size"])
    mode = PILLOW_MODES.get(table.get("channels", 3))
    names = [str(name) for name in table["classes"]]
    if mode is None:
        raise ValueError("schema.toml: channels must be 1 or 3")
    if label not in names:
        raise ValueError(f"the folder {label!r} is not among the classes of schema.toml")
    try:
        with Image.open(path, formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels are too many")  # noqa: TRY301 - joins Pillow's
            upright = _with_range(ImageOps.exif_transpose(picture), mode)
            pixels = np.asarray(upright.resize((width, height), Image.Resampling.BILINEAR), dtype=np.float32)
    except (
        OSError,
        ValueError,
        SyntaxError,
        TypeError,
        EOFError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
    ) as wrong:  # Pillow's own ways
        raise DamagedPicture(f"it is damaged, or not {', '.join(FORMATS)}: {wrong}") from wrong
    if mode == "RGB" and pixels.ndim == 2:  # noqa: PLR2004 - gray: the same in each channel
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    x = pixels.reshape(height, width, -1).transpose(2, 0, 1)[None] / np.float32(255)
    x = (x - np.float32(table.get("mean", 0.0))) / np.float32(table.get("scale", 1.0))
    return np.ascontiguousarray(x, dtype=np.float32), np.array([names.index(label)])


def _with_range(picture: Picture, mode: str) -> Picture:
    """In this mode with values from 0 to 255; one of 16 bits in gray, whose values Pillow would cut off at 255."""
    from PIL import Image

    if picture.mode not in SIXTEEN_BITS:
        if "A" in picture.getbands() or "transparency" in picture.info:
            clear = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
        return picture.convert(mode)
    return Image.fromarray(np.asarray(picture, dtype=np.float32) / np.float32(257))
