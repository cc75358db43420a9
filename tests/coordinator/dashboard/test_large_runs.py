"""The page of many rounds, many centers and long names: it says what it leaves out, and does not grow without end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from coordinator.dashboard import displayed_metrics
from coordinator.dashboard import round_history as histories
from tests.coordinator.dashboard.test_displayed_metrics import joined, round_event, seen
from tests.support.browser import PHONE, Open
from tests.support.served_dashboard import DashboardSite, serve_dashboard

pytestmark = pytest.mark.browser
KEPT, BEST = 4, 2
CENTERS = 30
MANY, PEAK = 900, 335  # rounds: more than a curve has points; 335 is none of the points that are drawn anyway

INSIDE = "(cell) => cell.getBoundingClientRect().right <= cell.closest('.scroll').getBoundingClientRect().right"


def measured(number: int, accuracy: float) -> dict[str, Any]:
    return {**round_event(number, [0, 0, 1, 1]), "of": MANY, "accuracy": {"micro": accuracy, "macro": accuracy}}


def shown(page: Page) -> tuple[list[str], str]:
    """The rounds of the table, the newest first, and what is said of the best."""
    return page.locator("#rounds tbody td:first-child").all_inner_texts(), page.locator("#verdict").inner_text()


def test_a_page_that_stays_open_shows_what_a_new_one_is_told_and_the_best_round_is_not_forgotten(
    site: DashboardSite, visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "MAX_ROUNDS", KEPT)
    page = visit(site.link).page
    expect(page.locator("#t-devices")).to_have_text("4")
    for number in range(1, 2 * KEPT):
        site.hub.event(measured(number, 0.9 if number == BEST else number / 100))
        expect(page.locator("#rounds tbody tr:first-child td:first-child")).to_have_text(str(number))
    expected = (["7", "6", "5", "4"], "best so far: fesem, 90.0 % in round 2")
    assert shown(page) == expected
    page.reload()
    expect(page.locator("#rounds tbody tr")).to_have_count(KEPT)
    assert shown(page) == expected


def test_the_ring_of_the_best_round_stays_on_a_curve_with_more_rounds_than_points(
    site: DashboardSite, visit: Open
) -> None:
    for number in range(1, MANY + 1):
        site.hub.event(measured(number, 0.9 if number == PEAK else 0.3))
    page = visit(site.link).page
    expect(page.locator("#methods circle.mark")).to_have_count(1)
    expect(page.locator("#methods")).to_contain_text("best so far 90.0 %")


def test_of_many_centers_the_page_says_which_the_table_shows(site: DashboardSite, visit: Open) -> None:
    site.hub.event({**measured(1, 0.5), "per_center": [0.5] * CENTERS})
    opened = visit(site.link)
    expect(opened.page.locator("#rounds thead th")).to_have_count(2 + 12 + 4)
    expect(opened.page.locator("#rounds-more")).to_have_text("centers 0 to 11 of 30")
    site.hub.event({**measured(2, 0.5), "per_center": [0.5] * 2})
    expect(opened.page.locator("#rounds-more")).to_be_empty()


def test_a_long_name_leaves_room_for_a_devices_figures_on_a_phone(site: DashboardSite, visit: Open) -> None:
    name = "device-of-a-very-long-name-in-building-0169-floor-12-room-004200"
    site.hub.event({**joined(0), "device": name})
    opened = visit(site.link, size=PHONE, touch=True)
    page = opened.page
    page.locator("#h-devices").tap()
    row = page.locator("#devices tr", has_text=name)
    expect(row).to_be_visible()
    assert row.locator("td").nth(2).evaluate(INSIDE)  # its accuracy
    opened.shot("long-names")


def test_of_a_fleet_beyond_the_limit_the_page_says_how_many_it_shows(
    tmp_path: Path, visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(displayed_metrics, "MAX_DEVICES", 4)
    with serve_dashboard(tmp_path) as site:
        presence = {f"d{number}": "on" for number in range(6)}
        site.hub.status(seen(presence=presence, connected=6))
        page = visit(site.link).page
        expect(page.locator("#t-devices")).to_have_text("4")
        expect(page.locator("#t-devices-more")).to_have_text("6 connected, the first 4 are shown, 0 with a center")
