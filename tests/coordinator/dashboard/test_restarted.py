"""An open page beside a coordinator that ends, is started again, gets more rounds, or begins anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from coordinator.dashboard.displayed_metrics import DashboardView, replay_events
from tests.coordinator.dashboard.test_displayed_metrics import joined, round_event, seen
from tests.support.browser import Open
from tests.support.served_dashboard import DashboardSite, serve_dashboard

if TYPE_CHECKING:
    from playwright.sync_api import Page

BEGAN_MS = 1_700_000_000_000
INK = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value)"
BEGINS_ANEW = """async (began) => {
  const { applyEvent, state } = await import("./static/state.js");
  const { now, facts, states, fleet, runs, events } = state;
  applyEvent("snapshot", { now, facts: { ...facts, began }, states, fleet, runs, events });
  return Object.keys(state.maps).length + Object.keys(state.grids).length;
}"""


def start(rounds: int, seconds: float) -> dict[str, Any]:
    number = {"fesem": rounds, "fedavg": rounds}
    at = {"epoch": 1 + int(seconds), "unix_ms": BEGAN_MS + int(1000 * seconds)}
    return {"event": "start", "federation": "f", "rounds": number, "needs": 2, **at}


def a_run(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    for number in range(1, rounds + 1):
        yield {**round_event(number, [0, 0, 1, 1], run=name), "method": name, "of": rounds}


def ended(rounds: int) -> Iterator[dict[str, Any]]:
    """A minute of training of two runs, of which fesem's centers are published."""
    yield start(rounds, 0.0)
    yield from (joined(number) for number in range(4))
    yield from a_run("fesem", rounds)
    yield from a_run("fedavg", rounds)
    yield {"event": "bundle", "run": "fesem", "unix_ms": BEGAN_MS + 59_000}
    yield {"event": "done", "seconds": 60.0, "unix_ms": BEGAN_MS + 60_000}


def facts(view: DashboardView) -> dict[str, Any]:
    found: dict[str, Any] = view.snapshot()["facts"]
    return found


def test_runs_that_had_ended_and_get_more_rounds_are_shown_with_them_and_go_on(tmp_path: Path) -> None:
    view = replay_events(json.dumps(event) for event in ended(2))
    assert (facts(view)["done"], facts(view)["served"]) == (True, "fesem")
    view.event(start(2, 400.0))  # it serves the centers only
    assert facts(view)["done"]
    view.event(start(5, 1000.0))
    assert [run["of"] for run in view.snapshot()["runs"]] == [5, 5]
    assert [facts(view)[name] for name in ("done", "ended", "bundle", "served")] == [False, None, False, None]
    assert facts(view)["off"] == 940_000  # since the runs had ended
    view.event({"event": "done", "seconds": 30.0, "unix_ms": BEGAN_MS + 1_030_000})
    assert facts(view)["ended"] == BEGAN_MS + 1_030_000


@pytest.mark.browser
def test_a_page_counts_the_time_and_the_rounds_of_runs_that_go_on(tmp_path: Path, visit: Open) -> None:
    with serve_dashboard(tmp_path) as site:
        for event in ended(2):
            site.hub.event(event)
        site.hub.event(start(5, 1000.0))
        site.hub.status(seen(phase="waiting for devices", unix_ms=BEGAN_MS + 1_002_000))
        page = visit(site.link).page
        expect(page.locator("#runs [aria-pressed=true]")).to_have_text("fedavg")  # and not what was published before
        expect(page.locator("#t-round")).to_have_text("2 / 5")
        expect(page.locator("#t-round-more")).to_contain_text("1 min ")
        expect(page.locator("#t-round-more")).to_contain_text(" so far, without 15 min 40 s off, about 9 s left")


def end_streams(site: DashboardSite, page: Page) -> None:
    """The coordinator ends: nothing answers."""
    page.route("**/api/**", lambda route: route.abort())
    for stream in list(site.hub._pages):
        stream.end()


@pytest.mark.browser
def test_what_a_page_says_of_a_coordinator_that_has_ended_is_gone_when_it_is_back(tmp_path: Path, visit: Open) -> None:
    with serve_dashboard(tmp_path) as site:
        site.hub.event(start(5, 0.0))
        site.hub.status(seen(phase="stopped"))
        opened = visit(site.link)
        page = opened.page
        export, join = page.locator("#export"), page.locator("#join")
        expect(export).to_contain_text("appear here when the runs are done")
        expect(join).to_contain_text("client.toml")
        end_streams(site, page)
        expect(export).to_contain_text("has ended before it wrote a bundle")
        expect(join).to_contain_text("answers no device")
        site.hub.status(seen(phase="asking"))
        page.unroute("**/api/**")
        expect(page.locator("#phase")).to_have_text("running")
        expect(join).to_contain_text("client.toml")
        expect(export).to_have_text("The centers' files appear here when the runs are done.")
        opened.errors.clear()  # requests that nothing answered


@pytest.mark.browser
def test_a_bundle_that_was_written_long_ago_is_named_when_the_coordinator_ends(tmp_path: Path, visit: Open) -> None:
    with serve_dashboard(tmp_path) as site:
        for event in ended(2):
            site.hub.event(event)
        for number in range(400):  # more than the page's events are
            site.hub.event({"event": "served", "device": "d0", "center": number % 2, "format": "onnx"})
        site.hub.status(seen(phase="serving"))
        opened = visit(site.link)
        expect(opened.page.locator("#phase")).to_have_text("serving centers")
        end_streams(site, opened.page)
        expect(opened.page.locator("#export")).to_contain_text("fedcenters-export serve FOLDER/bundle")
        opened.page.close()  # it goes on asking
        opened.errors.clear()  # requests that nothing answered


@pytest.mark.browser
def test_the_map_of_one_run_is_not_left_below_another_that_has_none(tmp_path: Path, visit: Open) -> None:
    found = {"run": "fesem", "round": 2, "devices": ["d0", "d1"], "assigned": [0, 1], "reach": 1.0, "silhouette": 0.5}
    found |= {"xy": [[0, 1], [5, 5]], "centers": [[2, 2], [9, 9]], "shares": [0.5, 0.4], "cosine": [[1, 0], [0, 1]]}
    of_fesem, none = json.dumps({"map": found}), json.dumps({"map": None, "missing": {"round": 2, "why": "no model"}})
    with serve_dashboard(tmp_path) as site:
        for event in ended(2):
            site.hub.event(event)
        page = visit("about:blank").page
        page.route("**/api/map*", lambda route: route.fulfill(body=of_fesem if "fesem" in route.request.url else none))
        page.goto(site.link)
        expect(page.locator("#map-legend > span")).to_have_count(2)
        expect(page.locator("#map-round")).to_have_text("fesem, round 2")
        page.get_by_role("button", name="fedavg").click()
        expect(page.locator("#map-empty")).to_have_text("No map of round 2: no model.")
        expect(page.locator("#map-legend > span")).to_have_count(0)
        expect(page.locator("#map-round")).to_be_empty()
        assert not page.locator("#map").evaluate(INK)
        page.get_by_role("button", name="fesem").click()
        expect(page.locator("#map-legend > span")).to_have_count(2)
        assert page.evaluate(BEGINS_ANEW, BEGAN_MS) > 0  # it is the same one
        assert page.evaluate(BEGINS_ANEW, BEGAN_MS + 1) == 0
