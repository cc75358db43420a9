"""A method's state as bytes and back: one safetensors file, so that a restart continues with the same bits.

`centers` and `extra/<name>` keep their dtypes and shapes; the assignment is JSON beside them. No disk, no clock.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coordinator.strategies.base import State
from edge_client.errors import Malformed
from edge_client.protocol.task import Array, Flat

_EXTRA = "extra/"


def encode_state(state: State) -> bytes:
    """One state -> one file. Equal states give equal bytes."""
    tensors = {"centers": state.centers} | {_EXTRA + name: array for name, array in state.extra.items()}
    head = {"assignment": dict(sorted(state.assignment.items())), "v": 1}
    note = json.dumps(head, sort_keys=True, separators=(",", ":"))
    return bytes(save({k: np.asarray(v, order="C") for k, v in sorted(tensors.items())}, metadata={"fc": note}))


def decode_state(data: bytes) -> State:
    """What `encode_state` wrote. Raises Malformed("bad_schema") when it did not."""
    try:
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        head: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["fc"])
        return State(
            centers=tensors.pop("centers"),
            assignment={str(who): int(center) for who, center in head["assignment"].items()},
            extra={name.removeprefix(_EXTRA): array for name, array in tensors.items()},
        )
    except (SafetensorError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as wrong:
        raise Malformed("bad_schema", f"stored state: {wrong!r}") from wrong


def encode_array(vector: Flat) -> bytes:
    """One array -> one file."""
    return bytes(save({"vector": np.asarray(vector, order="C")}))


def decode_array(data: bytes) -> Array:
    """What `encode_array` wrote."""
    return load(data)["vector"]
