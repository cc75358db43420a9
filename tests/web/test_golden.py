"""The page's JavaScript against the golden vectors and the hostile inputs that Python is held to, under Node."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

from edge_client.protocol import codecs
from edge_client.protocol.task import Schema, TensorSpec
from tests.support.node import ROOT, run_node, run_tests

SCRIPT = Path(__file__).with_name("golden.test.mjs")
WEB = ROOT / "edge_client" / "web"
LIMIT_BYTES = 400_000  # client code of our own


def test_javascript_reads_and_writes_the_golden_vectors_and_refuses_the_hostile_ones() -> None:
    said = run_tests(SCRIPT)
    passed = re.search(r"^# pass (\d+)$", said, re.MULTILINE)
    assert passed is not None, said[-2000:]
    assert int(passed[1]) >= 50
    assert "# skipped 0" in said


def test_permutations_lots_and_uniform_numbers_are_numpys() -> None:
    seeds = [0, 1, 2**32, 2**53 - 1]
    source = (WEB / "protocol" / "random.js").as_uri()
    program = (
        f"import {{ Pcg64 }} from '{source}';"
        f"console.log(JSON.stringify({seeds}.map((seed) => {{ const g = new Pcg64(seed);"
        "return [[...g.permutation(1000)], [...g.permutation(3)], [...new Pcg64(seed, 9).floats(5)],"
        "[...new Pcg64(seed, 1).doubles(5)], new Pcg64(seed, 2).integers(11, 99),"
        "new Pcg64(seed).integers(2**21, 9)]; })))"
    )
    drawn = json.loads(run_node("--input-type=module", "-e", program))
    for seed, (first, second, noise, doubles, lots, wide) in zip(seeds, drawn, strict=True):
        rng = np.random.Generator(np.random.PCG64(seed))
        assert rng.permutation(1000).tolist() == first
        assert rng.permutation(3).tolist() == second
        spawned = [
            np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(key,)))) for key in (9, 1, 2)
        ]
        assert spawned[0].random(5, dtype=np.float32).tolist() == noise
        assert spawned[1].random(5).tolist() == doubles
        assert spawned[2].integers(11, size=99).tolist() == lots
        assert np.random.Generator(np.random.PCG64(seed)).integers(2**21, size=9).tolist() == wide


def test_models_and_updates_are_rounded_to_the_bit_as_in_python(tmp_path: Path) -> None:
    """Ties between two numbers, rows too small for a scale, and what the device keeps of the rounding."""
    schema = Schema(tuple(TensorSpec(name=name, role="p", shape=shape) for name, shape in (("w", (8, 6)), ("b", (6,)))))
    flat = np.random.default_rng(5).standard_normal(schema.size).astype(np.float32)
    flat[:6] = [127, 62.5, -62.5, 63.5, 0.5, -1.5]  # times the row's scale, which is 1
    flat[6:12] = np.float32(2.0**-127) * np.array([100, -3, 1, 0, 60, -127])
    flat[12:18] = np.array([1, 1 + 2**-11, 1 + 3 * 2**-11, 2**-15 + 2**-25, -(2**-24) * 1.5, 2**-26])
    flat[18:24] = 2.0**125 * np.array([1.5, -1, 0.25, 2**-20, 0, 1])
    flat[-6:] = [0, -0.0, 1e-45, 1e-38, 3.25, -7]
    rows = [[spec.name, spec.role, list(spec.shape)] for spec in schema.tensors]
    vectors = [flat, flat[::-1].copy(), np.zeros_like(flat), flat * np.float32(2.0**-120)]
    (tmp_path / "given.json").write_text(json.dumps({"rows": rows, "vectors": [v.tolist() for v in vectors]}))
    script = f"""
import {{ readFileSync }} from "node:fs";
import {{ encodeVector, encodeWithFeedback }} from "{(WEB / "protocol" / "codecs.js").as_uri()}";
import {{ schemaOf }} from "{(WEB / "protocol" / "schema.js").as_uri()}";
const {{ rows, vectors }} = JSON.parse(readFileSync(process.argv[1]));
const schema = await schemaOf(rows);
const text = (data) => Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("base64");
console.log(JSON.stringify(vectors.map((numbers) => {{
  const flat = Float32Array.from(numbers);
  const files = ["f32", "f16", "i8"].map((codec) => encodeVector(flat, schema, {{ codec, kind: "model" }}));
  const third = flat.map((value) => value / 3);
  const {{ data, residual }} = encodeWithFeedback(flat, third, schema, {{ codec: "i8", base: "zero" }});
  return [...files, data, residual].map(text);
}})));
"""
    told = json.loads(run_node("--input-type=module", "-e", script, tmp_path / "given.json"))
    for vector, found in zip(vectors, told, strict=True):
        wanted = [codecs.encode_vector(vector, schema, codec=codec, kind="model") for codec in ("f32", "f16", "i8")]
        third = (vector.astype(np.float64) / 3).astype(np.float32)
        sent, residual = codecs.encode_with_feedback(vector, third, schema, codec="i8", base="zero")
        assert [base64.b64decode(each) for each in found] == [*wanted, sent, residual.tobytes()]


def test_our_own_code_is_small() -> None:
    assert sum(path.stat().st_size for path in WEB.rglob("*") if path.is_file()) < LIMIT_BYTES


def test_javascript_masks_sums_with_the_bytes_that_python_is_held_to() -> None:
    said = run_tests(Path(__file__).with_name("secure.test.mjs"))
    passed = re.search(r"^# pass (\d+)$", said, re.MULTILINE)
    assert passed is not None, said[-2000:]
    assert int(passed[1]) >= 60
    assert "# fail 0" in said
    assert "# skipped 0" in said


PROMISES = {  # a file of tests beside this one -> what it holds the page to
    "samples": "files and drawings become samples",
    "view": "the page shows a bar for work only and says why a fit is not known",
    "nearest": "a center that cannot be opened does not end the page",
    "scores": "the page tells the errors of a regression",
    "engine": "a phone with too little memory blames neither the program nor the runtime",
    "inbox": "messages that wait for the page take a bounded part of its memory",
    "transport": "the page dials again and says when it cannot",
    "transfer": "blocks and updates are asked for again where that helps and no longer",
    "screen_lock": "the screen stays on for work alone",
    "join": "a phone keeps its name also from an earlier version of the page",
    "state": "a phone follows the coordinator of the keys that it trusts",
}


@pytest.mark.parametrize("name", PROMISES, ids=PROMISES.values())
def test_the_page_passes_the_tests_of(name: str) -> None:
    assert "# fail 0" in run_tests(Path(__file__).with_name(f"{name}.test.mjs"))
