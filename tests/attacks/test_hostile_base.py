"""Tries to exhaust a device with frozen tensors: files that are too large, and shapes that no file has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.program import FROZEN, Container, Program
from edge_client.protocol.task import Schema, TensorSpec
from tests.support.memory_limit import refused_within
from tests.support.softmax_program import program

BASE = Schema((TensorSpec(name="base", role="p", shape=(64, 64)),))
FILE = codecs.encode_vector(np.ones(BASE.size), BASE, codec="f32", kind=FROZEN)


def told(*, size: int = len(FILE), shape: tuple[int, ...] = (64, 64), **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    files = {FROZEN: Container(sha256="0" * 64, size=size)}
    plain = replace(program(), containers={"onnx": files}, batch={"onnx": "any"}, frozen=BASE)
    return {**plain.to_json(), "frozen": [["base", list(shape)]], **more}


def test_the_honest_one_is_read() -> None:
    assert Program.from_json(told()).frozen == BASE
    assert codecs.decode_frozen(FILE, BASE)["base"].shape == (64, 64)


@pytest.mark.parametrize(
    "raw",
    [
        told(size=6 * BASE.size + (1 << 20) + 9),
        told(size=(4 << 30) + 1, shape=(2**20, 2**20)),
        told(size=2**53 - 1, shape=(2**53 - 1,) * 8),
        told(frozen=None),
        told(frozen=[]),
        told(frozen=[["base", [64, 64]], ["base", [64, 64]]]),
        told(frozen=[["base", [0, 64]]]),
        told(frozen=[["base", [64, 64], "p"]]),
        told(containers={e: {FROZEN: {"sha256": h * 64, "size": 9}} for e, h in (("onnx", "0"), ("pt2", "1"))}),
    ],
    ids=["longer", "above 4 GiB", "2^53", "no list", "empty list", "a name twice", "empty", "a role", "two files"],
)
def test_a_program_with_an_impossible_base_is_refused(raw: dict[str, Any]) -> None:
    assert refused_within(200_000, lambda: Program.from_json(raw)) == "bad_program"


@pytest.mark.parametrize("shape", [[2**40, 2**40], [2**53 - 1], [64, 65], [4096], [65536, 65536, 65536, 65537]])
def test_a_file_of_other_shapes_costs_no_memory(shape: list[int]) -> None:
    header = json.dumps([64, 64], separators=(",", ":")).encode()
    forged = FILE.replace(header, json.dumps(shape, separators=(",", ":")).encode())
    length = len(forged) - len(FILE) + int.from_bytes(FILE[:8], "little")
    forged = length.to_bytes(8, "little") + forged[8:]
    forged = forged if length % 8 == 0 else _padded(forged, length)
    assert refused_within(200_000, lambda: codecs.decode_frozen(memoryview(forged), BASE)) == "bad_schema"


def _padded(data: bytes, length: int) -> bytes:
    more = -length % 8
    return (length + more).to_bytes(8, "little") + data[8 : 8 + length] + b" " * more + data[8 + length :]


@pytest.mark.parametrize("end", [0, 7, 8, 100, len(FILE) - 1])
def test_a_file_that_ends_early_is_refused(end: int) -> None:
    assert refused_within(200_000, lambda: codecs.decode_frozen(FILE[:end], BASE)) == "bad_schema"


def test_a_base_that_is_not_finite_is_refused() -> None:
    with pytest.raises(Malformed) as refused:
        codecs.decode_frozen(FILE[:-4] + np.float32(np.nan).tobytes(), BASE)
    assert refused.value.code == "not_finite"


def test_a_model_is_no_base() -> None:
    model = codecs.encode_vector(np.ones(BASE.size), BASE, codec="f32", kind="model")
    assert refused_within(200_000, lambda: codecs.decode_frozen(model, BASE)) == "bad_schema"
