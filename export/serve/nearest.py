"""POST /nearest: the answer to a device's question for its center, as over MQTT (`near`) but in JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.blocks import MAX_INTEGER
from edge_client.protocol.nearest import selection_rule
from edge_client.protocol.nearest.catalog import MAX_CENTERS
from edge_client.protocol.nearest.sketch import MAX_SKETCH_SIZE
from edge_client.protocol.task import Array
from edge_client.protocol.topics import check_cid
from export.bundle.reader import Bundle

NUMBER_FIELD = validators.number(-MAX_INTEGER, MAX_INTEGER)
SKETCH_FIELD = validators.list_of(NUMBER_FIELD, 1, MAX_SKETCH_SIZE)
SAMPLES_FIELDS = validators.optional(n=validators.integer(1, 2**31))
QUESTION_SCHEMAS = {
    "loss": validators.record(
        validators.required(losses=validators.list_of(NUMBER_FIELD, 1, MAX_CENTERS)) | SAMPLES_FIELDS
    ),
    "votes": validators.record(
        validators.required(votes=validators.list_of(validators.integer(0, MAX_INTEGER // MAX_CENTERS), 1, MAX_CENTERS))
    ),
    "sketch": validators.record(validators.required(sketch=SKETCH_FIELD) | SAMPLES_FIELDS),
    "round": validators.record(validators.required(sketch=SKETCH_FIELD) | SAMPLES_FIELDS),
}


def answer_nearest(bundle: Bundle, question: Mapping[str, Any]) -> dict[str, Any]:
    """{"center": id or null, "distance", "alternatives"}, and "fit" where it is known.

    Raises Malformed when it cannot be answered.
    """
    how = question.get("how")
    if not isinstance(how, str) or how not in QUESTION_SCHEMAS:
        raise Malformed("bad_field", f"how is {how!r:.40}; ask by one of {', '.join(QUESTION_SCHEMAS)}")
    given = QUESTION_SCHEMAS[how](question, "the question")
    router, n, k = bundle.router, given.get("n", selection_rule.ASSUMED_SAMPLES), len(bundle.manifest["centers"])
    if how == "votes":
        return choose_by_votes(_one_per_center(given["votes"], k)).to_json()
    if how == "loss":
        distances: Array = np.array(_one_per_center(given["losses"], k))
        abstain = selection_rule.guessing_loss(bundle.program)
    else:
        compared = None if router is None else router.sketch if how == "sketch" else router.round
        if compared is None:
            raise Malformed("bad_field", f"this bundle has nothing to compare a {how} with; ask by loss or by votes")
        distances = selection_rule.sketch_distance(np.asarray(given["sketch"], np.float64), compared.centers)
        abstain = math.inf
    if router is None:
        return selection_rule.choose_by_distance(distances, abstain).to_json()
    return selection_rule.choose_by_distance(distances, abstain, router.fit_of(how, n)).to_json()


def _one_per_center(values: list[Any], centers: int) -> list[Any]:
    if len(values) != centers:
        raise Malformed("bad_field", f"{len(values)} values, this bundle has {centers} centers")
    return values


def parse_device(value: object) -> str | None:
    """A device's name from a request, or None. Raises Malformed for what is no name."""
    return None if value is None else check_cid(value)


def choose_by_votes(votes: Sequence[int] | Array) -> selection_rule.CenterChoice:
    """Votes [K]: how many samples each center explains best (FedSoft, algorithm 1). Distance: 1 - its share."""
    counts = np.asarray(votes, dtype=np.float64)
    if counts.sum() <= 0:
        raise Malformed("bad_field", "votes count no sample")
    return selection_rule.choose_by_distance(1 - counts / counts.sum(), 1.0)
