"""The task message of each device from a method's exchange, and what its reply has to look like.

Building the same task twice gives the same question; a replay compares the questions' hashes. A task names its models
by hash, so the models are written to the blob folder here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.artifacts.signed_program import CompiledProgram
from coordinator.config import CoordinatorConfig
from coordinator.rounds.sample_weights import max_samples
from coordinator.rounds.silence import LastingRefusals, Misses
from coordinator.rounds.update_validation import (
    ZERO_BASE,
    Asked,
    AskedStage,
    ReplySpec,
    delta_base,
    max_reply_bytes,
)
from coordinator.runtime.block_server import BlockServer
from coordinator.runtime.sender import CoordinatorSender
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.store import Store
from edge_client.protocol import codecs, sum_codec, task_codec
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.task import ClientId, Flat
from edge_client.transport.clock import Clock

NetworkExchange = Mapping[ClientId, Asked]
# How a question reaches its device, which a restart may change: signatures change with the key, blocks with a setting,
# and the program grows, with a container for each engine that is asked for.
DELIVERY, PROGRAM_FIELDS = frozenset({"key", "sig", "block"}), frozenset({"program", "container", "step"})
SIZE_SLACK_BYTES = 1 << 20  # of what a task allows; a reply needs less. It stays, since a replay compares tasks


@dataclass(frozen=True, kw_only=True)
class ExchangeContext:
    """The parts that an exchange uses. `members` is the enrolled fleet: (training samples, engine) per device.

    `misses` counts the exchanges that a device has not answered (silence.py), since this process began.
    `unable` are the devices that cannot do its tasks. `revoked` tells the devices that are turned away.
    """

    config: CoordinatorConfig
    clock: Clock
    store: Store
    sender: CoordinatorSender
    downloads: BlockServer
    prepared: CompiledProgram
    members: Mapping[ClientId, tuple[int, str]]
    misses: dict[ClientId, Misses]
    unable: LastingRefusals = field(default_factory=LastingRefusals)
    revoked: Callable[[], frozenset[ClientId]] = frozenset


@dataclass(frozen=True, kw_only=True)
class PreparedTask:
    """One device's task message, the blobs that it must be able to fetch, and how to validate its reply."""

    fields: Mapping[str, Any]  # of the task message, without `left_ms`
    blobs: tuple[Manifest, ...]
    reply_spec: ReplySpec
    max_size: int

    @property
    def kind(self) -> str:
        """What is asked: the job, and the stage of a sum."""
        return " ".join(str(self.fields[name]) for name in ("job", "stage") if name in self.fields)

    @property
    def sha256(self) -> str:
        """The hash of what the task asks, however it is delivered; equal questions have equal hashes everywhere."""
        asked = {name: value for name, value in self.fields.items() if name not in PROGRAM_FIELDS}
        return hashlib.sha256(canonical_json(_undelivered(asked))).hexdigest()


def _undelivered(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The same JSON value without the names in DELIVERY."""
    if isinstance(value, Mapping):
        return {name: _undelivered(inner) for name, inner in value.items() if name not in DELIVERY}
    return [_undelivered(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def prepare_tasks(key: ExchangeKey, tasks: NetworkExchange, context: ExchangeContext) -> dict[ClientId, PreparedTask]:
    """The task messages of one exchange, sorted by device."""
    return prepare_each(dict.fromkeys(tasks, key), tasks, context)


def prepare_each(
    keys: Mapping[ClientId, ExchangeKey], tasks: NetworkExchange, context: ExchangeContext
) -> dict[ClientId, PreparedTask]:
    """The task message of each device, which has an exchange of its own; sorted by device."""
    put = _blob_writer(context)
    most = max_samples([n for n, _ in context.members.values()], context.config.fleet.max_samples_ratio)
    return {cid: _ask(keys[cid], cid, tasks[cid], context, put, max_samples=most) for cid in sorted(tasks)}


def _ask(
    key: ExchangeKey,
    cid: ClientId,
    task: Asked,
    context: ExchangeContext,
    put: Callable[[Flat, str], Manifest],
    *,
    max_samples: int,
) -> PreparedTask:
    prepared, schema = context.prepared, context.prepared.program.schema
    samples, engine = context.members[cid]
    if isinstance(task, AskedStage):
        job = sum_codec.stage_fields(task, put, lambda data: _put_message(data, context, inline=task.work is None))
    else:
        job = task_codec.task_fields(task, put)
    named, vector = delta_base(task)
    base = ZERO_BASE if vector is None else job[named]["sha256"]
    max_size = 4 * 4 * schema.size + SIZE_SLACK_BYTES
    fields = {
        **job,
        "run": key.run,
        "round": key.round,
        "exchange": key.exchange,
        "program": prepared.manifest.to_json(),
        **{field: prepared.container(engine, f).to_json() for field, f in task_codec.container_functions(job).items()},
        "schema": schema.sha256,
        "reply": {"codec": context.config.update.codec, "base": named, "max_size": max_size},
    }
    question = ReplySpec(
        task=task,
        schema=schema,
        samples=samples,
        codec=context.config.update.codec,
        base=base,
        base_vector=vector,
        max_update_rms=context.config.update.max_rms,
        max_samples=max_samples,
        classes=prepared.program.classes,
        positions=prepared.program.positions,
    )
    return PreparedTask(
        fields=fields,
        blobs=tuple(task_codec.task_manifests(fields)),
        reply_spec=question,
        max_size=min(max_size, max_reply_bytes(question)),
    )


def _put_message(data: bytes, context: ExchangeContext, *, inline: bool) -> Manifest:
    """A message of a sum as a signed blob; a small one is `inline` in a task that has room for it."""
    context.store.blobs.put(data)
    return context.prepared.sign(manifest_of(data, "sum", block=context.config.transfer.block, inline=inline))


def _blob_writer(context: ExchangeContext) -> Callable[[Flat, str], Manifest]:
    """A function that writes each distinct vector of an exchange to the blob folder once."""
    schema, known = context.prepared.program.schema, dict[tuple[str, str], Manifest]()

    def put(flat: Flat, kind: str) -> Manifest:
        values = np.ascontiguousarray(flat, dtype=np.float64 if kind == "points" else np.float32)
        name = (kind, hashlib.sha256(values.data).hexdigest())
        if name not in known:
            data = (
                sum_codec.encode_points(values)
                if kind == "points"
                else codecs.encode_vector(values, schema, codec="f32", kind=kind)
            )
            context.store.blobs.put(data)
            known[name] = context.prepared.sign(manifest_of(data, kind, block=context.config.transfer.block))
        return known[name]

    return put
