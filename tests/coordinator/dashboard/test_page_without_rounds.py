"""The page of a run without rounds, in a browser: it counts updates, and says round nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.coordinator.dashboard.test_displayed_metrics import EXCHANGE, joined, round_event, seen
from tests.support.browser import Open
from tests.support.served_dashboard import serve_dashboard

pytestmark = pytest.mark.browser


def record(number: int, *, tested: int | None = None) -> dict[str, Any]:
    """Three more updates; with the scores of a test of the versions after `tested` records."""
    told: dict[str, Any] = {
        "versions": [number, number // 2],
        "counted": 3,
        "stale": 0,
        "expired": 0,
        "staleness": {"mean": 0.5, "most": 1},
    }
    event = {**round_event(number, [0, 0, 1, 1]), "per_center": [0.5, 0.25], "asynchronous": told}
    if tested is None:
        return {**event, "accuracy": {"micro": None, "macro": None}, "per_device": {}, "per_center": [None, None]}
    told["tested"] = {"round": tested, "versions": [tested, tested // 2]}
    return event


def test_the_page_counts_updates_and_keeps_the_scores_of_the_newest_test(tmp_path: Path, visit: Open) -> None:
    with serve_dashboard(tmp_path) as site:
        site.hub.event({"event": "start", "federation": "f", "epoch": 1, "unix_ms": 1, "rounds": {"fesem": 9}})
        for number in range(4):
            site.hub.event({**joined(number), "unix_ms": 1})
        for event in (record(1), record(2), record(3, tested=2), record(4), record(5, tested=3), record(6)):
            site.hub.event(event)
        updates = {**record(6)["asynchronous"], "counted": 2, "concurrency": 3, "devices": 4}
        updates["test"] = {"answered": 1, "wanted": 4}
        exchange = {**EXCHANGE, "wanted": 3, "updates": updates}
        site.hub.status(seen(exchange=exchange, presence=dict.fromkeys(("d0", "d1", "d2", "d3"), "on")))
        page = visit(site.link).page
        expect(page.locator("#h-round")).to_have_text("Updates")
        expect(page.locator("#t-round")).to_have_text("20")
        expect(page.locator("#t-accuracy")).to_have_text("55.0 %")
        expect(page.locator("#verdict")).to_have_text("best so far: fesem, 55.0 % after 9 updates")
        expect(page.locator("#exchange-words")).to_contain_text("2 of 3 updates until the next record")
        expect(page.locator("#exchange-words")).to_contain_text("test: 1 of 4 answers")
        expect(page.locator("#rounds tbody tr").first.locator("td").first).to_have_text("18")
        expect(page.locator("#accuracy path.line").first).to_have_attribute("d", re.compile(r"^M\S+ \S+L"))
        said = page.inner_text("body").replace("without rounds", "")
        assert not re.search(r"\bround", said, re.IGNORECASE)
