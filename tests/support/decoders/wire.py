"""The decoders of what comes from the broker, with valid input for each: messages, blocks, blobs of JSON, topics.

tensors.py has those of tensor files, files.py those of what comes in files or over HTTPS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coordinator.nearest.answer import answer_near
from edge_client.errors import Malformed
from edge_client.protocol import blocks, codecs, messages, signing, task_codec, topics
from edge_client.protocol.blocks import Bitmap, Manifest, manifest_of
from edge_client.protocol.message_schemas import ROUTES
from edge_client.protocol.nearest.catalog import Catalog, CatalogCenter
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Container, Function, Port, Program
from edge_client.protocol.sum_codec import read_work
from edge_client.protocol.task import Reply
from tests.support.decoders.decoder import FEDERATION, SEED, Check, Decoder, anything, reads_back
from tests.support.decoders.tensors import VECTOR, N, tensor_decoders
from tests.support.mutations import block_changed, bytes_changed, json_changed, text_changed
from tests.support.sample_messages import ALL, BLOB, FIT, MODEL, PROBE, SCHEMA
from tests.support.sum_tasks import STAGES, get, job, task_message

ROUTE = {kind: route for route, kinds in ROUTES.items() for kind in kinds if kind != "near"}


def program() -> Program:
    ports = (
        Port(name="w/fc.weight", dtype="float32", shape=(3, 2)),
        Port(name="x", dtype="float32", shape=("batch", 2)),
    )
    file = Container(sha256=manifest_of(BLOB, "container").sha256, size=len(BLOB))
    return Program(
        model="m",
        loss="cross-entropy",
        optimizer="sgd",
        schema=SCHEMA,
        input=(2,),
        target=(3,),
        dtype="float32",
        functions={name: Function(inputs=ports, outputs=ports[:1]) for name in ("step", "evaluate")},
        containers={"onnx": {"step": file, "evaluate": file}},
        batch={"onnx": "any", "litert": 16},
        opset=18,
        versions={"onnx": "1.18"},
        parity={"onnx": 1e-7},
    )


def catalog() -> Catalog:
    center = CatalogCenter(
        model=manifest_of(BLOB, "model"), devices=3, files={"onnx": manifest_of(b"onnx", "container")}
    )
    return Catalog(
        version=1,
        program=signing.sign_manifest(manifest_of(BLOB, "program"), SEED, FEDERATION),
        containers={"onnx": manifest_of(b"evaluate", "container")},
        centers=(center, center),
        abstain=2.0,
    )


def _message_decoders() -> list[Decoder]:
    out = []
    for number, (kind, fields) in enumerate(ALL):
        route = "t" if kind == "near" and "re" in fields else "rq" if kind == "near" else ROUTE[kind]
        payload = messages.canonical_json({"v": 1, "k": kind, "id": "x-1", "t": 0} | fields)

        def read(data: bytes, route: str = route) -> dict[str, Any]:
            return messages.read_message(data, route)

        again = reads_back(messages.canonical_json, read)
        name = f"message {kind} {number}"
        out.append(Decoder(name=name, read=read, valid=(payload,), mutate=json_changed, check=again, share=2))
    return out


def _sum_decoders() -> list[Decoder]:
    """Tasks of masked sums: the message, and what a device would compute."""
    out = []
    for name in STAGES:

        def read(data: bytes) -> dict[str, Any]:
            message = messages.read_message(data, "t")
            if "work" in message:
                read_work(message, get)
            return message

        again = reads_back(messages.canonical_json, read)
        payload = task_message(job(name))
        out.append(Decoder(name=f"sum {name}", read=read, valid=(payload,), mutate=json_changed, check=again, share=2))
    return out


def _block_decoders() -> list[Decoder]:
    blob = np.random.default_rng(0).bytes(10_000)
    manifest = manifest_of(blob, "delta", block=4_096)
    bitmap = Bitmap(20)
    for index in (0, 3, 9, 19):
        bitmap.add(index)
    packed = [blocks.pack_block(blob[slice(*blocks.body_range(manifest, i))], i, 3) for i in range(3)]
    return [
        Decoder(
            name=f"block {index}",
            read=lambda data, index=index: blocks.unpack_block(data, manifest, index),  # type: ignore[misc]
            valid=(packed[index],),
            mutate=block_changed,
            check=_right_length(blocks.body_range(manifest, index)),
        )
        for index in (0, 2)
    ] + [
        Decoder(
            name="bitmap",
            read=lambda data: Bitmap.from_base64(20, data.decode("latin-1")),
            valid=(bitmap.to_base64().encode(),),
            mutate=bytes_changed,
            check=lambda given, _valid, found: _equal(found.to_base64().encode(), given),
        ),
        Decoder(
            name="base64",
            read=lambda data: blocks.decode_base64(data.decode("latin-1"), 2_048),
            valid=(b"AAECAwQ=", b"A" * 2_000),
            mutate=bytes_changed,
            check=lambda _given, _valid, found: _equal(max(len(found), 2_048), 2_048),
        ),
    ]


def _right_length(span: tuple[int, int]) -> Check:
    """A repaired checksum makes it a block, for the whole blob's hash to refuse; its place and length are fixed."""

    def check(given: bytes, valid: bytes, body: bytes) -> None:
        assert len(body) == span[1] - span[0]
        assert given[:12] == valid[:12]
        assert given[16:] == body

    return check


def _equal(found: object, expected: object) -> None:
    assert found == expected


def _signed(data: bytes) -> Manifest:
    manifest = Manifest.from_json(messages.parse_json(data))
    signing.verify_manifest(manifest, [signing.public_key(SEED)], FEDERATION)
    return manifest


def _signed_as_made(_given: bytes, valid: bytes, found: Manifest) -> None:
    made = Manifest.from_json(messages.parse_json(valid))
    assert (found.kind, found.sha256, found.size) == (made.kind, made.sha256, made.size)


def _task(data: bytes) -> object:
    message = messages.read_message(data, "t")
    if message["k"] != "task":
        raise Malformed("bad_kind", "no task")
    return task_codec.read_task(message, lambda _manifest: VECTOR)


def _near(data: bytes) -> dict[str, Any]:
    message = messages.read_message(data, "rq")
    if message["k"] != "near":
        raise Malformed("bad_kind", "no question")
    return answer_near(catalog(), message, SCHEMA)


def _topic(data: bytes) -> topics.Route:
    return topics.Topics(FEDERATION).parse(data.decode("utf-8", "surrogateescape"))


def _topic_is_what_was_built(given: bytes, _valid: bytes, route: topics.Route) -> None:
    t = topics.Topics(FEDERATION)
    cid, label, index, shard = route.cid or "", route.label or "", route.index or 0, route.shard or 0
    built: Mapping[str, Callable[[], str]] = {
        "coord": t.coord,
        "cat": t.catalog,
        "st": lambda: t.state(cid),
        "rq": lambda: t.request(cid),
        "in": lambda: t.upload(shard, cid, label, index),
        "t": lambda: t.down(cid),
        "b": lambda: t.down_block(cid, label, index),
    }
    assert built[route.kind]().encode() == given


def _json_decoders() -> list[Decoder]:
    signed = catalog().program.to_json()
    inline = manifest_of(b"small", "stats", inline=True).to_json()
    losses = codecs.encode_stats(Reply(n=N, losses=np.array([0.5, 0.25])), SCHEMA)
    near = {"v": 1, "k": "near", "id": "x", "t": 0, "how": "loss", "n": N}
    near["stats"] = manifest_of(losses, "stats", inline=True).to_json()
    tasks = [{"v": 1, "k": "task", "id": "x", "t": 0, "epoch": 1} | job for job in (FIT, PROBE)]
    return [
        Decoder(
            name="json",
            read=messages.parse_json,
            valid=(messages.canonical_json({"a": [1, 2.5, None, {"b": "é"}], "c": True, "d": "x" * 50}),),
            mutate=json_changed,
            check=reads_back(messages.canonical_json, messages.parse_json),
            share=4,
        ),
        Decoder(
            name="manifest",
            read=lambda data: Manifest.from_json(messages.parse_json(data)),
            valid=(messages.canonical_json(MODEL), messages.canonical_json(signed), messages.canonical_json(inline)),
            mutate=json_changed,
            check=reads_back(
                lambda m: messages.canonical_json(m.to_json()),
                lambda data: Manifest.from_json(messages.parse_json(data)),
            ),
            share=3,
        ),
        Decoder(
            name="signature",
            read=_signed,
            valid=(messages.canonical_json(signed),),
            mutate=json_changed,
            check=_signed_as_made,
            share=2,
        ),
        Decoder(
            name="program",
            read=lambda data: Program.from_json(messages.parse_json(data, MAX_PROGRAM_BYTES)),
            valid=(messages.canonical_json(program().to_json()),),
            mutate=json_changed,
            check=reads_back(
                lambda p: messages.canonical_json(p.to_json()),
                lambda data: Program.from_json(messages.parse_json(data, MAX_PROGRAM_BYTES)),
            ),
            share=3,
        ),
        Decoder(
            name="catalog",
            read=Catalog.from_bytes,
            valid=(catalog().to_bytes(),),
            mutate=json_changed,
            check=reads_back(Catalog.to_bytes, Catalog.from_bytes),
            share=3,
        ),
        Decoder(
            name="task",
            read=_task,
            valid=tuple(messages.canonical_json(task) for task in tasks),
            mutate=json_changed,
            check=anything,
            share=4,
        ),
        Decoder(
            name="nearest",
            read=_near,
            valid=(messages.canonical_json(near),),
            mutate=json_changed,
            check=anything,
            share=2,
        ),
    ]


def wire_decoders() -> list[Decoder]:
    """All that read what comes over MQTT."""
    t = topics.Topics(FEDERATION)
    names = ("", ".", "..", "+", "#", "$SYS", "a" * 65, "coordinator.0", "é", "\0", "065", "65536", "-1", "dev-1", "rq")
    sha = manifest_of(BLOB, "model").sha256
    valid_topics = [t.coord(), t.catalog(), t.state("d1"), t.request("d1"), t.down("d1")]
    valid_topics += [t.upload(0, "d1", sha[:16], 7), t.down_block("d1", sha[:16], 65_535)]
    return [
        *_json_decoders(),
        *_message_decoders(),
        *_sum_decoders(),
        *_block_decoders(),
        *tensor_decoders(),
        Decoder(
            name="topic",
            read=_topic,
            valid=tuple(topic.encode() for topic in valid_topics),
            mutate=text_changed(names),
            check=_topic_is_what_was_built,
            share=2,
        ),
    ]
