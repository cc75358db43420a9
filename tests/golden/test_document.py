"""PROTOCOL.md against the code: every kind, field, code and limit that the code knows is in the document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from edge_client.protocol import blocks, message_schemas, messages, tensors, topics
from edge_client.protocol.messages import canonical_json, read_message
from edge_client.protocol.program import Program
from edge_client.protocol.task import Schema, TensorSpec

DOCUMENT = (Path(__file__).parents[2] / "PROTOCOL.md").read_text(encoding="utf-8")
VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
SECTIONS = dict(re.findall(r"^## (\d+)\. .*?\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE))
MESSAGES, ANSWERS = SECTIONS["7"], SECTIONS["13"]
KEY = {"run", "round", "exchange"}


def words(text: str) -> set[str]:
    """Whatever stands in backquotes, cut at spaces."""
    return {word for quoted in re.findall(r"`([^`]+)`", text) for word in quoted.split()}


def about(kind: str) -> str:
    """The paragraphs of section 7 that begin with the kind in bold, up to the next one."""
    parts = re.split(r"(?=\*\*`)|(?=^###)", MESSAGES, flags=re.MULTILINE)
    return "\n".join(part for part in parts if part.startswith(f"**`{kind}`**"))


@pytest.mark.parametrize("kind", sorted(message_schemas.MESSAGE_KINDS))
def test_every_field_of_a_kind_is_in_its_paragraph(kind: str) -> None:
    tables = [
        message_schemas.MESSAGE_TABLES[kind],
        *([message_schemas.MESSAGE_TABLES["near-answer"]] if kind == "near" else []),
    ]
    if kind == "task":
        tables += [message_schemas.table_of("task", {"job": job}, down=False) for job in ("fit", "probe")]
    fields = set[str]().union(*tables) - set(message_schemas.COMMON_FIELDS)
    text = about(kind)
    assert text
    assert sorted(fields - words(text) - (KEY if "KEY" in text else set())) == []


@pytest.mark.parametrize("job", ["fit", "probe"])
def test_every_field_of_a_sum_is_in_its_section(job: str) -> None:
    fields = set(message_schemas.SUM_TABLES[job]) | set(message_schemas.SCALE_TABLE)
    choices = {"only", "given", "loss", "nearest", "shares", "posterior", "asked", "center", "mixture"}
    assert sorted((fields | choices | set(message_schemas.SUM_STAGES)) - words(SECTIONS["21"])) == []


def fields_below(check: object, place: str) -> set[tuple[str, str]]:
    """The fields of the records in a field, each with the name of the field that has the record."""
    found = set[tuple[str, str]]()
    for part in [cell.cell_contents for cell in getattr(check, "__closure__", None) or ()]:
        if not isinstance(part, Mapping):
            found |= fields_below(part, place)
            continue
        rows = [row for value in part.values() for row in (value.items() if isinstance(value, Mapping) else ())]
        rows += [(name, value[0]) for name, value in part.items() if isinstance(value, tuple)]
        found |= {(place, name) for name, _ in rows}
        found = found.union(*(fields_below(inner, name) for name, inner in rows))
    return found


def spelled_fields(value: object, place: str = "") -> set[tuple[str, str]]:
    if isinstance(value, list):
        return set().union(*(spelled_fields(each, place) for each in value))
    if not isinstance(value, dict):
        return set()
    return {(place, name) for name in value}.union(*(spelled_fields(inner, name) for name, inner in value.items()))


@pytest.mark.parametrize("kind", [*sorted(message_schemas.MESSAGE_KINDS), "fit", "probe"])
def test_every_field_of_a_record_is_in_the_document_and_in_a_vector_that_is_written_out(kind: str) -> None:
    """The vectors are what the page in JavaScript and the device in Go read: a field that they lack fails there."""
    jobs = ("fit", "probe")
    table = message_schemas.table_of("task", {"job": kind}, down=True) if kind in jobs else None
    rows = (table or message_schemas.MESSAGE_TABLES[kind]).items()
    fields = set[tuple[str, str]]().union(*(fields_below(check, name) for name, (check, _) in rows))
    spelled = spelled_fields([json.loads(text) for text in VECTORS["spelled"].values()])
    candidates = {("models", "own"), ("models", "init")}  # of the vector `probe`, of which only the hash is written
    assert sorted(fields - spelled - candidates) == []
    assert sorted({name for _, name in fields} - set(re.findall(r"\w+", MESSAGES + SECTIONS["8"]))) == []


def test_fields_of_every_message_are_listed() -> None:
    assert {"v", "k", *message_schemas.COMMON_FIELDS, *message_schemas.EPOCH_FIELDS} <= words(MESSAGES)


def test_every_kind_stands_in_the_table_of_topics() -> None:
    assert words(SECTIONS["2"]) >= message_schemas.MESSAGE_KINDS


@pytest.mark.parametrize(
    ("where", "codes"),
    [("err", message_schemas.ERR_CODES), ("ack", message_schemas.ACK_STATUSES), ("nack", message_schemas.NACK_CODES)],
)
def test_every_answer_is_listed_with_where_it_occurs(where: str, codes: tuple[str, ...]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([a-z ]+) \|", ANSWERS, re.MULTILINE)
    assert {code for code, places in rows if where in places.split()} == set(codes)


def test_the_limits_are_the_codes() -> None:
    printed = set(re.findall(r"\d+(?:,\d{3})*", DOCUMENT))
    numbers = [
        *(
            messages.MAX_MESSAGE_BYTES,
            blocks.MAX_INLINE_BYTES,
            blocks.BLOCK_BYTES_STEP,
            blocks.MAX_BLOCK_BYTES,
            blocks.MAX_BLOCKS,
        ),
        *(blocks.DEFAULT_BLOCK_BYTES, blocks.MAX_BITMAP_BYTES, tensors.MAX_HEADER_BYTES, tensors.MAX_TENSORS),
        *(
            topics.MAX_TOPIC_NUMBER,
            message_schemas.MAX_GET_BLOCKS,
            message_schemas.MAX_CENTERS,
            message_schemas.MAX_DETAIL_CHARS,
            messages.MAX_DEPTH,
        ),
    ]
    assert [n for n in numbers if f"{n:,}" not in printed] == []
    assert (blocks.KIND_LIMITS["program"], blocks.KIND_LIMITS["container"], blocks.MAX_BLOB_BYTES) == (
        1 << 20,
        256 << 20,
        4 << 30,
    )
    assert set(blocks.KIND_LIMITS) <= words(SECTIONS["4"])
    assert set(tensors.TENSOR_FILE_KINDS) == words(SECTIONS["6"].strip().partition("safetensors")[0])


def test_every_field_of_program_json_is_in_its_table() -> None:
    schema = Schema((TensorSpec(name="w", role="p", shape=(1,)),))
    program = Program(
        model="m",
        loss="cross-entropy",
        optimizer="sgd",
        schema=schema,
        input=(1,),
        target=(2,),
        dtype="float32",
        functions={},
        containers={},
        batch={},
        opset=18,
        versions={},
    )
    assert set(program.to_json()) <= words(SECTIONS["8"])


def test_the_printed_task_is_a_message_in_canonical_form() -> None:
    (printed,) = re.findall(r"```json\n(.*?)\n```", SECTIONS["15"], re.DOTALL)
    assert canonical_json(read_message(printed.encode(), "t")) == printed.encode()
