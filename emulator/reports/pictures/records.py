"""pictures.npz: the few numbers of a run that its pictures need and no other file of its folder holds.

Small for every run, so every run has it: at most MAX_KEPT_ROUNDS rounds of MAX_DEVICES devices' points of MAX_WIDTH
numbers in float16 (2.4 MB), shares of the same devices in MAX_SHARE_ROUNDS rounds, some dozens of images. The file has
arrays only, no pickle.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.protocol.task import I64, Array, ClientId

PICTURES_FILE = "pictures.npz"
MAX_KEPT_ROUNDS = 3  # the first, the middle and the last
MAX_DEVICES = 400  # as many as FeSEM's picture of local models shows
MAX_WIDTH = 1_024  # numbers of a point
MAX_SHARE_ROUNDS = 100  # rounds of shares
MAX_FILE_BYTES = 1 << 28  # of a file that is read


@dataclass(frozen=True, kw_only=True)
class RoundPoints:
    """Where devices stood in one round: device `who[i]` sent a model whose point is `points[i]` [width] float32."""

    round: int
    who: tuple[ClientId, ...]
    points: Array = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class CenterShares:
    """`values` [len(rounds), len(who), centers] float32: how much of each device a center stands for; NaN: unknown."""

    name: str
    rounds: tuple[int, ...]
    who: tuple[ClientId, ...]
    values: Array = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class CenterImages:
    """Training images of devices of each center: `pixels` [n, channels, side, side] uint8, `center` and `label` [n]."""

    pixels: NDArray[np.uint8] = field(repr=False)
    center: I64
    label: I64


@dataclass(frozen=True, kw_only=True)
class PictureData:
    """The picture data of a run; `representation` names what the points are."""

    representation: str = ""
    moments: tuple[RoundPoints, ...] = ()
    shares: CenterShares | None = None
    images: CenterImages | None = None


def write_picture_data(path: Path, kept: PictureData) -> None:
    """Write the file, replacing an earlier one."""
    arrays: dict[str, Any] = {"representation": np.array(kept.representation)}
    arrays["rounds"] = np.array([moment.round for moment in kept.moments], np.int64)
    for moment in kept.moments:
        packed = _packed(moment.points)
        arrays |= {f"{key}-{moment.round}": value for key, value in packed.items()}
        arrays[f"who-{moment.round}"] = np.array(moment.who, np.str_)
    if kept.shares is not None:
        arrays |= {"shares": kept.shares.values.astype(np.float16), "shares-who": np.array(kept.shares.who, np.str_)}
        arrays |= {"shares-rounds": np.array(kept.shares.rounds, np.int64), "shares-name": np.array(kept.shares.name)}
    if kept.images is not None:
        arrays |= {"images": kept.images.pixels, "image-center": kept.images.center, "image-label": kept.images.label}
    np.savez_compressed(path, **arrays)


def read_picture_data(path: Path) -> PictureData:
    """What `write_picture_data` wrote; nothing kept where there is no such file.

    Raises ValueError for anything else.
    """
    if not path.is_file():
        return PictureData()
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_FILE_BYTES:
                raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            held = dict(arrays)
        return _of_arrays(held)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, IndexError) as wrong:
        raise ValueError(f"{path.name}: {wrong!r}") from wrong


def _of_arrays(held: Mapping[str, Array]) -> PictureData:
    moments = []
    for number in held["rounds"].tolist():
        points = held[f"offsets-{number}"].astype(np.float32) * held[f"scale-{number}"] + held[f"middle-{number}"]
        who = _names(held[f"who-{number}"], len(points))
        moments.append(RoundPoints(round=number, who=who, points=points))
    shares, images = None, None
    if "shares" in held:
        values, rounds = held["shares"].astype(np.float32), tuple(held["shares-rounds"].tolist())
        who = _names(held["shares-who"], values.shape[1])
        if values.ndim != 3 or len(rounds) != len(values):  # noqa: PLR2004 - rounds, devices, centers
            raise ValueError(f"shares of shape {values.shape} in {len(rounds)} rounds")
        shares = CenterShares(name=str(held["shares-name"]), rounds=rounds, who=who, values=values)
    if "images" in held:
        images = CenterImages(pixels=held["images"], center=held["image-center"], label=held["image-label"])
        if images.pixels.ndim != 4 or not len(images.pixels) == len(images.center) == len(images.label):  # noqa: PLR2004 - images, channels, two sides
            raise ValueError(f"images of shape {images.pixels.shape}")
    return PictureData(representation=str(held["representation"]), moments=tuple(moments), shares=shares, images=images)


def _names(array: Array, count: int) -> tuple[ClientId, ...]:
    if array.dtype.kind != "U" or array.shape != (count,):
        raise ValueError(f"names of kind {array.dtype} and shape {array.shape}, expected {count}")
    return tuple(array.tolist())


def _packed(points: Array) -> dict[str, Array]:
    """[m, d] as their float32 mean and float16 offsets from it, in units of the largest.

    Devices of one cluster have a cosine above 0.999: the models themselves in float16 would not tell them apart.
    """
    middle = points.mean(axis=0, dtype=np.float64).astype(np.float32)
    offsets = points - middle
    scale = np.float32(np.abs(offsets).max(initial=0.0)) or np.float32(1)
    return {"offsets": (offsets / scale).astype(np.float16), "scale": np.asarray(scale), "middle": middle}
