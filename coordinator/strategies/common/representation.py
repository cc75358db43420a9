"""The points by which devices are compared: parameters of a model or functions of them, never its buffers."""

from __future__ import annotations

import re

import numpy as np

from coordinator.aggregation.rows import Rows
from coordinator.strategies.common.setting_checks import check_choice
from edge_client.protocol.nearest.sketch import count_sketch
from edge_client.protocol.task import Array, Flat, Schema

REPRESENTATIONS = {  # name -> the reason to choose it, for a run's configuration
    "classifier": "the last layer, as the public code: small, and shows best where labels differ",
    "all": "every parameter, as the papers write: sees differing inputs too, and the noise of every layer",
    "delta": "the direction of all parameters: who takes more or larger steps is no further away",
    "projection": "that direction in 1,024 numbers, for large models",
}
SKETCH_SIZE = 1_024  # numbers that stand for a model in "projection"


def represent(vectors: Array, schema: Schema, kind: str, *, pivot: Flat | None = None) -> Array:
    """Models [m, schema.size] -> points [m, d] of one kind of REPRESENTATIONS.

    "delta" is (w - pivot) / |w - pivot| over all parameters, with `pivot` [schema.size] or zero. "projection" is the
    count sketch of w - pivot in 1,024 numbers, over the same length: cosines stay within about 0.03. Raises ConfigError
    for an unknown kind.
    """
    check_choice("representation", kind, tuple(REPRESENTATIONS))
    if kind == "classifier" and schema.classifier:
        return np.concatenate([vectors[:, schema.slices[name]] for name in schema.classifier], axis=1)
    params = vectors[:, : schema.n_params]
    if kind in ("classifier", "all"):
        return params
    deltas = params if pivot is None else params - pivot[: schema.n_params]
    lengths = np.sqrt(np.einsum("ij,ij->i", deltas, deltas, dtype=np.float64))[:, None]
    lengths[lengths == 0] = 1.0  # a model at the pivot has no direction
    points: Array = (
        deltas / lengths.astype(vectors.dtype) if kind == "delta" else count_sketch(deltas, SKETCH_SIZE) / lengths
    )
    return points


def represent_rows(rows: Rows, schema: Schema, kind: str, *, less: Flat) -> Rows:
    """The points [m, d] of the models `rows` less the model `less` [schema.size], each made when it is read."""

    def point(row: Flat) -> Flat:
        made: Flat = represent((row - less)[None], schema, kind)[0]
        return made

    return rows.map(point, point(less).size)


def annotate_representations(toml: str) -> str:
    """The text of a configuration, with the reason for each representation in a comment behind it."""
    lines = re.compile(r'^representation = "(\w+)"$', flags=re.MULTILINE)
    return lines.sub(lambda found: f"{found[0]}  # {REPRESENTATIONS[found[1]]}", toml)
