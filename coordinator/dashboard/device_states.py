"""The state of each device on the page, from what the coordinator sees: connections and the open exchange. Pure.

A device that has a task and has not answered counts as training; only the device itself can say whether it trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from edge_client.protocol.task import ClientId

# The page receives a state as its index in this tuple.
DEVICE_STATES = ("training", "uploading", "waiting", "answered", "late", "rejected", "idle", "sleeping", "away")
_PRESENT = {"on": "idle", "sleep": "sleeping"}  # any other presence: away
_GROUPS = {"answered": "answered", "uploading": "uploading", "waiting": "waiting", "refused": "rejected"}


def device_states(
    presence: Mapping[ClientId, str], exchange: Mapping[str, Any] | None, late: Collection[ClientId]
) -> dict[ClientId, str]:
    """Device -> one of DEVICE_STATES.

    `presence` is on, off, sleep or lost; `exchange` is LiveExchange.progress, or None; the `late` devices missed the
    end of an exchange and have answered none since.
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
    """The late devices after this exchange has closed, given those before it.

    An exchange that closed because it had as many answers as it wanted makes no device late; an answer ends lateness.
    """
    answered = len(exchange["answered"])
    tardy = exchange["open"] if answered < exchange["wanted"] else ()
    return (frozenset(late) | frozenset(tardy)) - frozenset(exchange["answered"])
