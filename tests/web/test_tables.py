"""The page's tables of messages, codes and limits are those of Python: a change on one side fails here."""

from __future__ import annotations

import json
from pathlib import Path

from edge_client.protocol import blocks, message_schemas
from edge_client.protocol.task import PROBE_QUANTITIES
from tests.support.node import ROOT, run_node

PROTOCOL = ROOT / "edge_client" / "web" / "protocol"
TOLD = {  # what a coordinator may ask a page for, in the words of the page's list of what is sent
    "loss": "one mean loss",
    "votes": "count",
    "posterior": "share",
    "errors": "error",
    "confusion": "table of hits and misses",
    "labels": "how many samples of each class",
    "grad": "their mean gradient",
    "inputs": "sums over all your samples of their values",
    "answers": "the centers' answers",
}


def told() -> dict[str, object]:
    source = (PROTOCOL / "message_schemas.js").as_uri(), (PROTOCOL / "blocks.js").as_uri()
    script = f"""
import * as kinds from '{source[0]}';
import {{ KIND_LIMITS }} from '{source[1]}';
const fields = (table) => Object.fromEntries(Object.entries(table).map(([name, [, needed]]) => [name, needed]));
const tables = Object.fromEntries(Object.entries(kinds.MESSAGE_TABLES).map(([kind, table]) => [kind, fields(table)]));
for (const job of ['fit', 'probe', 'sum']) tables[job] = fields(kinds.tableOf('task', {{ job }}, true));
console.log(JSON.stringify({{ tables, routes: kinds.ROUTES, err: kinds.ERR_CODES, ack: kinds.ACK_STATUSES,
  nack: kinds.NACK_CODES, limits: KIND_LIMITS, codecs: kinds.CODECS }}));
"""
    found: dict[str, object] = json.loads(run_node("--input-type=module", "-e", script))
    return found


def test_fields_codes_and_limits_are_pythons() -> None:
    tables = {
        kind: {name: needed for name, (_, needed) in table.items()}
        for kind, table in message_schemas.MESSAGE_TABLES.items()
    }
    for job in ("fit", "probe", "sum"):
        table = message_schemas.table_of("task", {"job": job}, down=True)
        tables[job] = {name: needed for name, (_, needed) in table.items()}
    found = told()
    assert found["tables"] == tables
    routes = {k: sorted(v) for k, v in message_schemas.ROUTES.items()}
    assert {k: sorted(v) for k, v in found["routes"].items()} == routes  # type: ignore[attr-defined]
    assert found["err"] == list(message_schemas.ERR_CODES)
    assert found["ack"] == list(message_schemas.ACK_STATUSES)
    assert found["nack"] == list(message_schemas.NACK_CODES)
    assert found["limits"] == blocks.KIND_LIMITS
    assert found["codecs"] == list(message_schemas.CODECS)


def test_the_page_tells_its_user_of_every_statistic_that_it_sends() -> None:
    assert TOLD.keys() == PROBE_QUANTITIES - {"positions"}  # of programs that a page refuses
    text = (PROTOCOL.parent / "index.html").read_text(encoding="utf-8")
    sent = " ".join(text.partition("What leaves this phone")[2].split())
    assert [words for words in TOLD.values() if words not in sent] == []


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for path in sorted(Path(PROTOCOL.parent).rglob("*")):
        if path.suffix in (".html", ".css", ".js"):
            text = path.read_text(encoding="utf-8")
            assert "http:" not in text.replace("http://localhost", ""), path
            assert "https:" not in text.replace("https:// (or", "").replace("https://[!-~]", ""), path
