"""POST /nearest: the same question as MQTT's `near`, as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import validators
from edge_client.protocol.nearest import selection_rule
from edge_client.protocol.nearest.catalog import MAX_CENTERS
from edge_client.protocol.nearest.sketch import MOST
from edge_client.protocol.task import Array
from edge_client.protocol.topics import check_cid
from export.bundle.reader import Bundle

MAX_SKETCH = MOST
NUMBER = validators.number(-validators.SAFE, validators.SAFE)
SKETCH = validators.list_of(NUMBER, 1, MAX_SKETCH)
SAMPLES = validators.optional(n=validators.integer(1, 2**31))
USUAL_N = 20  # samples that are assumed where nobody says how many were looked at
QUESTIONS = {
    "loss": validators.record(validators.required(losses=validators.list_of(NUMBER, 1, MAX_CENTERS)) | SAMPLES),
    "votes": validators.record(
        validators.required(
            votes=validators.list_of(validators.integer(0, validators.SAFE // MAX_CENTERS), 1, MAX_CENTERS)
        )
    ),
    "sketch": validators.record(validators.required(sketch=SKETCH) | SAMPLES),
    "round": validators.record(validators.required(sketch=SKETCH) | SAMPLES),
}


def answer(bundle: Bundle, question: Mapping[str, Any]) -> dict[str, Any]:
    """{"center": id or null, "distance", "alternatives"}. Raises Malformed when it cannot be answered."""
    how = question.get("how")
    if not isinstance(how, str) or how not in QUESTIONS:
        raise Malformed("bad_field", f"how is {how!r:.40}; ask by one of {', '.join(QUESTIONS)}")
    given = QUESTIONS[how](question, "the question")
    guide, n, k = bundle.guide, given.get("n", USUAL_N), len(bundle.manifest["centers"])
    if how == "votes":
        return selection_rule.by_votes(_as_many(given["votes"], k)).to_json()
    if how == "loss":
        distances: Array = np.array(_as_many(given["losses"], k))
    else:
        about = None if guide is None else guide.sketch if how == "sketch" else guide.round
        if about is None:
            raise Malformed("bad_field", f"this bundle has nothing to compare a {how} with; ask by loss or by votes")
        distances = selection_rule.apart(np.asarray(given["sketch"], np.float64), about.centers)
    if guide is None or how not in guide.ways:
        return selection_rule.by_distance(distances, selection_rule.guessing_loss(bundle.program)).to_json()
    return selection_rule.by_belief(distances, guide.believe(how, {how: distances}, n)).to_json()


def _as_many(values: list[Any], centers: int) -> list[Any]:
    if len(values) != centers:
        raise Malformed("bad_field", f"{len(values)} values, this bundle has {centers} centers")
    return values


def device_of(value: object) -> str | None:
    """A device's name from a request, or None. Raises Malformed for what is no name."""
    return None if value is None else check_cid(value)
