"""The points by which devices are compared: parameters of a model or functions of them, never its buffers.

A representation is a word of REPRESENTATIONS, or a pattern of parameter names with a `*`: "*lora_B*" compares the
second factors of LoRA's adapters.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import numpy as np

from coordinator.aggregation.rows import Rows
from coordinator.strategies.common.setting_checks import check_choice
from edge_client.errors import ConfigError
from edge_client.protocol.nearest.sketch import count_sketch
from edge_client.protocol.task import Array, Flat, Schema

REPRESENTATIONS = {  # name -> the reason to choose it, for a run's configuration
    "classifier": "the last layer, as the public code: small, and shows best where labels differ",
    "all": "every parameter, as the papers write: sees differing inputs too, and the noise of every layer",
    "delta": "the direction of all parameters: who takes more or larger steps is no further away",
    "projection": "that direction in 1,024 numbers, for large models",
}
COMPARED = (  # the words of a setting
    'what is compared: "classifier" (the last layer), "all", or their direction: "delta", "projection"; '
    'or the parameters whose names fit a pattern with a "*"'
)
PATTERN_EXAMPLE = "*lora_B*"
SKETCH_SIZE = 1_024  # numbers that stand for a model in "projection"


def is_representation(kind: object) -> bool:
    """Whether it is a word of REPRESENTATIONS or a pattern."""
    return isinstance(kind, str) and (kind in REPRESENTATIONS or "*" in kind)


def check_representation(kind: str) -> None:
    """Raise ConfigError for another word."""
    if not is_representation(kind):
        check_choice("representation", kind, (*REPRESENTATIONS, PATTERN_EXAMPLE))


def check_compared(kind: object, schema: Schema) -> None:
    """Raise ConfigError for a pattern that fits no parameter: methods compare models in a late round first."""
    if isinstance(kind, str) and "*" in kind:
        _named(schema, kind)


def router_word(kind: str) -> str:
    """What devices that join later are compared by; a router has no patterns, and all parameters stand in for one."""
    return kind if kind in REPRESENTATIONS else "all"


def represent(vectors: Array, schema: Schema, kind: str, *, pivot: Flat | None = None) -> Array:
    """Models [m, schema.size] -> points [m, d] of one kind of REPRESENTATIONS.

    "delta" is (w - pivot) / |w - pivot| over all parameters, with `pivot` [schema.size] or zero. "projection" is the
    count sketch of w - pivot in 1,024 numbers, over the same length: cosines stay within about 0.03. Raises ConfigError
    for an unknown kind, and for a pattern that fits no parameter.
    """
    check_representation(kind)
    names = _named(schema, kind) if "*" in kind else schema.classifier if kind == "classifier" else ()
    if names:
        return np.concatenate([vectors[:, schema.slices[name]] for name in names], axis=1)
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


def _named(schema: Schema, pattern: str) -> list[str]:
    params = [t.name for t in schema.tensors if t.role == "p"]
    found = [name for name in params if fnmatchcase(name, pattern)]
    if not found:
        raise ConfigError(
            f"representation {pattern!r} fits no parameter of this model",
            hint=f"the trained parameters are {', '.join(params[:4])}{', ...' if len(params) > 4 else ''}",  # noqa: PLR2004 - as many as fit a line
        )
    return found


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
