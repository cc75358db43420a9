"""What the overview shows of runs that are unlike most: long names, masked sums, a loss of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.coordinator.dashboard.test_displayed_metrics import joined, round_event
from tests.support.browser import DESKTOP, PHONE, Open
from tests.support.served_dashboard import serve_dashboard

pytestmark = pytest.mark.browser
BEGAN_MS = 1_700_000_000_000


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_long_names_of_runs_stay_inside_the_chart_and_are_told_apart(
    tmp_path: Path, visit: Open, size: tuple[int, int]
) -> None:
    with serve_dashboard(tmp_path) as site:
        for end in ("mu-1", "mu-2"):
            site.hub.event(round_event(1, [0, 1], run=f"fesem-with-{'many-' * 6}clusters-{end}"))
        opened = visit(site.link, size=size)
        ends = opened.page.locator("#methods text.end")
        expect(ends).to_have_count(2)
        assert len(set(ends.all_text_contents())) == 2
        rights = "(all) => all.map((node) => node.getBoundingClientRect().right)"
        card = opened.page.locator(".curves").bounding_box()
        assert card is not None
        assert max(ends.evaluate_all(rights)) <= card["x"] + card["width"]
        opened.shot("long-names")


def test_of_a_run_on_masked_sums_the_page_claims_nothing_about_who_moved(tmp_path: Path, visit: Open) -> None:
    secure = {"mode": "updates+membership", "least_members": 5, "sees": "sums of 5 or more devices"}
    with serve_dashboard(tmp_path) as site:
        site.hub.event(joined(0))
        for number in (1, 2):
            site.hub.event(round_event(number, []) | {"secure": secure})
        page = visit(site.link).page
        expect(page.locator("#assignment-empty")).to_have_text(
            "No assignment: of this run the coordinator sees sums of 5 or more devices."
        )
        expect(page.locator("#assignment-more")).to_have_text("")
        expect(page.locator("#assignment")).to_be_hidden()
        head = page.locator("#rounds th").all_inner_texts()
        expect(page.locator("#rounds tbody tr").first.locator("td").nth(head.index("Moved"))).to_have_text("–")
        expect(page.locator("#t-devices-more")).to_have_text("0 connected")


@pytest.mark.parametrize(
    ("loss", "shown"), [(0.25, "loss 0.25; squared error 2; r2 -3"), (2.0, "squared error 2; r2 -3")]
)
def test_a_loss_of_ones_own_stands_beside_errors_and_the_squared_error_once(
    tmp_path: Path, visit: Open, loss: float, shown: str
) -> None:
    metrics = {
        name: {"micro": value, "macro": value, "per_device": {}}
        for name, value in (("squared_error", 2.0), ("r2", -3.0))
    }
    unknown = {"accuracy": {"micro": None, "macro": None}, "per_device": {}, "per_center": [None, None]}
    with serve_dashboard(tmp_path) as found:
        found.hub.event({"event": "start", "federation": "f", "epoch": 1, "unix_ms": BEGAN_MS, "rounds": {"fesem": 9}})
        found.hub.event(
            {**round_event(1, [0, 1]), **unknown, "metrics": metrics, "loss": {"micro": loss, "macro": loss}}
        )
        expect(visit(found.link).page.locator("body")).to_contain_text(f"fesem; {shown}")
