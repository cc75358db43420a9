"""POST /nearest: the same question as MQTT's `near`, as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_client.errors import Malformed
from edge_client.protocol import choice, fields
from edge_client.protocol.catalog import MAX_CENTERS
from edge_client.protocol.topics import check_cid
from export.bundle import Bundle

MAX_SKETCH = 4_096
NUMBER = fields.number(-fields.SAFE, fields.SAFE)
QUESTIONS = {
    "loss": fields.record(fields.required(losses=fields.list_of(NUMBER, 1, MAX_CENTERS))),
    "votes": fields.record(
        fields.required(votes=fields.list_of(fields.integer(0, fields.SAFE // MAX_CENTERS), 1, MAX_CENTERS))
    ),
    "sketch": fields.record(fields.required(sketch=fields.list_of(NUMBER, 1, MAX_SKETCH))),
}


def answer(bundle: Bundle, question: Mapping[str, Any]) -> dict[str, Any]:
    """{"center": id or null, "distance", "alternatives"}. Raises Malformed when it cannot be answered."""
    how = question.get("how")
    if not isinstance(how, str) or how not in QUESTIONS:
        raise Malformed("bad_field", f"how is {how!r:.40}; ask by one of {', '.join(QUESTIONS)}")
    given = QUESTIONS[how](question, "the question")
    k = len(bundle.manifest["centers"])
    if how == "sketch":
        known = bundle.manifest.get("sketches")
        if known is None:
            raise Malformed("bad_field", "this bundle has no sketches; ask by loss or by votes")
        return choice.by_sketch(given["sketch"], np.asarray(known["centers"]), known["abstain"]).to_json()
    values = given["losses" if how == "loss" else "votes"]
    if len(values) != k:
        raise Malformed("bad_field", f"{len(values)} values, this bundle has {k} centers")
    if how == "votes":
        return choice.by_votes(values).to_json()
    return choice.by_distance(values, choice.guessing_loss(bundle.program)).to_json()


def device_of(value: object) -> str | None:
    """A device's name from a request, or None. Raises Malformed for what is no name."""
    return None if value is None else check_cid(value)
