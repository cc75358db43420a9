"""What Python reads of a message the page reads too, and what it refuses the page refuses with the same code.

Each value of a message of every kind is left out, and replaced by others: the bounds of the protocol's numbers, texts
and lists, the next values beyond, and values of other types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_client.errors import Malformed
from edge_client.protocol import message_schemas, messages
from tests.support.decoders.wire import ROUTE
from tests.support.node import ROOT, run_node
from tests.support.sample_messages import ALL, MODEL, STATS
from tests.support.sum_tasks import STAGES, job, task_message

WEB = ROOT / "edge_client" / "web" / "protocol"
ABSENT = object()
BOUNDS = (1, 16, 17, 32, 64, 200, 256, 512, 1_024, 4_096, 65_536, 100_000, 1_000_000, 2**31, 2**32, 2**53 - 1)
NUMBERS = [*(n + more for n in BOUNDS for more in (-1, 0, 1) if n + more < 2**53), -1]
FRACTIONS = [-0.5, -0.0, 5e-324, 9e-17, 1e-16, 0.5, 0.999999, 0.9999991, 1.0, 1.0000001, 1e6, 1000000.5, 1e300]
TEXTS = [
    *("", "A", "a b", "a\n", "é", "٣", "own", "start", "ones", "bcast", "https://a", "https://a b", "AA==", "AB=="),
    *("1.2.3", "1.2.3.4.5", "1234567", "posterior:0", "posterior:00", "posterior:100", "all-but:0", "all-but:5"),
    *("a" * n for n in (1, 16, 17, 32, 33, 36, 37, 64, 65, 200, 201)),
    *("\U0001f600" * 200, "\U0001f600" * 201, "0" * 16, "0" * 64, "f" * 128, "__proto__", "toString"),
]
ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.999999, "eps": 1e-16, "weight_decay": 0.1, "clip_norm": 0}
SGD = {"name": "sgd", "momentum": 1, "nesterov": True, "weight_decay": 0, "clip_norm": 1e300}
REFUSED = {"engine": "onnx", "runtime": "a b+c.d_e", "difference": 0.5}
OTHERS: list[Any] = [
    *(None, True, False, [], {}, [None], [[]], [0], [1, 0], [[0, 1]], [[0, 17]], [[65_535, 1]], [[65_535, 2]]),
    *([one] * n for one in ([0, 1], 1, 0.5, "f32", "mqtt", MODEL) for n in (8, 9, 16, 17)),
    *(
        [[0.1] * 512],
        [[0.1] * 513],
        [1e308, 1e308],
        [0] * 256,
        [0] * 257,
        ["loss", "loss"],
        ["labels"],
        ["grad", "loss"],
    ),
    *({str(i): i for i in range(n)} for n in (1, 16, 17)),
    *({"a b": 1}, {"a" * 64: 1}, {"a" * 65: 1}, {"__proto__": 1}, {"own": "a"}, MODEL, STATS),
    *(
        ADAM,
        SGD,
        {**ADAM, "eps": 1e-17},
        {**ADAM, "beta1": 1},
        {**SGD, "momentum": 0},
        {**SGD, "x": 1},
        {"name": "sgd"},
    ),
    *({"engine": "onnx", "n": 2**31, "refused": [REFUSED] * n} for n in (8, 9)),
    *({"bits": bits, "devices": 100_000, "clip": 5e-324, "noise": 1e6} for bits in (15, 16, 32, 33)),
]
READ = """
import { readFileSync } from "node:fs";
import { readExactMessage } from "WEB/messages.js";
import { canonicalJson } from "WEB/json.js";
const found = [];
for (const [route, text] of JSON.parse(readFileSync(process.argv[1]))) {
  const read = readExactMessage(new TextEncoder().encode(text), route);
  found.push(await read.then((message) => new TextDecoder().decode(canonicalJson(message)), ({ code }) => code));
}
console.log(JSON.stringify(found));
"""


def valid_messages() -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, fields in ALL:
        route = "t" if kind == "near" and "re" in fields else "rq" if kind == "near" else ROUTE[kind]
        yield route, {"v": 1, "k": kind, "id": "x-1", "t": 0} | fields
    for name in STAGES:
        yield "t", json.loads(task_message(job(name)))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401 - JSON
    """Of each value in a message; a manifest counts as one."""
    if at:
        yield at
    if isinstance(value, dict) and not (at and {"sha256", "block", "kind"} <= value.keys()):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*at, i))


def replaced(value: Any, at: tuple[Any, ...], other: Any) -> Any:  # noqa: ANN401 - JSON
    if not at:
        return other
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    items[at[0]] = replaced(items.get(at[0]), at[1:], other)
    kept = {key: inner for key, inner in items.items() if inner is not ABSENT}
    return kept if isinstance(value, dict) else [*kept.values()]


def cases() -> list[tuple[str, str]]:
    """(route, text): each place of a kind of message, and of a job, once."""
    found, done = list[tuple[str, str]](), set[tuple[Any, ...]]()
    for route, message in valid_messages():
        down = message["k"] in message_schemas.DOWNLINK_KINDS or "re" in message
        fields = {(name,) for name in message_schemas.table_of(message["k"], message, down=down)}
        for at in sorted({*places(message), *fields}, key=str):
            place = (message["k"], message.get("job"), at)
            if place not in done:
                done.add(place)
                others = (ABSENT, *NUMBERS, *FRACTIONS, *TEXTS, *OTHERS)
                found += [(route, json.dumps(replaced(message, at, one), ensure_ascii=False)) for one in others]
    return found


def read_here(route: str, text: str) -> str:
    try:
        return messages.canonical_json(messages.read_message(text.encode(), route)).decode()
    except Malformed as wrong:
        return wrong.code


def test_the_page_reads_and_refuses_what_python_does(tmp_path: Path) -> None:
    given = cases()
    (tmp_path / "cases.json").write_text(json.dumps(given), encoding="utf-8")
    script = READ.replace("WEB", WEB.as_uri())
    theirs = json.loads(run_node("--input-type=module", "-e", script, tmp_path / "cases.json"))
    ours = [read_here(*case) for case in given]
    assert sum(one.startswith("{") for one in ours) > len(given) // 20  # bounds, and not only what is beyond
    different = [(*case, a, b) for case, a, b in zip(given, ours, theirs, strict=True) if a != b]
    assert different[:3] == []
