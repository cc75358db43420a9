"""The recorded inputs that a reader of protocol version 1 must refuse, and how: `refused.json`, for any language."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_client.errors import Malformed
from edge_client.protocol import blocks, codecs, messages
from edge_client.protocol.blocks import Bitmap, Manifest, manifest_of
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program
from edge_client.protocol.task import Schema, TensorSpec
from edge_client.protocol.topics import Topics

HERE = Path(__file__).parent
REFUSED: dict[str, Any] = json.loads((HERE / "refused.json").read_text(encoding="utf-8"))
ROWS = json.loads((HERE / "vectors.json").read_text(encoding="utf-8"))["schema"]["rows"]
SCHEMA = Schema(tuple(TensorSpec(name=n, role=r, shape=tuple(s)) for n, r, s in ROWS))
HELLO = manifest_of(b"hello", "model")
READERS: dict[str, Callable[..., object]] = {
    "json": lambda text: messages.parse_json(text.encode()),
    "messages": lambda route, text: messages.read_message(text.encode(), route),
    "manifests": Manifest.from_json,
    "blocks": lambda data: blocks.unpack_block(bytes.fromhex(data), HELLO, 0),
    "bitmaps": lambda text: Bitmap.from_base64(10, text),
    "topics": Topics("demo").parse,
    "programs": lambda text: Program.from_json(parsed_program(text)),
    "files": lambda data: codecs.decode_vector(bytes.fromhex(data), SCHEMA, kind="model"),
}


def parsed_program(text: str) -> Any:  # noqa: ANN401 - JSON
    """As a device reads a program (edge_client/runtime/task_runner.py)."""
    try:
        return messages.parse_json(text.encode(), MAX_PROGRAM_BYTES)
    except Malformed as wrong:
        raise Malformed("bad_program", wrong.message) from wrong


def test_every_list_has_a_reader() -> None:
    assert set(REFUSED) - {"about"} == set(READERS)


@pytest.mark.parametrize("name", READERS)
def test_each_is_refused_with_the_recorded_code(name: str) -> None:
    for *given, code in REFUSED[name]:
        with pytest.raises(Malformed) as refused:
            READERS[name](*given)
        assert refused.value.code == code, given
