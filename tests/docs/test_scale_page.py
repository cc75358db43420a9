"""docs/run-at-scale.md is right: its arithmetic gives the printed figures, its limits are those of the code."""

from __future__ import annotations

import re

from coordinator.config_sections import FleetConfig, TransferConfig
from coordinator.local_broker import EMBEDDED_MAX_DEVICES
from coordinator.runtime.exchange.task_window import PLACE_S
from edge_client.protocol.transfer import MAX_TIMEOUTS_IN_A_ROW, REQUEST_TIMEOUTS_S
from edge_client.transport.mqtt import KEEPALIVE_S
from emulator.engines.base import ENGINES
from tests.support.brokers import KINDS
from tests.support.doc_pages import DOCS, PageReader, blocks

PAGE = "run-at-scale.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")
BROKERS = ("mosquitto", "embedded", "nats", "rabbitmq", "rabbitmq-cluster")  # the columns of the table
ANSWERS = {  # the rows in which brokers differ, and where tests/conformance/test_brokers.py has them
    "speaks MQTT 5": "mqtt5",
    "a filter with `+` brings retained messages": "retained_by_pattern",
    "a retained message is known at each node": "retained_everywhere",
    "a second connection of a device ends the first": "ends_earlier",
    "a device that leaves in good order is never reported as lost": "minds_leave",
    "a device that falls silent is reported as lost": "notices_silence",
}


def test_the_script_prints_the_figures_of_the_page(reader: PageReader) -> None:
    shown = next(block.text for block in blocks(DOCS / PAGE) if block.kind == "text")
    assert reader.printed["python million.py"] == shown


def test_provisioning_writes_what_both_brokers_need(reader: PageReader) -> None:
    written = {path.name for path in (reader.folder / "keys" / "broker").iterdir()}
    assert {"mosquitto.conf", "mosquitto.acl", "emqx.acl.conf"} <= written
    assert len(list((reader.folder / "keys" / "devices").iterdir())) == 100


def test_the_table_of_brokers_says_what_their_tests_say() -> None:
    assert set(BROKERS) == set(KINDS)
    for row, trait in ANSWERS.items():
        cells = next(line for line in TEXT.splitlines() if line.startswith(f"| {row} |")).strip("| ").split(" | ")
        assert [cell.strip("*") == "yes" for cell in cells[1:]] == [getattr(KINDS[name], trait) for name in BROKERS]


def test_defaults_and_limits_are_those_of_the_code() -> None:
    transfer, fleet = TransferConfig, FleetConfig
    assert f"`in-flight-mib` ({transfer.in_flight_mib}) and `credits` ({transfer.credits})" in TEXT
    assert f"`task-window` ({transfer.task_window:,})" in TEXT
    assert f"or after {PLACE_S:.0f} s in which" in TEXT
    assert f"after {sum(REQUEST_TIMEOUTS_S[:MAX_TIMEOUTS_IN_A_ROW]):.0f} s without a block" in TEXT
    assert f"more devices than {transfer.task_window / PLACE_S:.0f} for each second" in TEXT
    assert f"is {fleet.max_devices:,} unless you raise it" in TEXT
    assert f"up to about {EMBEDDED_MAX_DEVICES} |" in TEXT
    assert f"n / {KEEPALIVE_S} a second" in TEXT
    assert set(re.findall(r"--engine (\w+)", TEXT)) <= set(ENGINES)
