"""The phone's page when its network goes, its coordinator moves or is upgraded: a real Chromium and a real broker."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import expect

from coordinator.config import read_config
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import start_broker
from coordinator.storage.store import Store
from edge_client.protocol import messages
from edge_client.protocol.topics import Topics
from edge_client.transport.base import Connected
from edge_client.transport.mqtt import MqttTransport
from tests.support.browser import PHONE, Open
from tests.support.phone_federation import known_model
from tests.support.phone_page import another_release, ring, served, text
from tests.support.ports import free_port

pytestmark = [pytest.mark.broker, pytest.mark.browser]
SOONER_MS = 60_000  # than MQTT's own keepalive, which needs 90 s for it


def test_a_page_whose_phone_loses_its_network_says_so_before_the_keepalive_would_and_connects_again(
    visit: Open, tmp_path: Path
) -> None:
    """Chromium takes a WebSocket's bytes away without a word, as a network that is left does."""
    config = known_model(tmp_path, input=(1, 8, 8))
    web_port = read_config(config).web.port
    with start_broker(tmp_path / "broker", "mosquitto", web_ports=[web_port]), served(config) as url:
        opened = visit(url, size=PHONE, touch=True)
        text(opened.page, "link", "^connected$")
        opened.page.context.set_offline(True)
        expect(opened.page.locator("#link")).to_have_text("offline", timeout=SOONER_MS)
        expect(opened.page.locator("#offline")).to_contain_text("Your samples are safe on this phone")
        opened.page.context.set_offline(False)
        expect(opened.page.locator("#link")).to_have_text("connected")
        opened.page.goto("about:blank")
    opened.errors.clear()  # what it could not reach


def test_a_page_that_is_open_when_its_coordinator_moves_to_another_broker_finds_it_by_itself(
    visit: Open, tmp_path: Path
) -> None:
    config = known_model(tmp_path, input=(1, 8, 8))
    page_port, before, after = free_port(), read_config(config).web.port, free_port()
    with start_broker(tmp_path / "broker", "mosquitto", web_ports=[before]), served(config, port=page_port) as url:
        opened = visit(url, size=PHONE, touch=True)
        text(opened.page, "link", "^connected$")
        ring(opened.page, "#pad")
        opened.page.get_by_role("button", name="Add drawing").click()
        text(opened.page, "count", "^1 in 1 class")
        me = opened.page.locator("#name").inner_text()
    expect(opened.page.locator("#link")).to_have_text("offline")
    config.write_text(config.read_text().replace(f"web-port = {before}", f"web-port = {after}"))
    with start_broker(tmp_path / "other", "mosquitto", web_ports=[after]), served(config, port=page_port):
        text(opened.page, "link", "^connected$")
        text(opened.page, "count", "^1 in 1 class")
        assert opened.page.locator("#name").inner_text() == me
        opened.page.goto("about:blank")
    opened.errors.clear()  # the broker that is gone


def lead(transport: MqttTransport, config: Path, epoch: int) -> None:
    """The record of a coordinator that has just started."""
    signature = open_signing_key(config.parent / "run").sign_record(f"{epoch:016x}", epoch, "demo")
    about = {"online": True, "proto": [1], "spread_ms": 0, "block": 4096, "window": 4, "src": ["mqtt"]}
    state = {"doing": "compile", "newcomers": "now"}
    fields = about | {"boot": f"{epoch:016x}", "epoch": epoch, "state": state} | signature
    record = messages.write_message("coord", ident="c", t_ms=0, **fields)
    transport.publish(Topics("demo").coord(), record, retain=True)


def test_an_open_page_loads_itself_again_when_its_coordinator_was_upgraded_but_not_in_the_midst_of_a_drawing(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, port = known_model(tmp_path, input=(1, 8, 8), target=(10,)), free_port()
    with closing(Store(tmp_path / "run" / "store")) as store:
        program = store.facts.get("program") or ""
        store.facts.put("program", "{}")  # it is compiled below
    listener = read_config(config).web.port
    with start_broker(tmp_path / "broker", "mosquitto", web_ports=[listener]) as broker:
        coordinator = MqttTransport(broker.url, "demo.coordinator.0")
        coordinator.connect()
        assert isinstance(coordinator.receive(30), Connected)
        with served(config, port=port) as url:
            opened = visit(url, size=PHONE, touch=True)
            page = opened.page
            text(page, "waiting", "^Waiting for the coordinator, which prepares the model")
        another_release(monkeypatch)
        with served(config, port=port):
            with closing(Store(tmp_path / "run" / "store")) as store:
                store.facts.put("program", program)
            page.wait_for_selector("#entry:not([hidden])")
            lead(coordinator, config, 1)
            text(page, "doing", "^The coordinator prepares the training.$")
            before = page.locator("script").get_attribute("src")
        another_release(monkeypatch)
        with served(config, port=port):
            ring(page, "#pad")
            lead(coordinator, config, 2)
            text(page, "trouble", "once your drawing is added or wiped")
            expect(page.locator("#link")).to_have_text("stopped")
            page.get_by_role("button", name="Add drawing").click()
            text(page, "link", "^connected$")
            text(page, "count", "^1 in 1 class")
            after = page.locator("script").get_attribute("src")
            assert after != before
            text(page, "doing", "^The coordinator prepares the training.$")
        another_release(monkeypatch)
        with served(config, port=port):
            lead(coordinator, config, 3)
            page.wait_for_function("src => document.querySelector('script').getAttribute('src') !== src", arg=after)
            page.goto("about:blank")
        coordinator.close()
    opened.errors.clear()  # a coordinator's page that was away
