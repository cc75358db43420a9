"""The phone's page in a real Firefox: it joins, trains a round, and opens without its coordinator.

By hand, after a change of the page: apt install firefox-esr; pytest tests/web/test_firefox.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulator.stop_signals import DeferredSignals
from emulator.testbed.processes import ChildProcesses
from tests.support.browser import PHONE
from tests.support.firefox import FirefoxPage, find_firefox, firefox
from tests.support.phone_federation import RUN, federation_of_one
from tests.support.phone_page import SCALE, csv, digits, served
from tests.support.ports import free_port
from tests.support.process_fleet import FleetScene
from tests.support.requirements import skip_without

pytestmark = [pytest.mark.broker, pytest.mark.slow]
SAMPLES = 60


def says(page: FirefoxPage, part: str, pattern: str) -> None:
    page.wait_for(f"new RegExp({json.dumps(pattern)}).test(document.getElementById('{part}').textContent)")


def test_a_phone_with_firefox_joins_trains_and_opens_without_its_coordinator(tmp_path: Path) -> None:
    if find_firefox() is None:
        skip_without("Firefox is not installed (apt install firefox-esr)")
    broker, (x, y) = f"mqtt://127.0.0.1:{free_port()}", digits()
    (tmp_path / "digits.csv").write_bytes(csv(x[:SAMPLES], y[:SAMPLES]))
    with DeferredSignals() as signals, ChildProcesses(tmp_path / "logs", signals) as children:
        testbed = FleetScene(tmp_path / "run", broker, children, (RUN,))
        config = federation_of_one(testbed)
        with firefox(tmp_path, size=PHONE) as page:
            with served(config) as url:
                page.goto(url)
                page.wait_for("!document.getElementById('entry').hidden")
                says(page, "link", "connected")
                assert page.evaluate("crossOriginIsolated")
                page.evaluate(f"document.getElementById('scale').value = {SCALE}")
                page.give_file("#table", tmp_path / "digits.csv")
                says(page, "count", f"^{SAMPLES} in 10 classes")
                page.evaluate("document.getElementById('pause').click()")
                (done,) = testbed.wait_for("round")
                me = page.evaluate("document.getElementById('name').textContent")
                assert list(done["assignment"]) == [me]
                says(page, "rounds", "^1$")
                page.evaluate("navigator.serviceWorker.ready.then(() => true)")
                page.shot(tmp_path / "firefox-trained.png")
                children.wait_for_exit(children.running)
            page.goto(url)
            says(page, "offline", "^Cannot reach the coordinator.")
            says(page, "count", f"^{SAMPLES} in 10 classes")
