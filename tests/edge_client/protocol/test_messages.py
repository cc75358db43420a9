"""Control messages: strict JSON, one table per kind, and nothing invalid gets in or out."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.message_schemas import ACK_STATUSES, ERR_CODES, MESSAGE_KINDS, NACK_CODES, ROUTES
from edge_client.protocol.messages import canonical_json, parse_json, read_message, write_message
from tests.support.sample_messages import ALL, FIT, NEAR_ANSWER, OTHER, PROBE, SHA, STATS, UP

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def payload(kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - any JSON value
    return json.dumps({"v": 1, "k": kind, "id": "x-1", "t": 0} | fields).encode()


def code_of(data: bytes, route: str | None = None) -> str:
    with pytest.raises(Malformed) as refused:
        read_message(data, route)
    return refused.value.code


@given(JSON)
def test_what_is_written_canonically_is_read_back(value: object) -> None:
    with suppress(Malformed):  # lone surrogates in keys, depth
        assert parse_json(canonical_json(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        "NaN",
        "-Infinity",
        "1e999",
        "-1e999",
        "9007199254740992",
        "-9007199254740992",
        "1" * 5000,
        '"\\ud800"',
        '{"\\udfff":1}',
        "[" * 9 + "]" * 9,
        "[" * 4000,
        "[1,]",
        "01",
        "'a'",
        "\ufeff{}",
        '"\t"',
        "",
        "{}{}",
    ],
)
def test_json_that_two_readers_could_read_differently_is_refused(text: str) -> None:
    with pytest.raises(Malformed, match=r"^bad_json: "):
        parse_json(text.encode())


def test_json_is_read_liberally_in_order_and_whitespace() -> None:
    assert parse_json(b' {\n"b" : 1,\t"a":[ ] } ') == {"b": 1, "a": []}
    assert parse_json(b"[" * 8 + b"]" * 8) == [[[[[[[[]]]]]]]]
    assert parse_json(b"9007199254740991") == 2**53 - 1


@pytest.mark.parametrize("data", [b"\xff", b'"\xed\xa0\x80"', b"\xfe\xff\x00{"])
def test_bytes_that_are_not_utf_8_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_json(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800", {1: "a", "b": 2}, object()])
def test_nothing_that_could_not_be_read_is_written(value: object) -> None:
    with pytest.raises(Malformed):
        canonical_json(value)


@pytest.mark.parametrize(("kind", "fields"), ALL)
def test_every_kind_is_read_back_as_it_was_written(kind: str, fields: dict[str, Any]) -> None:
    sent = write_message(kind, ident="x-1", t_ms=5, **fields)
    assert read_message(sent) == {"v": 1, "k": kind, "id": "x-1", "t": 5} | fields
    routes = [route for route, kinds in ROUTES.items() if kind in kinds]
    wanted = routes if kind != "near" else ["t" if "re" in fields else "rq"]
    assert all(read_message(sent, route) == read_message(sent) for route in wanted)


@pytest.mark.parametrize(("kind", "fields"), ALL)
def test_unknown_fields_are_dropped_and_known_ones_needed(kind: str, fields: dict[str, Any]) -> None:
    assert "future" not in read_message(payload(kind, future={"a": 1}, **fields))
    assert code_of(json.dumps({"v": 1, "k": kind, "t": 0} | fields).encode()) == "bad_field"


@pytest.mark.parametrize("kind", sorted(ROUTES["t"] - {"near"}))
def test_every_message_of_a_coordinator_names_its_epoch(kind: str) -> None:
    fields = next(f for k, f in ALL if k == kind)
    assert code_of(payload(kind, **{k: v for k, v in fields.items() if k != "epoch"})) == "bad_field"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"[]", "bad_json"),
        (b"{}", "bad_version"),
        (b'{"v":true,"k":"get"}', "bad_version"),
        (b'{"v":1.0,"k":"get"}', "bad_version"),
        (b'{"v":2,"k":"get"}', "bad_version"),
        (b'{"v":1,"k":"order66"}', "bad_kind"),
        (b'{"v":1,"k":["get"]}', "bad_kind"),
        (b'{"v":1,"k":"near-answer"}', "bad_kind"),
        (b'{"v":1,"k":"get"}', "bad_field"),
        (b" " * 8193, "too_big"),
    ],
)
def test_what_is_wrong_is_named_in_order(data: bytes, code: str) -> None:
    assert code_of(data) == code


def test_a_kind_on_the_wrong_topic_is_refused() -> None:
    assert code_of(payload("get", **UP["get"]), "t") == "bad_kind"
    for kind in MESSAGE_KINDS - ROUTES["rq"]:
        assert code_of(payload(kind, epoch=1), "rq") == "bad_kind"
    assert code_of(payload("near", epoch=1, **NEAR_ANSWER), "rq") == "bad_field"
    assert code_of(payload("get", **UP["get"]), "in") == "bad_kind"


def test_a_birth_tells_what_the_device_can_do_and_a_death_need_not() -> None:
    birth = {k: v for k, v in UP["st"].items() if k != "caps"}
    assert code_of(payload("st", **birth)) == "bad_field"
    assert read_message(payload("st", **birth | {"s": "lost"}))["bd"] == 1


def test_nothing_fits_is_an_answer_and_absent_is_not() -> None:
    answer = {"re": "d1-4", "center": None}
    assert read_message(write_message("near", ident="x", t_ms=0, epoch=1, **answer))["center"] is None
    assert code_of(payload("near", epoch=1, re="d1-4")) == "bad_field"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("get", {"at": []}),
        ("get", {"at": [[0, 17]]}),
        ("get", {"at": [[0, 9], [20, 8]]}),
        ("get", {"at": [[0, 0]]}),
        ("get", {"at": [[65_535, 2]]}),
        ("get", {"at": [[0, 1, 2]]}),
        ("get", {"at": [0]}),
        ("get", {"block": 5000}),
        ("st", {"caps": None}),
        ("st", {"caps": {"engine": "ONNX!", "n": 1}}),
        ("st", {"bd": 2**32}),
        ("rdy", {"n": 0}),
        ("rdy", {"n": 2**31 + 1}),
        ("rdy", {"what": "delta"}),
        ("rdy", {"seconds": -1}),
        ("rdy", {"metrics": {str(i): 1 for i in range(17)}}),
        ("rdy", {"metrics": {"loss": "0.5"}}),
        ("rdy", {"metrics": {"a b": 1}}),
        ("rdy", {"update": OTHER}),
        ("near", {"how": "sketch"}),
        ("near", {"how": "guess"}),
        ("nack", {"code": "ok"}),
        ("nack", {"detail": "x" * 201}),
        ("served", {"center": "2"}),
        ("served", {"center": 1024}),
    ],
)
def test_a_value_out_of_range_is_refused(kind: str, change: dict[str, Any]) -> None:
    assert code_of(payload(kind, **UP[kind] | change)) == "bad_field"


@pytest.mark.parametrize(
    "change",
    [
        {"lr": -0.1},
        {"lr": True},
        {"steps": 0},
        {"steps": 1_000_001},
        {"batch": 65_537},
        {"seed": -1},
        {"rows": "posterior:"},
        {"rows": "posterior:-1"},
        {"rows": "all-but:0"},
        {"rows": "all-but:1e3"},
        {"slot": "../main"},
        {"start": "other"},
        {"start": STATS},
        {"anchor": "own"},
        {"job": "train"},
        {"job": 5},
        {"reply": {"codec": "zip", "base": "start", "max_size": 1}},
        {"reply": {"codec": "f32", "base": "start", "max_size": 0}},
        {"reply": {}},
        {"schema": SHA[:16]},
        {"center": -1},
    ],
)
def test_a_fit_out_of_range_is_refused(change: dict[str, Any]) -> None:
    assert code_of(payload("task", epoch=1, **FIT | change)) == "bad_field"


@pytest.mark.parametrize(
    ("task", "change", "without"),
    [
        (FIT, {}, "anchor"),
        (FIT, {"start": "own", "anchor": OTHER}, None),
        (FIT, {"start": "own", "reply": {"codec": "f32", "base": "zero", "max_size": 9}}, None),
        (FIT, {"mu": 0, "reply": {"codec": "f32", "base": "anchor", "max_size": 9}}, "anchor"),
        (PROBE, {"prior": [1.0]}, None),
        (PROBE, {"prior": [0, 0, 0, 0]}, None),
        (PROBE, {"prior": [1e308, 1e308, 0, 0]}, None),
        (PROBE, {"want": ["loss", "loss"]}, None),
        (PROBE, {"want": ["loss", "labels"]}, None),
        (PROBE, {"want": ["loss"], "models": []}, "prior"),
        (PROBE, {"label_totals": [[1.0, 2.0]]}, None),
        (PROBE, {"label_totals": [[0] * 300, [0] * 300, None, None]}, None),
        (PROBE, {"want": ["votes"], "least": True}, None),
    ],
)
def test_a_task_that_contradicts_itself_is_a_bad_task(
    task: dict[str, Any], change: dict[str, Any], without: str | None
) -> None:
    fields = {k: v for k, v in (task | change).items() if k != without}
    assert code_of(payload("task", epoch=1, **fields)) == "bad_task"


def test_a_program_without_a_signature_is_no_field_error_but_an_alarm() -> None:
    unsigned = {k: v for k, v in FIT["program"].items() if k not in {"key", "sig"}}
    assert code_of(payload("task", epoch=1, **FIT | {"program": unsigned})) == "bad_signature"


def test_what_we_send_is_held_to_the_same_table() -> None:
    get = UP["get"]
    for fields in (get | {"block": 1}, {"sha256": SHA}, get | {"colour": "red"}, get | {"v": 2}):
        with pytest.raises(Malformed, match=r"^bad_field: "):
            write_message("get", ident="x", t_ms=0, **fields)
    with pytest.raises(Malformed, match=r"^bad_kind: "):
        write_message("order66", ident="x", t_ms=0)


def test_absent_fields_may_be_given_as_none_and_manifests_as_objects() -> None:
    fields = UP["rdy"] | {"metrics": None, "update": Manifest.from_json(STATS)}
    message = read_message(write_message("rdy", ident="x", t_ms=0, **fields))
    assert "metrics" not in message
    assert message["update"] == STATS


def test_a_message_above_the_limit_is_not_sent() -> None:
    big = [Manifest.from_json(OTHER).to_json() | {"sha256": f"{i:064x}"} for i in range(16)]
    assert len(write_message("task", ident="x", t_ms=0, epoch=1, **PROBE | {"models": big, "prior": None})) < 8192
    crowded = [manifest_of(bytes([i]) * 2048, "model", inline=True) for i in range(16)]
    with pytest.raises(Malformed, match=r"^too_big: "):
        write_message("task", ident="x", t_ms=0, epoch=1, **PROBE | {"models": crowded, "prior": None})


def test_the_codes_have_one_list_each_and_no_name_twice() -> None:
    for codes in (ERR_CODES, ACK_STATUSES, NACK_CODES):
        assert len(set(codes)) == len(codes)
    assert {kind for kind, _ in ALL} == MESSAGE_KINDS
