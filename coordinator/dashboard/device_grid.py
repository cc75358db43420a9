"""What each device is doing, from what the coordinator sees: who is connected, and how far the open exchange is. Pure.

A device that is asked and has not answered counts as training: whether it really does, only the device knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from edge_client.protocol.task import ClientId

# The page knows a state by its place in this list.
DEVICE_STATES = ("training", "uploading", "waiting", "answered", "late", "rejected", "idle", "sleeping", "away")
_PRESENT = {"on": "idle", "sleep": "sleeping"}  # any other presence: away
_GROUPS = {"answered": "answered", "uploading": "uploading", "waiting": "waiting", "refused": "rejected"}


def device_states(
    presence: Mapping[ClientId, str], exchange: Mapping[str, Any] | None, late: Collection[ClientId]
) -> dict[ClientId, str]:
    """Device -> one of STATES.

    `presence` is on, off, sleep or lost; `exchange` as LiveExchange.progress tells it, or None; `late` missed the end
    of an exchange and has answered none since.
    """
    found = {cid: _PRESENT.get(how, "away") for cid, how in presence.items()}
    for cid in late:
        if found.get(cid) == "idle":
            found[cid] = "late"
    if exchange is None:
        return found
    for cid in exchange["open"]:
        if found.setdefault(cid, "away") == "idle":
            found[cid] = "training"
    for group, state in _GROUPS.items():
        found |= dict.fromkeys(exchange[group], state)
    return found


def late_devices(exchange: Mapping[str, Any], late: Collection[ClientId]) -> frozenset[ClientId]:
    """Who is late once this exchange has closed, given who was before.

    Nobody misses an exchange that closed since there were as many answers as wanted; who answers is late no more.
    """
    answered = len(exchange["answered"])
    tardy = exchange["open"] if answered < exchange["wanted"] else ()
    return (frozenset(late) | frozenset(tardy)) - frozenset(exchange["answered"])
