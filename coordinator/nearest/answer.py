"""The answer to a `near` question: the nearest center to the losses or the sketch that a device sent, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import codecs, tensors
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.nearest import selection_rule
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.nearest.router import InputSketch, LocalRound, Router
from edge_client.protocol.nearest.sketch import MAX_SKETCH_SIZE
from edge_client.protocol.task import F64, Array, Schema


def answer_near(
    catalog: Catalog, question: Mapping[str, Any], schema: Schema, router: Router | None = None
) -> dict[str, Any]:
    """The fields of the answer to a `near`: the nearest center or null, its distance, and the next best ones.

    With a `router` also how it fits. Raises Malformed when the question cannot be answered.
    """
    how, n = question["how"], int(question.get("n", selection_rule.ASSUMED_SAMPLES))
    if how == "loss":
        distances = _losses(question, schema, n, len(catalog.centers))
        abstain = catalog.abstain
    else:
        about = None if router is None else router.sketch if how == "sketch" else router.round
        if about is None:
            raise Malformed("bad_field", f"this run taught nothing about near by {how}; ask by loss")
        distances, abstain = _apart(question, schema, about), float("inf")
    if router is None:
        return selection_rule.choose_by_distance(distances, abstain).to_json()
    return selection_rule.choose_by_distance(distances, abstain, router.fit_of(how, n)).to_json()


def _losses(question: Mapping[str, Any], schema: Schema, n: int, centers: int) -> Array:
    """Losses [centers], infinite for centers that the device did not measure."""
    named = question.get("centers") or list(range(centers))
    if len(set(named)) < len(named) or max(named) >= centers:
        raise Malformed("bad_field", f"centers {named} name one twice, or one that is not there")
    losses = codecs.decode_stats(_inline(question, "stats"), schema, n, models=len(named)).losses
    if losses is None:
        raise Malformed("bad_schema", "the statistics hold no losses")
    out = np.full(centers, np.inf)
    out[named] = losses
    return out


def _apart(question: Mapping[str, Any], schema: Schema, about: InputSketch | LocalRound) -> Array:
    if "sketch" not in question:
        raise Malformed("bad_field", f"near by {question['how']} needs sketch")
    return selection_rule.sketch_distance(decode_sketch(_inline(question, "sketch"), schema), about.centers)


def decode_sketch(data: bytes, schema: Schema) -> F64:
    """A tensor file of kind "sketch", from anyone, -> its numbers [d]. Raises Malformed."""
    stored, meta = tensors.unpack_tensors(data)
    if meta.kind != "sketch" or meta.codec != "f32" or meta.schema != schema.sha256:
        raise Malformed("bad_schema", f"not a sketch in f32 of schema {schema.sha256}: {meta}")
    value: Any = stored.get("sketch")
    fits = value is not None and value.dtype == np.float32 and value.ndim == 1 and len(value) <= MAX_SKETCH_SIZE
    if len(stored) != 1 or not fits:
        raise Malformed("bad_schema", f"a sketch is one tensor F32 of at most {MAX_SKETCH_SIZE} numbers")
    if not np.isfinite(value).all():
        raise Malformed("not_finite", "a sketch holds NaN or infinity")
    return np.asarray(value, np.float64)


def _inline(question: Mapping[str, Any], name: str) -> bytes:
    manifest = Manifest.from_json(question[name])
    if manifest.inline is None:
        raise Malformed("bad_field", "losses and sketches travel inline")
    return manifest.inline
