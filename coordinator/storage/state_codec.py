"""A method's state as the bytes of a safetensors file, and back; the arrays keep their bits, dtypes and shapes.

The tensors are `centers` and `extra/<name>`. The assignment is JSON in the file's metadata; that of a numbered fleet is
the tensor `assignment`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coordinator.strategies.base import State
from coordinator.strategies.numbered_fleet import NumberedAssignment
from edge_client.errors import Malformed
from edge_client.protocol.task import Array, Flat

_EXTRA = "extra/"


def encode_state(state: State) -> bytes:
    """Encode a state. Equal states give equal bytes."""
    tensors = {"centers": state.centers} | {_EXTRA + name: array for name, array in state.extra.items()}
    head: dict[str, Any] = {"assignment": {}, "v": 1}
    if isinstance(state.assignment, NumberedAssignment):
        tensors["assignment"] = state.assignment.centers
    else:
        head["assignment"] = dict(sorted(state.assignment.items()))
    note = json.dumps(head, sort_keys=True, separators=(",", ":"))
    return bytes(save({k: np.asarray(v, order="C") for k, v in sorted(tensors.items())}, metadata={"fc": note}))


def decode_state(data: bytes) -> State:
    """Decode the bytes of `encode_state`. Raises Malformed("bad_schema") for other bytes."""
    try:
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        head: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["fc"])
        listed = {str(who): int(center) for who, center in head["assignment"].items()}
        numbered = tensors.pop("assignment", None)
        return State(
            centers=tensors.pop("centers"),
            assignment=listed if numbered is None else NumberedAssignment(numbered.astype(np.int16)),
            extra={name.removeprefix(_EXTRA): array for name, array in tensors.items()},
        )
    except (SafetensorError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as wrong:
        raise Malformed("bad_schema", f"stored state: {wrong!r}") from wrong


def encode_array(vector: Flat) -> bytes:
    """Encode one array."""
    return bytes(save({"vector": np.asarray(vector, order="C")}))


def decode_array(data: bytes) -> Array:
    """Decode the bytes of `encode_array`."""
    return load(data)["vector"]
