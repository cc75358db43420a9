"""The recorded bytes of protocol version 1. A change here is a change of the protocol and needs a new number."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.nearest.answer import decode_sketch
from edge_client.engines.golden_run import golden_inputs
from edge_client.errors import Malformed
from edge_client.protocol import blocks, codecs, message_schemas, messages, signing, tensors, topics
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.nearest.input_moments import moments_of
from edge_client.protocol.nearest.router_file import read_router, write_router
from edge_client.protocol.program import Program
from edge_client.protocol.task import Fit, Optimiser, Reply, Schema, TensorSpec
from edge_client.training.fit_probe import make_job
from edge_client.training.optimiser import Rule
from tests.support.softmax_program import program, samples

HERE = Path(__file__).parent
VECTORS: dict[str, Any] = json.loads((HERE / "vectors.json").read_text(encoding="utf-8"))
P = bytes(range(256)) * 40
MANIFEST = blocks.manifest_of(P, "program", block=4096)
SCHEMA = Schema(tuple(TensorSpec(name=n, role=r, shape=tuple(s)) for n, r, s in VECTORS["schema"]["rows"]))
VECTOR = np.array(VECTORS["vector"], np.float32)
PROGRAM = program()
TIME_MS = 1_700_000_000_000


def stats() -> bytes:
    given = VECTORS["stats"]
    reply = Reply(
        n=given["n"],
        losses=np.array(given["loss"]),
        votes=np.array(given["votes"]),
        confusion=np.array(given["confusion"]),
    )
    return codecs.encode_stats(reply, SCHEMA)


def tensor_file(name: str) -> bytes:
    if name == "stats":
        return stats()
    kind, codec = name.split("_")
    return codecs.encode_vector(
        VECTOR, SCHEMA, codec=codec, kind=kind, base=MANIFEST.sha256 if kind == "delta" else None
    )


def control_message(name: str) -> bytes:
    """One of the recorded messages; "probe" is a task, too."""
    key = {"run": "r1", "round": 3}
    update = blocks.manifest_of(stats(), "stats", inline=True)
    fields: dict[str, dict[str, Any]] = {
        "get": {"ident": "a1", "sha256": MANIFEST.sha256, "block": 4096, "at": [[0, 2]]},
        "task": {
            **key,
            "ident": "c1-7",
            "epoch": 1,
            "exchange": 0,
            "left_ms": 60_000,
            "job": "fit",
            "anchor": "start",
            "lr": 0.05,
            "momentum": 0.0,
            "mu": 0.1,
            "steps": 20,
            "batch": 16,
            "seed": 7,
            "schema": SCHEMA.sha256,
            "program": signing.sign_manifest(MANIFEST, bytes(range(32)), "demo"),
            "container": blocks.manifest_of(P, "container"),
            "start": blocks.manifest_of(tensor_file("model_f32"), "model"),
            "reply": {"codec": "i8", "base": "start", "max_size": 1_048_736},
        },
        "probe": {
            **key,
            "ident": "c1-8",
            "epoch": 1,
            "exchange": 1,
            "left_ms": 60_000,
            "job": "probe",
            "models": [
                blocks.manifest_of(tensor_file("model_f32"), "model").to_json(),
                {"own": "personal", "init": blocks.manifest_of(tensor_file("model_f32"), "model").to_json()},
            ],
            "want": ["posterior"],
            "prior": [0.25, 0.75],
            "split": "train",
            "batch": 16,
            "seed": 7,
            "schema": SCHEMA.sha256,
            "program": signing.sign_manifest(MANIFEST, bytes(range(32)), "demo"),
            "container": blocks.manifest_of(P, "container"),
            "reply": {"codec": "f32", "base": "zero", "max_size": 1_048_736},
        },
        "rdy": {
            **key,
            "ident": "d1-2",
            "exchange": 1,
            "attempt": 0,
            "n": 4,
            "what": "stats",
            "update": update,
            "seconds": 0.5,
        },
        "ack": {
            **key,
            "ident": "c1-9",
            "epoch": 1,
            "exchange": 1,
            "attempt": 0,
            "sha256": update.sha256,
            "status": "ok",
        },
    }
    return messages.write_message("task" if name == "probe" else name, t_ms=TIME_MS, **fields[name])


def named(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_blob_is_named_by_its_hash_and_routed_by_its_label() -> None:
    assert named(P) | {"label": topics.routing_label(MANIFEST.sha256)} == VECTORS["p"]


def test_the_block_of_hello() -> None:
    assert blocks.pack_block(b"hello", 0, 1).hex() == VECTORS["block_hello"]


def test_the_marked_block_of_hello() -> None:
    given, whole = VECTORS["block_hello_marked"], blocks.manifest_of(b"hello", "delta", block=4096)
    assert blocks.pack_block(b"hello", 0, 1, given["mark"]).hex() == given["block"]
    assert blocks.unpack_marked_block(bytes.fromhex(given["block"]), whole, 0) == (b"hello", given["mark"])
    with pytest.raises(Malformed, match="where none belongs"):
        blocks.unpack_block(bytes.fromhex(given["block"]), whole, 0)


def test_the_three_blocks_of_p() -> None:
    bodies = [P[slice(*blocks.body_range(MANIFEST, i))] for i in range(3)]
    packed = [blocks.pack_block(body, i, 3) for i, body in enumerate(bodies)]
    assert [block[:16].hex() for block in packed] == VECTORS["block_headers_of_p"]
    assert len(bodies[-1]) == VECTORS["last_body_of_p"]
    assert b"".join(blocks.unpack_block(block, MANIFEST, i) for i, block in enumerate(packed)) == P


def test_the_manifest_of_p() -> None:
    assert messages.canonical_json(MANIFEST.to_json()).decode() == VECTORS["manifest_of_p"]
    assert len(VECTORS["manifest_of_p"]) == 120


def test_a_bitmap_counts_from_the_least_significant_bit() -> None:
    given = VECTORS["bitmap"]
    bitmap = blocks.Bitmap(given["total"])
    assert [bitmap.add(i) for i in given["have"]] == [True] * 3
    assert bitmap.to_base64() == given["base64"]


def test_the_shard_of_a_device() -> None:
    given = VECTORS["shard"]
    assert zlib.crc32(given["cid"].encode()) == given["crc32"]
    assert topics.client_shard(given["cid"], given["shards"]) == given["shard"]


def test_a_schema_is_hashed_sorted_by_name() -> None:
    assert SCHEMA.sha256 == VECTORS["schema"]["sha256"]


def test_i8_rounds_ties_to_even_and_keeps_a_row_of_zeros() -> None:
    stored, _ = tensors.unpack_tensors(tensor_file("delta_i8"))
    assert stored["fc.weight"].tolist() == VECTORS["i8"]["q"]
    assert stored["fc.weight#s"].tobytes().hex() == VECTORS["i8"]["s"]
    decoded = codecs.decode_vector(tensor_file("delta_i8"), SCHEMA, kind="delta", codec="i8", base=MANIFEST.sha256)
    assert np.array_equal(decoded[:3], np.array(VECTORS["i8"]["decoded_row_0"], np.float32))


def test_f16_scales_by_a_power_of_two() -> None:
    schema = Schema((TensorSpec(name="t", role="p", shape=(2,)),))
    file = codecs.encode_vector(np.array(VECTORS["f16"]["t"]), schema, codec="f16", kind="model")
    stored, _ = tensors.unpack_tensors(file)
    assert stored["t#s"].tobytes().hex() == VECTORS["f16"]["s"]
    assert stored["t"].tobytes().hex() == VECTORS["f16"]["q"]


@pytest.mark.parametrize("name", list(VECTORS["files"]))
def test_tensor_files_keep_their_bytes(name: str) -> None:
    data = tensor_file(name)
    assert named(data) | {"header": int.from_bytes(data[:8], "little")} == VECTORS["files"][name]


@pytest.mark.parametrize("name", list(VECTORS["messages"]))
def test_control_messages_keep_their_bytes_and_are_read_back(name: str) -> None:
    payload = control_message(name)
    assert named(payload) == VECTORS["messages"][name]
    assert messages.canonical_json(messages.read_message(payload)) == payload


def test_keys_and_signatures() -> None:
    key = VECTORS["key"]
    private, public = bytes.fromhex(key["private"]), bytes.fromhex(key["public"])
    assert signing.public_key(private) == public
    assert signing.key_id(public) == key["id"]
    assert signing.sign(private, "demo", "program", MANIFEST.sha256, MANIFEST.size) == VECTORS["signature_of_p"]


def test_batches_follow_numpys_permutation_of_the_seed() -> None:
    given = VECTORS["batches"]
    rng = np.random.Generator(np.random.PCG64(given["seed"]))
    assert rng.permutation(given["n"]).tolist() == given["first_pass"]
    assert rng.permutation(given["n"]).tolist() == given["second_pass"]


def test_a_fit_holds_out_the_recorded_samples() -> None:
    given = VECTORS["held_out"]
    task = Fit(start=np.zeros(PROGRAM.schema.size, np.float32), steps=1, batch=4, lr=0.1, seed=7, rows=given["rows"])
    assert make_job(PROGRAM, task, samples(np.random.default_rng(0), given["n"])).weights.tolist() == given["weights"]


@pytest.mark.parametrize(
    "name", [name for name in VECTORS["spelled"] if name not in ("catalog", "program.json", "guide")]
)
def test_spelled_messages_are_read_and_written_as_they_stand(name: str) -> None:
    text = VECTORS["spelled"][name].encode()
    kind = name.partition(",")[0]
    message = messages.read_message(text)
    assert message["k"] == kind
    assert messages.canonical_json(message) == text
    fields = {field: value for field, value in message.items() if field not in ("v", "k", "id", "t")}
    assert messages.write_message(kind, ident=message["id"], t_ms=TIME_MS, **fields) == text


def test_there_is_a_vector_of_every_kind() -> None:
    spelled = {json.loads(text).get("k") for text in VECTORS["spelled"].values()} - {None}
    assert spelled | set(VECTORS["messages"]) >= message_schemas.MESSAGE_KINDS
    assert "near, the answer" in VECTORS["spelled"]


def test_the_catalog_and_the_program_are_read_and_written_as_they_stand() -> None:
    catalog, program = (VECTORS["spelled"][name].encode() for name in ("catalog", "program.json"))
    assert Catalog.from_bytes(catalog).to_bytes() == catalog
    read = Program.from_json(messages.parse_json(program))
    assert messages.canonical_json(read.to_json()) == program
    assert read.schema == SCHEMA
    said = messages.read_message(VECTORS["spelled"]["cat"].encode())["catalog"]
    assert named(catalog) == {"bytes": said["size"], "sha256": said["sha256"]}
    public = bytes.fromhex(VECTORS["key"]["public"])
    signing.verify_manifest(blocks.Manifest.from_json(said), [public], "demo")


def test_a_golden_run_is_read_and_written_as_it_stands() -> None:
    text = VECTORS["golden"]["program"].encode()
    program = Program.from_json(messages.parse_json(text))
    assert messages.canonical_json(program.to_json()) == text
    assert program.golden["onnx"].losses == (1.5, 1.25, 1.0)


@pytest.mark.parametrize("absent", [{"golden": None}, {}])
def test_a_program_of_an_older_compiler_has_no_golden_run(absent: dict[str, None]) -> None:
    raw = messages.parse_json(VECTORS["golden"]["program"].encode())
    del raw["golden"]
    assert Program.from_json(raw | absent).golden == {}


@pytest.mark.parametrize(("engine", "name"), [("onnx", "any"), ("litert", "fixed")])
def test_the_inputs_of_a_golden_run_are_drawn_as_recorded(engine: str, name: str) -> None:
    program = Program.from_json(messages.parse_json(VECTORS["golden"]["program"].encode()))
    run = golden_inputs(program, program.golden[engine], fixed=name == "fixed")
    drawn = [*run.start.values(), *(value for step in run.steps for value in step.values())]
    data = b"".join(value.astype("<f4").tobytes() for value in drawn)
    data += b"".join(sign.astype("i1").tobytes() for sign in run.signs.values())
    assert hashlib.sha256(data).hexdigest() == VECTORS["golden"]["inputs"][name]
    if name == "any":
        assert run.start["w/fc.weight"].ravel().tolist() == VECTORS["golden"]["weight"]
        assert run.steps[-1]["y"].argmax(axis=1).tolist() == VECTORS["golden"]["labels"]
        assert run.signs["w/fc.weight"].ravel().tolist() == VECTORS["golden"]["signs"]


@pytest.mark.parametrize("row", range(len(VECTORS["optimisers"]["rows"])))
def test_optimisers_move_weights_as_recorded(row: int) -> None:
    """The recorded weights are those of torch.optim, in float64."""
    given = VECTORS["optimisers"]
    written, wanted = given["rows"][row]
    optimiser = Optimiser(**written)
    assert optimiser.to_json() == written
    rule, w = Rule(optimiser, given["lr"]), np.array(given["start"])
    for k in range(given["steps"]):
        rule(w, (7 * (4 * k + np.arange(4)) % 11 - 5) / 8)
    assert w == pytest.approx(wanted, abs=1e-9)


def test_a_guide_is_read_and_written_as_it_stands() -> None:
    text = VECTORS["spelled"]["guide"].encode()
    guide = read_router(text)
    assert write_router(guide) == text
    belief = guide.predict("loss", {"loss": [0.25, 0.75]}, 20)
    assert belief.center == 0
    assert belief.probabilities[0] == pytest.approx(1 / (1 + np.exp(-2.0 * 0.5 / 0.125)))
    assert guide.predict("loss", {"loss": [0.75, 0.75]}, 20).center is None


def test_the_moments_of_inputs_are_summed_as_recorded() -> None:
    given = VECTORS["inputs"]
    size = given["n"] * int(np.prod(given["shape"]))
    x = (((7 * np.arange(size)) % 11 - 5) / 2).reshape(given["n"], *given["shape"])
    moments = moments_of(x)
    assert moments.first == pytest.approx(given["first"], abs=1e-8)
    assert np.trace(moments.second) == pytest.approx(given["trace"], abs=1e-8)
    assert moments.second[0, -1] == pytest.approx(given["corner"], abs=1e-8)


def test_a_sketch_travels_as_it_stands() -> None:
    asked = messages.read_message(VECTORS["spelled"]["near, by sketch"].encode())
    manifest = blocks.Manifest.from_json(asked["sketch"])
    assert manifest.inline is not None
    assert decode_sketch(manifest.inline, SCHEMA).tolist() == [0.5, -0.25]
    values = {"sketch": np.array([0.5, -0.25], np.float32)}
    assert tensors.pack_tensors(values, kind="sketch", codec="f32", schema=SCHEMA.sha256) == manifest.inline


def test_topics_are_built_and_read_as_they_stand() -> None:
    t, label = topics.Topics("demo"), VECTORS["p"]["label"]
    broadcast = [t.coord(), t.catalog()]
    up = [t.state("dev-1"), t.request("dev-1"), t.upload(2, "dev-1", label, 0)]
    assert [*broadcast, *up, t.down("dev-1"), t.down_block("dev-1", label, 2)] == VECTORS["topics"]
    assert [t.parse(topic).kind for topic in VECTORS["topics"]] == ["coord", "cat", "st", "rq", "in", "t", "b"]


def test_noise_is_the_upper_bits_of_the_seeds_stream() -> None:
    given = VECTORS["noise"]
    sequence = np.random.SeedSequence(given["seed"], spawn_key=(given["step"],))
    drawn = np.random.Generator(np.random.PCG64(sequence)).random(len(given["first"]), dtype=np.float32)
    assert (drawn * 2**24).astype(int).tolist() == given["first"]


def strings(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_the_document_prints_every_vector() -> None:
    document = (HERE.parents[1] / "PROTOCOL.md").read_text(encoding="utf-8")
    recorded = {text for name, value in VECTORS.items() if name != "about" for text in strings(value)}
    assert sorted(text for text in recorded if text not in document) == []
