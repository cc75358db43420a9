"""The answer to a `near` question: the nearest center to the losses or the sketch that a device sent, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.nearest import selection_rule, sketch
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.nearest.router import InputSketch, LocalRound, Router
from edge_client.protocol.task import Array, Schema


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
    return selection_rule.sketch_distance(sketch.decode_sketch(_inline(question, "sketch"), schema), about.centers)


def _inline(question: Mapping[str, Any], name: str) -> bytes:
    manifest = Manifest.from_json(question[name])
    if manifest.inline is None:
        raise Malformed("bad_field", "losses and sketches travel inline")
    return manifest.inline
