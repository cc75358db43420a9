"""All parts of the page show one state at every paint, also when the shown run changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.coordinator.dashboard.test_displayed_metrics import EXCHANGE, round_event, seen
from tests.support.browser import Open
from tests.support.served_dashboard import DashboardSite

pytestmark = pytest.mark.browser
ROUNDS = 9
WATCH = """() => {
  window.painted = [];
  const text = (selector) => document.querySelector(selector)?.textContent;
  const parts = ["#t-accuracy", "#rounds tbody td:nth-child(2)", "#tiles a span", "#devices tbody td:nth-child(3)"];
  const look = () => {
    const now = parts.map(text);
    if (JSON.stringify(now) !== JSON.stringify(window.painted.at(-1))) window.painted.push(now);
    requestAnimationFrame(look);
  };
  look();
}"""


def one_accuracy(
    number: int, share: float, *, run: str = "fesem", centers: tuple[int, ...] = (0, 0, 1, 1)
) -> dict[str, Any]:
    """A round in which every device, center and mean has the accuracy `share`."""
    event = round_event(number, list(centers), run=run)
    same = {"accuracy": {"micro": share, "macro": share}, "per_device": dict.fromkeys(event["per_device"], share)}
    return {**event, **same, "method": run, "per_center": [share] * (max(centers) + 1)}


def shown(page: Page) -> list[str]:
    """The run that is chosen, the accuracy in the figures, in the newest row of the rounds, of a device."""
    parts = ("#runs [aria-pressed=true]", "#t-accuracy", "#rounds tbody tr:first-child td:nth-child(2)")
    return [page.locator(part).inner_text() for part in (*parts, "#devices tbody tr:first-child td:nth-child(3)")]


def test_every_paint_has_the_figures_and_the_tables_of_one_round(site: DashboardSite, visit: Open) -> None:
    site.hub.event(one_accuracy(1, 0.5))
    page = visit(site.link).page
    expect(page.locator("#devices tbody tr")).to_have_count(4)
    page.evaluate(WATCH)
    for number in range(2, ROUNDS):
        site.hub.event(one_accuracy(number, 0.5 + number / 100))
        expect(page.locator("#t-accuracy")).to_have_text(f"{50 + number}.0 %")
    page.wait_for_function(f"window.painted.at(-1)[0] === '{49 + ROUNDS}.0 %'")  # a frame is noted after it is drawn
    painted = page.evaluate("window.painted")
    for figure, row, tile, device in painted:
        assert (row, tile.partition(" · ")[2], device) == (figure, figure, figure)
    assert [figure for figure, *_ in painted] == ["50.0 %", *(f"{50 + number}.0 %" for number in range(2, ROUNDS))]


@pytest.mark.parametrize("phase", ["exporting", "serving"])
def test_when_the_last_run_ends_the_whole_page_goes_to_the_best_one(
    site: DashboardSite, visit: Open, phase: str
) -> None:
    site.hub.event(one_accuracy(1, 0.9))
    site.hub.event(one_accuracy(1, 0.3, run="fedavg", centers=(0, 0, 0, 0)))
    exchange = {**EXCHANGE, "run": "1a", "round": 2}
    site.hub.status(seen(exchange=exchange, names={"1a": "fedavg"}))
    page = visit(site.link).page
    expect(page.locator("#runs [aria-pressed=true]")).to_have_text("fedavg")
    expect(page.locator("#devices tbody tr")).to_have_count(4)
    page.evaluate("document.getElementById('content').style.height = '9000px'")  # nothing draws for a new height
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    site.hub.status(seen(phase=phase, names={"1a": "fedavg"}))
    expect(page.locator("#runs [aria-pressed=true]")).to_have_text("fesem")
    assert shown(page) == ["fesem", "90.0 %", "90.0 %", "90.0 %"]
    assert [url for url in asked if url.endswith("/api/map?run=fesem")]


def test_a_picture_of_an_older_round_has_that_rounds_centers_and_says_so(site: DashboardSite, visit: Open) -> None:
    """The map and the assignment are fetched; a round may end meanwhile."""
    site.hub.event(one_accuracy(1, 0.5))
    older = site.hub.grid("fesem")
    site.hub.event(one_accuracy(2, 0.6, centers=(0, 1, 1, 1)))
    found = {"run": "fesem", "round": 1, "devices": ["d0", "d1", "d2", "d3"], "assigned": [0, 0, 1, 1], "reach": 1.0}
    found |= {"xy": [[0, 1], [5, 5], [9, 9], [8, 9]], "centers": [[2, 2], [9, 9]], "silhouette": 0.5}
    found |= {"shares": [0.5, 0.4], "cosine": [[1.0, 0.0], [0.0, 1.0]]}
    opened = visit("about:blank")
    page = opened.page
    page.route("**/api/map*", lambda route: route.fulfill(body=json.dumps({"map": found})))
    page.route("**/api/grid*", lambda route: route.fulfill(body=json.dumps(older)))
    page.goto(site.link)
    expect(page.locator("#map-round")).to_have_text("fesem, round 1")
    expect(page.locator("#map-legend > span")).to_have_text(["center 0: 2", "center 1: 2"])
    expect(page.locator("#t-centers-more")).to_have_text("silhouette 0.500 in round 1")
    expect(page.locator("#assignment-more")).to_have_text("0 moved in round 1")
    expect(page.locator("#tiles li").nth(1)).to_contain_text("center 1 · 60.0 %")
    opened.shot("pictures-of-an-older-round")
