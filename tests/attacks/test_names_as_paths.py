"""Tries to leave the folder or the topic: slashes, dots, wildcards and newlines wherever a name is taken."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.topics import Topics, check_cid, check_federation, check_run, check_sha256, routing_label
from tests.support.sample_messages import DOWN, FIT, PROBE, UP

NAMES = ["../x", "..", "/etc/passwd", "a/b", "+", "#", "$SYS", "a\n", "a\0", "a b", "", "C:\\x", "\u202ea", "x" * 300]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", [check_cid, check_federation, check_run, check_sha256, routing_label])
def test_no_name_leaves_its_alphabet(check: Any, name: str) -> None:  # noqa: ANN401 - five functions of one shape
    with pytest.raises(Malformed):
        check(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("task", FIT, "run"),
        ("task", FIT, "slot"),
        ("task", FIT, "schema"),
        ("get", UP["get"], "sha256"),
        ("go", DOWN["go"], "sha256"),
        ("nack", UP["nack"], "re"),
    ],
)
def test_no_field_that_becomes_a_name_leaves_its_alphabet(
    kind: str, fields: dict[str, Any], field: str, name: str
) -> None:
    payload = messages.canonical_json({"v": 1, "k": kind, "id": "x", "t": 0, "epoch": 1} | fields | {field: name})
    with pytest.raises(Malformed):
        messages.read_message(payload)


@pytest.mark.parametrize("name", NAMES)
def test_no_own_model_is_named_like_that(name: str) -> None:
    fields = {"v": 1, "k": "task", "id": "x", "t": 0, "epoch": 1} | PROBE | {"models": [{"own": name}], "prior": [1.0]}
    with pytest.raises(Malformed):
        messages.read_message(messages.canonical_json(fields))


@pytest.mark.parametrize("name", NAMES)
def test_no_topic_is_parsed_with_such_a_level(name: str) -> None:
    with pytest.raises(Malformed):
        Topics("demo").parse(f"fc/v1/demo/rq/{name}")
