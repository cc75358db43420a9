"""Which topics an MQTT filter covers. Pure; for the broker in memory, and to check what a real one sends."""

from __future__ import annotations


def filter_matches(topic_filter: str, topic: str) -> bool:
    """Whether a filter with `+` (one level) and `#` (the rest, also none) covers a topic."""
    wanted, levels = topic_filter.split("/"), topic.split("/")
    for position, level in enumerate(wanted):
        if level == "#":
            return True
        if position >= len(levels) or level not in ("+", levels[position]):
            return False
    return len(wanted) == len(levels)
