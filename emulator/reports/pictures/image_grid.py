"""Sample images of every center, as FeSEM shows FEMNIST and CelebA: their choice and their picture.

Images are square, with one or three channels. The label under an image is its device's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import Array, ClientId
from emulator.reports.pictures.records import CenterImages

if TYPE_CHECKING:  # a run keeps images without loading a drawing library
    from matplotlib.axes import Axes

MAX_IMAGES_PER_CENTER = 12
MAX_CENTERS = 10
SMALLEST_SIDE = 8
IMAGE_CHANNELS = (1, 3)
GAP = 0.12  # of an image's side
LABEL_ROOM = 0.35


def pick_images(devices: Mapping[ClientId, DeviceData], assignment: Mapping[ClientId, int]) -> CenterImages | None:
    """Up to MAX_IMAGES_PER_CENTER training images of each center, from its devices in turn; None without any."""
    chosen: list[tuple[int, int, NDArray[np.uint8]]] = []
    for k in sorted(set(assignment.values()))[:MAX_CENTERS]:
        members = (devices[c].train for c in sorted(assignment) if assignment[c] == k and c in devices)
        enough = islice((data for data in members if _is_image(data)), MAX_IMAGES_PER_CENTER)  # each gives one at least
        for data, i in _in_turn(list(enough)):
            chosen.append((k, int(data.y[i]), _gray(data.x[i], data.x)))
    if not chosen:
        return None
    center, label = (np.array([row[i] for row in chosen], np.int64) for i in (0, 1))
    return CenterImages(pixels=np.stack([row[2] for row in chosen]), center=center, label=label)


def draw_images(axes: Axes, images: CenterImages) -> None:
    """One row of images per center, in the order they were kept, each over its label."""
    centers, side = sorted(set(images.center.tolist())), 1.0
    for row, k in enumerate(centers):
        for column, i in enumerate(np.flatnonzero(images.center == k).tolist()):
            left, top = column * (side + GAP), row * (side + GAP + LABEL_ROOM)
            pixels = images.pixels[i].transpose(1, 2, 0)
            axes.imshow(
                pixels.squeeze(axis=2) if pixels.shape[2] == 1 else pixels,
                extent=(left, left + side, top + side, top),
                cmap="gray",
                vmin=0,
                vmax=255,
                interpolation="nearest",
            )
            axes.text(left + side / 2, top + side + 0.04, str(images.label[i]), ha="center", va="top", fontsize=8)
    width = max(int((images.center == k).sum()) for k in centers) * (side + GAP) - GAP
    axes.set(xlim=(-0.05, width + 0.05), ylim=(len(centers) * (side + GAP + LABEL_ROOM) - GAP, -0.05), xticks=[])
    axes.set(title="Training images of the devices of each center, with their own labels")
    axes.set_yticks([row * (side + GAP + LABEL_ROOM) + side / 2 for row in range(len(centers))])
    axes.set_yticklabels([f"center {k}" for k in centers])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _is_image(data: Dataset) -> bool:
    shape = data.x.shape[1:]
    square = len(shape) == 3 and shape[0] in IMAGE_CHANNELS and shape[1] == shape[2] >= SMALLEST_SIDE  # noqa: PLR2004 - channels and two sides
    return (
        square
        and len(data) > 0
        and data.y.ndim == 1
        and bool(np.issubdtype(data.y.dtype, np.integer))
        and bool(np.isfinite(data.x).all())
    )


def _in_turn(members: list[Dataset]) -> list[tuple[Dataset, int]]:
    """The first image of each device, then the second of each, and so on."""
    depth = max((len(data) for data in members), default=0)
    found: list[tuple[Dataset, int]] = []
    for i in range(min(depth, MAX_IMAGES_PER_CENTER)):
        found += [(data, i) for data in members if i < len(data)][: MAX_IMAGES_PER_CENTER - len(found)]
    return found


def _gray(image: Array, of: Array) -> NDArray[np.uint8]:
    """[channels, side, side] as 0..255 between the least and the largest pixel that the device has."""
    low, high = float(of.min()), float(of.max())
    return np.asarray(np.round((image - low) * (255 / (high - low) if high > low else 0.0)), np.uint8)
