"""The state machine between two rounds as a `State`, so that it is stored like the state of any method.

The centers, the assignment and the method's arrays stay as they are. Arrays whose names begin with `asynchronous/`
hold the updates in the buffers, the models at which devices began, and the other fields as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from coordinator.rounds.asynchronous.training import Buffered, Handed, Training
from coordinator.strategies.base import State
from edge_client.protocol.task import Array, ClientId

PREFIX = "asynchronous/"
_FACTS = PREFIX + "facts"


class Snapshot(NamedTuple):
    """The machine, in which round each device at work got its task, and in which the open test began (0: none)."""

    training: Training
    rounds: Mapping[ClientId, int] = {}
    test: int = 0


def pack(snapshot: Snapshot) -> State:
    """The state to be stored."""
    training, rounds, test = snapshot
    arrays: dict[str, Array] = {}
    buffers: list[dict[ClientId, dict[str, Any]]] = []
    for k, buffer in enumerate(training.buffers):
        arrays |= {f"{PREFIX}row-{k}-{who}": entry.row for who, entry in buffer.items()}
        buffers.append(
            {
                who: {"n": entry.n, "staleness": entry.staleness, "moves": dict(entry.moves), "since": entry.since}
                for who, entry in buffer.items()
            }
        )
    at_work = {}
    for who, handed in training.at_work.items():
        if handed.start is not None and handed.center is not None:
            arrays[_start(handed.center, handed.version)] = handed.start
        at_work[who] = {
            "number": handed.number,
            "seed": handed.seed,
            "center": handed.center,
            "version": handed.version,
            "trains": handed.start is not None,
            "round": rounds[who],
        }
    facts = {
        "versions": training.versions,
        "handed": training.handed,
        "scales": dict(training.scales),
        "recent": [[who, dict(moves)] for who, moves in training.recent.items()],  # in their order
        "buffers": buffers,
        "at_work": at_work,
        "test": test,
    }
    arrays[_FACTS] = np.frombuffer(json.dumps(facts, sort_keys=True).encode(), dtype=np.uint8)
    return replace(training.state, extra={**training.state.extra, **arrays})


def unpack(packed: State) -> Snapshot | None:
    """What `pack` was given; None for the state of a round that waited for its devices."""
    if _FACTS not in packed.extra:
        return None
    facts = json.loads(packed.extra[_FACTS].tobytes())
    own = {name: array for name, array in packed.extra.items() if not name.startswith(PREFIX)}
    older = {"since": facts["handed"]}  # an older version did not count how long an update waits
    buffers = tuple(
        {who: Buffered(row=packed.extra[f"{PREFIX}row-{k}-{who}"], **older | entry) for who, entry in buffer.items()}
        for k, buffer in enumerate(facts["buffers"])
    )
    at_work, rounds = {}, {}
    for who, one in facts["at_work"].items():
        rounds[who], trains = one.pop("round"), one.pop("trains")
        name = "start" if one["center"] is None else _start(one["center"], one["version"])
        at_work[who] = Handed(start=packed.extra[name] if trains else None, **one)
    training = Training(
        state=replace(packed, extra=own),
        versions=tuple(facts["versions"]),
        buffers=buffers,
        at_work=at_work,
        handed=facts["handed"],
        scales=facts["scales"],
        recent=dict(facts.get("recent", [])),  # an older version kept none
    )
    return Snapshot(training, rounds, facts.get("test", 0))  # one of an older version has no test


def _start(center: int, version: int) -> str:
    return f"{PREFIX}start-{center}-{version}"
