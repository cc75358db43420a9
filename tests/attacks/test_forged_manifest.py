"""Tries to make a receiver reserve memory or disk for a blob that cannot exist: wild sizes, block sizes and counts."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.protocol import messages
from edge_client.protocol.blocks import Manifest
from tests.support.memory_limit import refused_within

GOOD: dict[str, Any] = {"sha256": "0" * 64, "size": 10_000, "block": 4096, "kind": "delta"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"size": 2**62}, "bad_field"),
        ({"size": 2**53 - 1}, "too_big"),
        ({"size": (4 << 30) + 1, "block": 1 << 20}, "too_big"),
        ({"size": 4 << 30, "block": 4096}, "bad_field"),
        ({"size": -1}, "bad_field"),
        ({"size": 1e4}, "bad_field"),
        ({"block": 1}, "bad_field"),
        ({"block": 0}, "bad_field"),
        ({"block": 2**31}, "bad_field"),
        ({"inline": "A" * 100_000}, "too_big"),
        ({"kind": "../../etc"}, "bad_field"),
        ({"sha256": "../" * 21 + "a"}, "bad_field"),
    ],
)
def test_a_forged_manifest_is_refused_before_anything_is_allocated(change: dict[str, Any], code: str) -> None:
    assert refused_within(500_000, lambda: Manifest.from_json(GOOD | change)) == code


def test_a_size_of_many_digits_never_becomes_an_integer() -> None:
    text = messages.canonical_json(GOOD).replace(b"10000", b"9" * 5000)
    assert refused_within(500_000, lambda: messages.parse_json(text)) == "bad_json"


def test_the_tasks_own_limit_is_the_tightest() -> None:
    assert refused_within(100_000, lambda: Manifest.from_json(GOOD, limit_bytes=9_999)) == "too_big"
