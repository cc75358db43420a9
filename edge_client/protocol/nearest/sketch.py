"""Sketches: a few hundred numbers that stand for many, by projections that a seed draws. Pure; only numpy.

`count_sketch` shortens vectors and nearly keeps their angles. `random_features` turns samples into the means of random
cosines: two devices whose inputs are distributed alike have nearly the same ones (a kernel mean embedding). Neither
needs labels.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from edge_client.protocol.task import F64, I64, Array, Flat, Schema

INPUT_SKETCH_SIZE = 256  # numbers that stand for a device's inputs
UPDATE_SKETCH_SIZE = 384  # numbers that stand for a device's update; as a message of its own it stays below 2,048 bytes
MAX_INPUT_WIDTH = 1_024  # longer inputs are folded to so many first, so that no board holds a large matrix
MAX_SKETCH_SIZE = 4_096  # numbers of a sketch that anyone may send


def count_sketch(rows: Array, size: int) -> F64:
    """[m, p] -> [m, size]: each column is added to one of `size` numbers with a sign, place and sign drawn by a seed.

    A count sketch (Charikar, Chen, Farach-Colton 2002): cosines stay within about 1 / sqrt(size).
    """
    place, sign = _drawn(rows.shape[1], size)
    return np.stack([np.bincount(place, weights=sign * row, minlength=size) for row in rows])


def random_features(x: Array, *, seed: int, size: int, width: float) -> F64:
    """Samples [n, ...] -> [size], the mean over them of sqrt(2) cos(w . x / width + b), w normal and b uniform.

    Rahimi, Recht 2007, "Random Features for Large-Scale Kernel Machines": the mean square of the difference of two such
    vectors is the squared distance of the two distributions under a Gaussian kernel of this width.
    """
    flat = x.reshape(len(x), -1).astype(np.float64)
    flat = flat if flat.shape[1] <= MAX_INPUT_WIDTH else count_sketch(flat, MAX_INPUT_WIDTH)
    w, b = _waves(flat.shape[1], size, seed)
    mean: F64 = np.sqrt(2) * np.cos(flat @ w / width + b).mean(axis=0)
    return mean


def update_direction(delta: Flat, schema: Schema, representation: str) -> F64:
    """An update [schema.size] -> [UPDATE_SKETCH] of length one: where it points to in what a run has compared.

    "classifier" looks at the last layer, anything else at every parameter (docs/methods.md). Zero stays zero.
    """
    parts = [delta[: schema.n_params]]
    if representation == "classifier" and schema.classifier:
        parts = [delta[schema.slices[name]] for name in schema.classifier]
    point: F64 = count_sketch(np.concatenate(parts)[None], UPDATE_SKETCH_SIZE)[0]
    length = float(np.linalg.norm(point))
    return point if length == 0 else np.asarray(point / length)


@lru_cache(maxsize=2)
def _drawn(width: int, size: int) -> tuple[I64, F64]:
    """Place and sign of each column; kept, since vectors come one by one."""
    rng = np.random.Generator(np.random.PCG64(size))
    return rng.integers(size, size=width), rng.choice([-1.0, 1.0], size=width)


@lru_cache(maxsize=2)
def _waves(width: int, size: int, seed: int) -> tuple[F64, F64]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.standard_normal((width, size)), rng.uniform(0, 2 * np.pi, size)
