"""Where devices' models lie: a map in two dimensions, how far each is from every center, how alike centers are. Pure.

The map shows the two principal components of the models that devices sent in one round, w_i [p]. For at most SMALL
devices they come from the Gram matrix of the differences to the mean center, else from a Lanczos iteration on the same
differences, which forms no n x n matrix. So that any fleet fits, differences are kept as sketches of s numbers, where
s n 4 bytes are at most SKETCH_BYTES: signs drawn once, then every s-th number summed up (a count sketch, Charikar,
Chen and Farach-Colton 2002, with buckets in turn). Inner products are right on average, and exact while s >= p.
Distances and cosines are always exact. The silhouette (Rousseeuw 1987) is that of at most SAMPLE devices, in turn.

Principal components have no sign, and turn from round to round: the map is turned and mirrored to lie on the last one
as well as it can (orthogonal Procrustes, Schönemann 1966).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.silhouette import silhouette
from edge_client.protocol.task import Array, ClientId, Flat

MAX_SKETCH_BYTES = 64 << 20
MAX_SKETCH_SIZE = 16_384  # numbers of a device
GRAM_MAX_DEVICES = 512  # devices whose Gram matrix is decomposed as it is
SILHOUETTE_MAX_DEVICES = 1_000  # devices of a silhouette
COORDINATE_STEPS = 10_000  # of a coordinate, from the middle to the edge of the map
F64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EmbeddingMap:
    """One round: `plane` [n, 2] of devices, `middles` [k, 2] of centers, `distances` [n, k], `cosines` [k, k]."""

    devices: tuple[ClientId, ...]
    device_positions: F64 = field(repr=False)
    center_positions: F64 = field(repr=False)
    distances: F64 = field(repr=False)
    cosines: F64 = field(repr=False)
    silhouette: float | None  # None without two centers that have devices
    shares: tuple[float, float]  # of the variance, of each axis

    def to_json(self) -> dict[str, Any]:
        """As JSON: coordinates in whole steps of the farthest one's STEPS."""
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
            "xy": steps[0],
            "centers": steps[1],
            "reach": reach,
            "cosine": self.cosines.round(6).tolist(),
            "silhouette": self.silhouette,
            "shares": list(self.shares),
        }

    def distance(self, cid: ClientId) -> list[float] | None:
        """Of one device's model to every center; None when it is not in here."""
        return self.distances[self.devices.index(cid)].round(6).tolist() if cid in self.devices else None


def make_embedding_map(
    models: Iterable[tuple[ClientId, Flat]],
    centers: Array,
    assignment: Mapping[ClientId, int],
    *,
    count: int,
    before: EmbeddingMap | None = None,
) -> EmbeddingMap:
    """`count` models [p] one after another, none of them kept, and `centers` [k, p]."""
    known = np.asarray(centers, np.float32)
    pivot = known.mean(axis=0)
    press = _Sketch(known.shape[1], count)
    rows, who, distances = np.zeros((count, press.size), np.float32), [], np.zeros((count, len(known)))
    for i, (cid, model) in enumerate(models):
        vector = np.asarray(model, np.float32)
        rows[i], distances[i] = press(vector - pivot), [np.linalg.norm(vector - center) for center in known]
        who.append(cid)
    rows, distances = rows[: len(who)], distances[: len(who)]
    labels = np.array([assignment.get(cid, -1) for cid in who])
    mean = rows.mean(axis=0) if len(rows) else np.zeros(press.size, np.float32)
    rows -= mean
    axes, shares = principal_axes(rows)
    plane, middles = rows @ axes, np.stack([press(center - pivot) - mean for center in known]) @ axes
    turn = _turn(who, plane, before)
    return EmbeddingMap(
        devices=tuple(who),
        device_positions=plane.astype(np.float64) @ turn,
        center_positions=middles.astype(np.float64) @ turn,
        distances=distances,
        cosines=_cosines(known),
        silhouette=_apart(rows, labels),
        shares=shares,
    )


class _Sketch:
    """[p] -> [size], linear; the same for every vector of a survey."""

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
        pressed: Flat = signed.reshape(self._rows, self.size).sum(axis=0)
        return pressed


def principal_axes(rows: Array) -> tuple[Array, tuple[float, float]]:
    """[n, s] with mean zero -> axes [s, 2] of length 1, or 0 where nothing varies, and their shares of the variance."""
    axes, spread = np.zeros((rows.shape[1], 2), np.float32), float((rows.astype(np.float64) ** 2).sum())
    if spread == 0.0:
        return axes, (0.0, 0.0)
    if min(rows.shape) <= GRAM_MAX_DEVICES:
        wide = rows.shape[1] > rows.shape[0]
        gram = (rows @ rows.T if wide else rows.T @ rows).astype(np.float64)
        values, vectors = np.linalg.eigh(gram)
        values, vectors = values[::-1][:2], vectors[:, ::-1][:, :2]
        found = rows.T @ vectors if wide else vectors
    else:
        from scipy.sparse.linalg import svds

        start = np.random.default_rng(0).standard_normal(min(rows.shape))
        _, singular, right = svds(rows, k=2, v0=start)
        values, found = singular[::-1] ** 2, right[::-1].T
    lengths = np.linalg.norm(found, axis=0)
    real = (lengths > 0) & (values > spread * 1e-9)  # beside float32's rounding
    axes[:, : found.shape[1]][:, real] = (found / np.where(real, lengths, 1))[:, real]
    shares = [*(np.where(real, values, 0) / spread).tolist(), 0.0, 0.0]
    return axes, (shares[0], shares[1])


def _turn(who: Sequence[ClientId], plane: Array, before: EmbeddingMap | None) -> F64:
    """The rotation or reflection [2, 2] that brings devices closest to where they were."""
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
    """[k, p] -> [k, k]; a center of zeros is like nothing."""
    exact = centers.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1)
    unit = exact / np.where(lengths > 0, lengths, 1)[:, None]
    cosines: F64 = unit @ unit.T
    return cosines.clip(-1, 1)


def _apart(rows: Array, labels: NDArray[np.int64]) -> float | None:
    """The mean silhouette of devices with a center."""
    held = np.flatnonzero(labels >= 0)
    if len(held) > SILHOUETTE_MAX_DEVICES:
        held = held[np.linspace(0, len(held) - 1, SILHOUETTE_MAX_DEVICES).round().astype(int)]
    if len(set(labels[held].tolist())) < 2:  # noqa: PLR2004 - two centers
        return None
    x = rows[held].astype(np.float64)
    squares = (x**2).sum(axis=1)
    distances = np.sqrt(np.maximum(squares[:, None] + squares - 2 * x @ x.T, 0))
    return round(silhouette(distances, labels[held]), 6)
