"""docs/run-at-scale.md is right: its arithmetic gives the printed figures, its limits are those of the code."""

from __future__ import annotations

import re

from coordinator.config_sections import FleetConfig, TransferConfig
from coordinator.local_broker import EMBEDDED_MAX_DEVICES
from edge_client.transport.mqtt import KEEPALIVE_S
from emulator.engines.registry import ENGINES
from tests.support.doc_pages import DOCS, PageReader, blocks

PAGE = "run-at-scale.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")


def test_the_script_prints_the_figures_of_the_page(reader: PageReader) -> None:
    shown = next(block.text for block in blocks(DOCS / PAGE) if block.kind == "text")
    assert reader.printed["python million.py"] == shown


def test_provisioning_writes_what_both_brokers_need(reader: PageReader) -> None:
    written = {path.name for path in (reader.folder / "keys" / "broker").iterdir()}
    assert {"mosquitto.conf", "mosquitto.acl", "emqx.acl.conf"} <= written
    assert len(list((reader.folder / "keys" / "devices").iterdir())) == 100


def test_defaults_and_limits_are_those_of_the_code() -> None:
    transfer, fleet = TransferConfig, FleetConfig
    assert f"`in-flight-mib` ({transfer.in_flight_mib}) and `credits` ({transfer.credits})" in TEXT
    assert f"is {fleet.max_devices:,} unless you raise it" in TEXT
    assert f"up to about {EMBEDDED_MAX_DEVICES} |" in TEXT
    assert f"n / {KEEPALIVE_S} a second" in TEXT
    assert set(re.findall(r"--engine (\w+)", TEXT)) <= set(ENGINES)
