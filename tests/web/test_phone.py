"""A phone's browser as an edge client: a real Chromium, a real mosquitto, and Python clients beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from coordinator.identity.signing_key import open_signing_key
from coordinator.storage.status import read_status
from emulator.stop_signals import DeferredSignals
from emulator.testbed import testbed_files as stage
from emulator.testbed.processes import ChildProcesses
from tests.support.browser import MIN_CONTRAST, PHONE, Open, Visit, lowest_contrast, without_focus_ring
from tests.support.phone_page import PATIENCE_MS, digits, listens, load_table, local, ring, served, text
from tests.support.ports import free_port
from tests.support.process_fleet import FleetScene, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.broker, pytest.mark.browser]

SAMPLES, TRAIN = 250, 200  # of each Python client
ON_PAPER = 120  # samples that the phone reads from its CSV file
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RUN: dict[str, Any] = {"method": "fesem", "num-rounds": 2, "clusters": 2, "local-steps": 40, "learning-rate": 0.2}


def prepare(testbed: FleetScene) -> Path:
    """The coordinator's configuration, and two Python clients that wait for its broker."""
    port = int(testbed.broker.rpartition(":")[2])
    testbed.folder.mkdir(parents=True)
    key = open_signing_key(testbed.folder).public.hex()
    x, y = digits()
    devices = []
    for i in range(2):
        part = slice(ON_PAPER + i * SAMPLES, ON_PAPER + (i + 1) * SAMPLES)
        files = stage.write_device(
            testbed.work, f"device-{i}", local(x[part], y[part], TRAIN), engine="onnx", broker=testbed.broker, key=key
        )
        devices.append(str(files.config))
    config = testbed.work / "coordinator.toml"
    stage.write_toml(
        config,
        {
            "federation": stage.DEMO_FEDERATION,
            "broker": f"mosquitto:{port}",
            "web-port": free_port(),
            "folder": str(testbed.folder.resolve()),
            "min-devices": 3,
            "deadline-s": 120,
            "quorum": 1.0,
            "codec": "i8",
            "seed": 3,
            "formats": ["onnx"],
            "class-names": NAMES,
            "model": {"name": stage.DEMO_MODEL, "engines": ["onnx", "pt2"]},
            "runs": [RUN],
        },
    )
    testbed.start_coordinator()
    until(lambda: listens(port), testbed.children, "the coordinator's broker")
    testbed.children.python("devices", "-m", "emulator.testbed.threaded_fleet", *devices)
    return config


def give_samples(opened: Visit, tmp_path: Path) -> None:
    """Draw one, pick two photos and take them back, load the rest from a table."""
    page = opened.page
    page.evaluate("document.querySelector('[data-tab=draw]').scrollIntoView()")
    take_part, hint = page.get_by_role("button", name="Take part"), page.locator("#pad + span")
    expect(take_part).to_be_disabled()
    expect(page.locator("#why")).to_have_text("Add samples first.")
    expect(hint).to_be_visible()
    opened.shot("0-empty")
    ring(page, "#pad")
    expect(hint).to_be_hidden()
    page.get_by_role("button", name="Add drawing").click()
    text(page, "count", "^1 in 1 class")
    text(page, "enough", "^1 sample; about 25 are enough to find your center. Every fifth is kept to test it.$")
    expect(hint).to_be_visible()
    expect(take_part).to_be_enabled()
    opened.shot("1-drawn")
    page.get_by_role("tab", name="Photos").click()
    page.get_by_text("four", exact=True).click()
    photo = tmp_path / "photo.png"
    Image.fromarray(np.full((60, 40, 3), 200, np.uint8)).save(photo)
    page.set_input_files("#photos", [photo, photo])
    text(page, "count", "^3 in 2 classes")
    opened.shot("2-photos")
    for left in ("^2 in 2 classes", "^1 in 1 class"):
        page.get_by_role("button", name="Remove last").click()
        text(page, "count", left)
    load_table(page, tmp_path, ON_PAPER)
    text(page, "count", f"^{ON_PAPER + 1} in 10 classes")
    text(page, "enough", "^Enough to find your center")


def readable(page: Page) -> None:
    """Nothing stands outside the window, each text has contrast, and the focus can be seen."""
    assert without_focus_ring(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    for selector in ("p, h1, h2, h3, li, dt, dd, legend", "button:enabled", "label", ".badge"):
        assert lowest_contrast(page, selector) >= MIN_CONTRAST, selector


def loses_the_coordinator(opened: Visit) -> None:
    """A phone with samples that takes no part yet, after the coordinator has gone."""
    page = opened.page
    text(page, "offline", "^Cannot reach the coordinator. Your samples are safe on this phone, and .*. Retrying…$")
    expect(page.get_by_role("button", name="Take part")).to_be_disabled()
    expect(page.locator("#why")).to_have_text("Waiting for a connection.")
    readable(page)
    opened.shot("6-offline")
    page.goto("about:blank")
    assert all("WebSocket" in error for error in opened.errors)
    opened.errors.clear()


def find_center(opened: Visit) -> None:
    """Ask for the nearest center, and have it read a drawn zero."""
    page = opened.page
    page.wait_for_selector("#nearest:not([disabled])", timeout=PATIENCE_MS)
    page.get_by_role("button", name="Find my center").click()
    said = text(page, "center", "is nearest")
    best, *others = sorted(page.locator("#losses meter").evaluate_all("all => all.map((bar) => bar.value)"))[::-1]
    assert best == page.locator("#losses .best meter").evaluate("bar => bar.value") == 1  # the fullest bar is the best
    assert all(0 <= share < 1 for share in others)
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()  # there is nothing left to pause
    text(page, "doing", "^Training is over.$")  # and not that a center is to be found
    expect(page.locator("#progress")).to_be_hidden()  # an empty bar would say that something is to come
    hits, n = map(int, re.findall(r"right for (\d+) of (\d+)", said)[0])
    assert n == (ON_PAPER + 1) // 5
    assert hits / n > 0.5  # guessing is 0.1; two rounds of forty steps reach about 0.9
    page.locator("#try").scroll_into_view_if_needed()
    ring(page, "#try")
    assert text(page, "guess", "looks like") == "It looks like “zero”."
    opened.shot("4-center")


def test_a_phone_trains_beside_python_clients_finds_its_center_and_recognises_a_drawn_digit(
    visit: Open, tmp_path: Path
) -> None:
    broker = f"mqtt://127.0.0.1:{free_port()}"
    with DeferredSignals() as signals, ChildProcesses(tmp_path / "logs", signals) as children:
        testbed = FleetScene(tmp_path / "run", broker, children, (RUN,))
        with served(prepare(testbed)) as url:
            # a name of its own choice would be random, and with it the order and the seeds of the devices
            opened = visit(f"{url}#id=phone-1", size=PHONE, touch=True)
            page = opened.page
            text(page, "link", "connected")
            page.wait_for_selector("#entry:not([hidden])", timeout=PATIENCE_MS)
            give_samples(opened, tmp_path)
            readable(page)
            page.get_by_role("button", name="Take part").click()
            text(page, "doing", "training|Sending|Sent")
            opened.shot("3-training")
            testbed.wait_for("bundle")
            version = page.evaluate("fetch('join.json').then((answer) => answer.json())")["page"]
            assert read_status(testbed.folder)["clients"][f"fedcenters-web {version}"] == 1
            me = page.locator("#name").inner_text()
            assert [event["round"] for event in testbed.of("round")] == [1, 2]
            assert all(me in event["assignment"] for event in testbed.of("round"))
            assert text(page, "rounds", "2") == "2"
            find_center(opened)
            testbed.wait_for("served")
            page.reload()
            text(page, "count", f"^{ON_PAPER + 1} in 10 classes")
            text(page, "center", "is nearest")
            text(page, "link", "connected")
            page.wait_for_selector("#nearest:not([disabled])")
            expect(page.locator("#earlier")).to_be_hidden()  # these are the coordinator's centers
            assert page.locator("#name").inner_text() == me
            page.emulate_media(color_scheme="dark")
            readable(page)
            opened.shot("5-dark")
            page.goto("about:blank")  # before the broker ends
            other = visit(f"{url}#id=phone-2", size=PHONE, touch=True)
            other.page.wait_for_selector("#entry:not([hidden])", timeout=PATIENCE_MS)
            load_table(other.page, tmp_path, ON_PAPER)
            expect(other.page.get_by_role("button", name="Take part")).to_be_enabled()
            children.wait_for_exit(children.running)
            loses_the_coordinator(other)
