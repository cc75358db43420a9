"""docs/serve-centers.md is right: its commands and scripts run as they stand, and it lists every key."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from edge_client.protocol.nearest.selection_rule import ASSUMED_SAMPLES
from edge_client.protocol.signing import public_key
from export.bundle.bundle_contents import make_signer
from export.bundle.quantize import SCHEMES
from export.serve.nearest import QUESTION_SCHEMAS
from export.serve.openapi import openapi_document
from tests.support.doc_pages import DOCS, PageReader, blocks

PAGE = "serve-centers.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")
SCRIPTS = {b.text.splitlines()[0].removeprefix("# "): b.text for b in blocks(DOCS / PAGE) if b.kind == "python"}


def test_the_commands_leave_what_the_page_says(reader: PageReader) -> None:
    center = reader.folder / "centers" / "centers" / "center-0"
    for name in ("model.onnx", "model.tflite", "model.safetensors", "card.md", "card.json"):
        assert (center / name).is_file()
    small = {p.name for p in (reader.folder / "small" / "centers" / "center-0").glob("model.*.*")}
    assert small == {f"model.{scheme}.{fmt}" for scheme in SCHEMES for fmt in ("onnx", "tflite")}
    assert (reader.folder / "models" / "center-0" / "1" / "model.onnx").is_file()
    index = json.loads((reader.folder / "public" / "index.json").read_text())
    assert set(index) == {"v", "generation", "manifest"}
    assert (reader.folder / "public" / index["manifest"].removeprefix("/")).is_file()


def test_a_bundles_signature_is_checked_as_the_page_says() -> None:
    (text,) = re.findall(r"over the ASCII text `([^`]+)`", TEXT)
    key, manifest = bytes(range(32)), b'{"v": 1}'
    signed = json.loads(make_signer(key, "home")(manifest))
    facts = {"federation": signed["federation"], "sha256": hashlib.sha256(manifest).hexdigest(), "size": len(manifest)}
    checked = text.replace("\\n", "\n").format(**facts).encode("ascii")
    Ed25519PublicKey.from_public_bytes(public_key(key)).verify(bytes.fromhex(signed["sig"]), checked)


def test_every_key_of_the_manifest_has_its_row(reader: PageReader) -> None:
    manifest = json.loads((reader.folder / "centers" / "manifest.json").read_text())
    table = TEXT[TEXT.index("### manifest.json") : TEXT.index("## 2.")]
    named = {
        key for row in re.findall(r"^\| (`[^|]*) \|", table, flags=re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    }
    assert named == set(manifest)
    assert all(f"`{key}`" in table for key in manifest["centers"][0])


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_runs_without_us(reader: PageReader, name: str) -> None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", SCRIPTS[name], flags=re.MULTILINE))
    assert imported <= {"json", "numpy", "onnxruntime", "ai_edge_litert"}
    reader.run(f"python {name}")
    assert re.search(r"\[\d", reader.printed[f"python {name}"])


def test_the_page_lists_every_request() -> None:
    for path in openapi_document()["paths"]:
        plain = path.replace("{center}/{file}", "0/onnx").replace("{generation}/{path}", "<generation>/<path>")
        assert f"{plain}`" in TEXT


def test_the_question_in_the_page_is_one_that_the_server_answers() -> None:
    (question,) = re.findall(r"^curl .* -d '([^']+)' http://127.0.0.1:8080/nearest$", TEXT, flags=re.MULTILINE)
    schema = QUESTION_SCHEMAS["loss"]
    assert schema(json.loads(question), "the question")["n"] == ASSUMED_SAMPLES
    assert f"({ASSUMED_SAMPLES} where it is left out)" in TEXT
