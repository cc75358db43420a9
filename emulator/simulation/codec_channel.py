"""The lossy codec between emulated devices and the virtual server, with its error feedback and its bytes.

With error feedback a device adds the residual of its earlier updates to each update, as a real device does
(PROTOCOL.md, section 5). A residual belongs to a center, is stored once the server counts the update, and is halved for
each round without an update. The difference to the base is taken from the update after its rounding to f32, so that it
differs from a real device's by that rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from coordinator.rounds.update_validation import delta_base
from edge_client.errors import UsageError
from edge_client.protocol import codecs as compress
from edge_client.protocol.message_schemas import CODECS
from edge_client.protocol.task import ClientId, Fit, Flat, Reply, Schema, Task
from emulator.simulation import checkpoint
from emulator.simulation.spill import SpilledModels

STATISTICS_BYTES = 1_024  # about the size of a probe's reply
Codec = Callable[[Flat, Schema], tuple[Flat, int]]  # a difference [schema.size] -> what is decoded, and its bytes


def protocol_codec(codec: str) -> Codec:
    """One of the protocol's codecs."""
    if codec not in CODECS:
        raise UsageError(f"unknown codec {codec!r}", hint=f"use one of {', '.join(CODECS)}")

    def code(delta: Flat, schema: Schema) -> tuple[Flat, int]:
        data = compress.encode_vector(delta, schema, codec=codec, kind="delta", base="zero")
        return compress.decode_vector(data, schema, kind="delta"), len(data)

    return code


class CodecChannel:
    """-> the reply that arrives, and its size. Without a `code` updates travel as they are."""

    def __init__(self, schema: Schema, code: Codec | None = None, *, feedback: bool = False) -> None:
        self._schema, self._code, self._feedback = schema, code, feedback
        self._lost = SpilledModels()  # by device and center
        self._since: dict[tuple[ClientId, str], int] = {}  # the round of the last update that counted
        self._open: dict[ClientId, tuple[tuple[ClientId, str], Flat, int]] = {}

    def send(self, who: ClientId, task: Task, reply: Reply, round: int) -> tuple[Reply, int]:  # noqa: A002 - the protocol's word
        """-> the reply as the server decodes it, and its bytes."""
        if self._code is None or reply.update is None or not isinstance(task, Fit):
            return reply, reply_bytes(reply)
        _, base = delta_base(task)
        wanted = reply.update if base is None else reply.update - base
        slot = who, "-" if task.center is None else str(task.center)
        if self._feedback and slot in self._lost:
            wanted = wanted + self._lost[slot] * np.float32(0.5 ** max(0, round - self._since[slot] - 1))
        arrived, size = self._code(wanted, self._schema)
        if self._feedback:
            self._open[who] = slot, wanted - arrived, round
        return replace(reply, update=arrived if base is None else base + arrived), size

    def mark_counted(self, who: ClientId) -> None:
        """Store the residual of the device's last update, which the server has counted."""
        if who in self._open:
            slot, lost, at = self._open.pop(who)
            self._lost[slot], self._since[slot] = lost, at

    def keep(self, folder: Path) -> list[tuple[ClientId, str, int]]:
        """Write the residuals into `folder`; -> the round of each device's last counted update of each center."""
        checkpoint.save_models(folder, "lost", self._lost)
        return [(who, center, at) for (who, center), at in self._since.items()]

    def recall(self, folder: Path, since: Iterable[tuple[ClientId, str, int]]) -> None:
        self._since = {(who, center): at for who, center, at in since}
        checkpoint.load_models(folder, {who for who, _ in self._since}, self._lost)

    def keep_open(self, folder: Path) -> list[tuple[ClientId, str, int]]:
        """The same for updates that have not counted yet: they are under way between two rounds."""
        checkpoint.save_models(folder, "open", {slot: lost for slot, lost, _ in self._open.values()})
        return [(*slot, at) for slot, _, at in self._open.values()]

    def recall_open(self, folder: Path, under_way: Iterable[tuple[ClientId, str, int]]) -> None:
        found: dict[tuple[ClientId, str], Flat] = {}
        slots = {(who, center): at for who, center, at in under_way}
        checkpoint.load_models(folder, {who for who, _ in slots}, found)
        self._open = {slot[0]: (slot, found[slot], at) for slot, at in slots.items()}


ChannelFactory = Callable[[Schema], CodecChannel]


def channel_factory(codec: str) -> ChannelFactory:
    """How updates travel in this codec. Raises UsageError for a codec that the protocol lacks."""
    code = protocol_codec(codec)
    return CodecChannel if codec == "f32" else partial(CodecChannel, code=code, feedback=codec == "i8")


def reply_bytes(reply: Reply) -> int:
    """Bytes of a float32 update or gradient, or about those of a probe's statistics."""
    vectors = [v for v in (reply.update, reply.grad) if v is not None]
    return sum(4 * vector.size for vector in vectors) or STATISTICS_BYTES
