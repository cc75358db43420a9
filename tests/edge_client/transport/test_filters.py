"""MQTT filters: examples from the MQTT specification, and a law."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.transport.base import filter_matches


@pytest.mark.parametrize(
    ("topic_filter", "topic", "covered"),
    [
        ("sport/tennis/player1/#", "sport/tennis/player1", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
        ("sport/#", "sport", True),
        ("#", "sport/tennis", True),
        ("sport/tennis/+", "sport/tennis/player1", True),
        ("sport/tennis/+", "sport/tennis/player1/ranking", False),
        ("sport/+", "sport", False),
        ("sport/+", "sport/", True),
        ("+/tennis/#", "sport/tennis", True),
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/b/c", "a/b", False),
        ("a/b", "a/B", False),
    ],
)
def test_examples(topic_filter: str, topic: str, covered: bool) -> None:  # noqa: FBT001
    assert filter_matches(topic_filter, topic) == covered


LEVELS = st.lists(st.text("ab", max_size=2), min_size=1, max_size=5)


@given(levels=LEVELS, wild=st.sets(st.integers(0, 4)), cut=st.integers(0, 5))
def test_a_filter_made_from_a_topic_covers_it(levels: list[str], wild: set[int], cut: int) -> None:
    parts = ["+" if i in wild else level for i, level in enumerate(levels)]
    assert filter_matches("/".join(parts), "/".join(levels))
    assert filter_matches("/".join([*parts[:cut], "#"]), "/".join(levels))
