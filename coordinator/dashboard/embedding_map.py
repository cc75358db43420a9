"""A map of the devices' models in two dimensions, their distances to every center, the centers' cosines. Pure.

The map shows the first two principal components of the models w_i [p] that devices sent in one round. For at most
GRAM_MAX_DEVICES devices they come from the Gram matrix of the differences to the mean center, else from a Lanczos
iteration on the same differences, which forms no n x n matrix. To bound memory, differences are kept as count sketches
(Charikar, Chen and Farach-Colton 2002) of s numbers, where 4 n s bytes are at most MAX_SKETCH_BYTES: random signs, then
the sum of every s-th number. Sketched inner products are unbiased, and exact while s >= p. Distances and cosines are
always exact. The silhouette (Rousseeuw 1987) uses at most SILHOUETTE_MAX_DEVICES devices, evenly spaced.

A principal component has no sign, and its direction changes from round to round. Each map is rotated or mirrored to
lie as close as possible to the one before (orthogonal Procrustes, Schönemann 1966).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.clustering.silhouette import silhouette
from edge_client.protocol.task import F64, I64, Array, ClientId, Flat

MAX_SKETCH_BYTES = 32 << 20
MAX_SKETCH_SIZE = 16_384  # numbers per device
GRAM_MAX_DEVICES = 512  # with more devices a Lanczos iteration replaces the Gram matrix
SILHOUETTE_MAX_DEVICES = 1_000
COLUMN_BLOCK = 512  # columns that are float64 at a time
COORDINATE_STEPS = 10_000  # of a coordinate, from the origin to the farthest point


@dataclass(frozen=True, kw_only=True)
class EmbeddingMap:
    """The map of one round with n devices and k centers. Positions are [n, 2] and [k, 2], distances [n, k].

    `assigned` [n] has the center of each device in that round; -1 for none.
    """

    devices: tuple[ClientId, ...]
    assigned: tuple[int, ...]
    device_positions: F64 = field(repr=False)
    center_positions: F64 = field(repr=False)
    distances: F64 = field(repr=False)
    cosines: F64 = field(repr=False)
    silhouette: float | None  # None with fewer than two centers that have devices
    shares: tuple[float, float]  # of the variance along each axis

    def to_json(self) -> dict[str, Any]:
        """As JSON: coordinates are integers, and the farthest one is COORDINATE_STEPS."""
        reach = (
            max(
                float(np.abs(self.device_positions).max(initial=0)), float(np.abs(self.center_positions).max(initial=0))
            )
            or 1.0
        )
        steps = [
            (values / reach * COORDINATE_STEPS).round().astype(int).tolist()
            for values in (self.device_positions, self.center_positions)
        ]
        return {
            "devices": list(self.devices),
            "assigned": list(self.assigned),
            "xy": steps[0],
            "centers": steps[1],
            "reach": reach,
            "cosine": self.cosines.round(6).tolist(),
            "silhouette": self.silhouette,
            "shares": list(self.shares),
        }

    def distance(self, cid: ClientId) -> list[float] | None:
        """The distances of one device's model to every center; None for a device that is not on the map."""
        return self.distances[self.devices.index(cid)].round(6).tolist() if cid in self.devices else None


def make_embedding_map(
    models: Iterable[tuple[ClientId, Flat]],
    centers: Array,
    assignment: Mapping[ClientId, int],
    *,
    count: int,
    before: EmbeddingMap | None = None,
) -> EmbeddingMap:
    """The map of `count` models [p] and `centers` [k, p]. Models are read one by one, and only sketches are kept.

    A `before` map of the same run turns the new one to lie close to it.
    """
    known = np.asarray(centers, np.float32)
    pivot = known.mean(axis=0)
    sketch = _Sketch(known.shape[1], count)
    rows, who, distances = np.zeros((count, sketch.size), np.float32), [], np.zeros((count, len(known)))
    for i, (cid, model) in enumerate(models):
        vector = np.asarray(model, np.float32)
        rows[i], distances[i] = sketch(vector - pivot), [np.linalg.norm(vector - center) for center in known]
        who.append(cid)
    rows, distances = rows[: len(who)], distances[: len(who)]
    labels = np.array([assignment.get(cid, -1) for cid in who])
    mean = rows.mean(axis=0) if len(rows) else np.zeros(sketch.size, np.float32)
    rows -= mean
    axes, shares = principal_axes(rows)
    plane, middles = rows @ axes, np.stack([sketch(center - pivot) - mean for center in known]) @ axes
    turn = _align(who, plane, before)
    return EmbeddingMap(
        devices=tuple(who),
        assigned=tuple(labels.tolist()),
        device_positions=plane.astype(np.float64) @ turn,
        center_positions=middles.astype(np.float64) @ turn,
        distances=distances,
        cosines=_cosines(known),
        silhouette=_mean_silhouette(rows, labels),
        shares=shares,
    )


class _Sketch:
    """A linear count sketch [p] -> [size], the same for every vector of a map."""

    def __init__(self, width: int, count: int) -> None:
        fits = max(64, min(MAX_SKETCH_SIZE, MAX_SKETCH_BYTES // (4 * max(1, count))))
        self.size = min(width, fits)
        self._rows = -(-width // self.size)
        signs = np.random.default_rng(0).integers(0, 2, width, dtype=np.int8) * 2 - 1
        self._signs = signs.astype(np.float32) if self._rows > 1 else None

    def __call__(self, vector: Flat) -> Flat:
        if self._signs is None:
            return vector
        signed = np.zeros(self._rows * self.size, np.float32)
        np.multiply(vector, self._signs, out=signed[: len(vector)])
        sketched: Flat = signed.reshape(self._rows, self.size).sum(axis=0)
        return sketched


def principal_axes(rows: Array) -> tuple[Array, tuple[float, float]]:
    """Rows [n, s] with mean zero -> axes [s, 2] of length 1 (0 without variance), and their shares of the variance."""
    axes, spread = np.zeros((rows.shape[1], 2), np.float32), float(np.einsum("ij,ij->", rows, rows, dtype=np.float64))
    if spread == 0.0:
        return axes, (0.0, 0.0)
    if min(rows.shape) <= GRAM_MAX_DEVICES:
        wide = rows.shape[1] > rows.shape[0]
        gram = (rows @ rows.T if wide else rows.T @ rows).astype(np.float64)
        values, vectors = np.linalg.eigh(gram)
        values, vectors = values[::-1][:2], vectors[:, ::-1][:, :2].astype(rows.dtype)
        found = rows.T @ vectors if wide else vectors
    else:
        from scipy.sparse.linalg import svds

        start = np.random.default_rng(0).standard_normal(min(rows.shape))
        _, singular, right = svds(rows, k=2, v0=start)
        values, found = singular[::-1] ** 2, right[::-1].T
    lengths = np.linalg.norm(found, axis=0)
    real = (lengths > 0) & (values > spread * 1e-9)  # smaller ones are float32's rounding
    axes[:, : found.shape[1]][:, real] = (found / np.where(real, lengths, 1))[:, real]
    shares = [*(np.where(real, values, 0) / spread).tolist(), 0.0, 0.0]
    return axes, (shares[0], shares[1])


def _align(who: Sequence[ClientId], plane: Array, before: EmbeddingMap | None) -> F64:
    """The rotation or reflection [2, 2] that brings devices closest to their positions in the map before."""
    if before is None:
        return np.eye(2)
    then = dict(zip(before.devices, before.device_positions, strict=True))
    both = [i for i, cid in enumerate(who) if cid in then]
    if not both:
        return np.eye(2)
    left, _, right = np.linalg.svd(plane[both].astype(np.float64).T @ np.array([then[who[i]] for i in both]))
    turn: F64 = left @ right
    return turn


def _cosines(centers: Array) -> F64:
    """Centers [k, p] -> [k, k]; the cosines of a center of zeros are 0."""
    products = _products(centers)
    lengths = np.sqrt(np.diag(products))
    lengths = np.where(lengths > 0, lengths, 1)
    cosines: F64 = products / lengths[:, None] / lengths
    return cosines.clip(-1, 1)


def _products(rows: Array) -> F64:
    """Inner products [n, n] of rows [n, s] in float64, of which a block of columns is held at a time."""
    found = np.zeros((len(rows), len(rows)))
    for left in range(0, rows.shape[1], COLUMN_BLOCK):
        block = rows[:, left : left + COLUMN_BLOCK].astype(np.float64)
        found += block @ block.T
    return found


def _mean_silhouette(rows: Array, labels: I64) -> float | None:
    """The mean silhouette of the devices that have a center; None with fewer than two such centers."""
    held = np.flatnonzero(labels >= 0)
    if len(held) > SILHOUETTE_MAX_DEVICES:
        held = held[np.linspace(0, len(held) - 1, SILHOUETTE_MAX_DEVICES).round().astype(int)]
    if len(set(labels[held].tolist())) < 2:  # noqa: PLR2004 - two centers
        return None
    distances = _products(rows if len(held) == len(rows) else rows[held])  # becomes them in place
    squares = np.diag(distances).copy()
    distances *= -2
    distances += squares[:, None]
    distances += squares
    np.sqrt(np.maximum(distances, 0, out=distances), out=distances)
    return round(silhouette(distances, labels[held]), 6)
