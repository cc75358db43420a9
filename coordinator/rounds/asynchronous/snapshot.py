"""The state machine between two rounds as a `State`, so that it is stored like the state of any method.

The centers, the assignment and the method's arrays stay as they are. Arrays whose names begin with `asynchronous/`
hold the updates in the buffers, the models at which devices began, and the other fields as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from coordinator.rounds.asynchronous.training import Buffered, Handed, Training
from coordinator.strategies.base import State
from edge_client.protocol.task import Array, ClientId, Flat

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
    facts, arrays = {**facts_of(training), "test": test}, dict[str, Array]()
    for k, buffer in enumerate(training.buffers):
        arrays |= {f"{PREFIX}row-{k}-{who}": entry.row for who, entry in buffer.items()}
    for who, handed in training.at_work.items():
        if handed.start is not None and handed.center is not None:
            arrays[_start(handed.center, handed.version)] = handed.start
        facts["at_work"][who] |= {"trains": handed.start is not None, "round": rounds[who]}
    arrays[_FACTS] = np.frombuffer(json.dumps(facts, sort_keys=True).encode(), dtype=np.uint8)
    return replace(training.state, extra={**training.state.extra, **arrays})


def unpack(packed: State) -> Snapshot | None:
    """What `pack` was given; None for the state of a round that waited for its devices."""
    if _FACTS not in packed.extra:
        return None
    facts = json.loads(packed.extra[_FACTS].tobytes())
    own = {name: array for name, array in packed.extra.items() if not name.startswith(PREFIX)}
    rows = {
        (k, who): packed.extra[f"{PREFIX}row-{k}-{who}"] for k, buffer in enumerate(facts["buffers"]) for who in buffer
    }
    starts, rounds = {}, {}
    for who, one in facts["at_work"].items():
        rounds[who] = one.pop("round")
        if one.pop("trains"):
            name = "start" if one["center"] is None else _start(one["center"], one["version"])
            starts[who] = packed.extra[name]
    training = training_of(facts, replace(packed, extra=own), rows, starts)
    return Snapshot(training, rounds, facts.get("test", 0))  # one of an older version has no test


def facts_of(training: Training) -> dict[str, Any]:
    """The machine as JSON types, without its state and the vectors of what is under way."""
    return {
        "versions": training.versions,
        "handed": training.handed,
        "scales": dict(training.scales),
        "recent": [[who, dict(moves)] for who, moves in training.recent.items()],  # in their order
        "given": [training.given[0], sorted(training.given[1])],
        "buffers": [{who: _without(entry, "row") for who, entry in buffer.items()} for buffer in training.buffers],
        "at_work": {who: _without(handed, "start") for who, handed in training.at_work.items()},
    }


def training_of(
    facts: Mapping[str, Any],
    state: State,
    rows: Mapping[tuple[int, ClientId], Flat],
    starts: Mapping[ClientId, Flat],
) -> Training:
    """The machine whose `facts_of` these are, with the row of each update in a buffer, by center and device."""
    older = {"since": facts["handed"]}  # an older version did not count how long an update waits
    buffers = [
        {who: Buffered(row=rows[k, who], **older | entry) for who, entry in buffer.items()}
        for k, buffer in enumerate(facts["buffers"])
    ]
    latest, devices = facts.get("given", (0, ()))  # an older version kept none
    return Training(
        state=state,
        versions=tuple(facts["versions"]),
        buffers=tuple(buffers),
        at_work={who: Handed(start=starts.get(who), **handed) for who, handed in facts["at_work"].items()},
        handed=facts["handed"],
        scales=facts["scales"],
        recent=dict(facts.get("recent", [])),  # as this
        given=(latest, frozenset(devices)),
    )


def _without(value: Buffered | Handed, vector: str) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value) if f.name != vector}


def _start(center: int, version: int) -> str:
    return f"{PREFIX}start-{center}-{version}"
