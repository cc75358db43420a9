"""Tries to speak for another device: its id in the payload, or a coordinator's id in the topic."""

from __future__ import annotations

import pytest

from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.topics import Topics
from tests.support.sample_messages import UP


def test_an_id_in_the_payload_never_arrives() -> None:
    claimed = {"cid": "victim", "client_id": "victim", "from": "victim", "epoch": 99}
    payload = messages.canonical_json({"v": 1, "k": "rdy", "id": "x", "t": 0} | UP["rdy"] | claimed)
    assert not set(messages.read_message(payload, "rq")) & set(claimed)
    assert Topics("demo").parse("fc/v1/demo/rq/mallory").cid == "mallory"


@pytest.mark.parametrize("topic", ["fc/v1/demo/rq/coordinator.0", "fc/v1/demo/st/coordinator.0"])
def test_no_device_has_a_coordinators_name(topic: str) -> None:
    with pytest.raises(Malformed):
        Topics("demo").parse(topic)


@pytest.mark.parametrize("kind", ["task", "ack", "go", "stop", "rebirth", "err", "coord", "cat"])
def test_a_device_that_sends_a_coordinators_kind_is_refused(kind: str) -> None:
    with pytest.raises(Malformed) as refused:
        messages.read_message(messages.canonical_json({"v": 1, "k": kind, "id": "x", "t": 0, "epoch": 9}), "rq")
    assert refused.value.code == "bad_kind"
