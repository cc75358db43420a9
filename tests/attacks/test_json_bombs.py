"""Tries to stop the process with a small message: thousands of brackets or digits, JSON that only some take."""

from __future__ import annotations

import json

import pytest

from edge_client.protocol.messages import read_message
from tests.support.memory_limit import refused_within


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 8_000,
        b'{"a":' * 1_600,
        b"[" * 4_000 + b"]" * 4_000,
        b'{"v":' + b"8" * 8_000 + b"}",
        b'{"v":-' + b"8" * 8_000 + b"}",
        b'{"v":0.' + b"8" * 8_000 + b"e400}",
        b'{"v":NaN}',
        b'{"v":1e999}',
        b'{"v":1,"v":1}',
        b'{"v":"\\ud800"}',
        b'{"\xff":1}',
        b"\xef\xbb\xbf{}",
        b"null",
    ],
)
def test_the_process_lives_and_says_bad_json(data: bytes) -> None:
    assert refused_within(4 << 20, lambda: read_message(data)) == "bad_json"


def test_a_message_above_the_limit_is_not_even_parsed() -> None:
    data = b"[" * 1_000_000
    assert refused_within(100_000, lambda: read_message(data)) == "too_big"


def test_a_wide_message_is_a_wrong_message_and_nothing_more() -> None:
    data = json.dumps({"v": 1, "k": "get", "at": [[0, 1]] * 600, "id": "x", "t": 0, "sha256": "0" * 64, "block": 4096})
    assert refused_within(4 << 20, lambda: read_message(data.encode())) == "bad_field"
