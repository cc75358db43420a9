"""What the page's overview shows, in a browser: curves and figures first, tiles, table, events, and what is hidden."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.coordinator.dashboard.test_displayed_metrics import EXCHANGE, joined, round_event, seen
from tests.support.browser import DESKTOP, MIN_CONTRAST, PHONE, Open, lowest_contrast, without_focus_ring
from tests.support.served_dashboard import DashboardSite, serve_dashboard

pytestmark = pytest.mark.browser
BEGAN_MS = 1_700_000_000_000
ROUNDS = 9  # of each run


def events_of_two_runs(rounds: int) -> Iterator[dict[str, Any]]:
    """Four devices; fesem with two centers gains a point a round, fedavg stays at 30 %."""
    yield {"event": "start", "federation": "f", "epoch": 1, "unix_ms": BEGAN_MS, "rounds": {"fesem": 9, "fedavg": 9}}
    yield from ({**joined(number), "unix_ms": BEGAN_MS + 1000} for number in range(4))
    for number in range(1, rounds + 1):
        loss = {f"d{i}": 0.5 - i / 10 for i in range(4)}
        yield {**round_event(number, [0, 0, 1, 1]), "loss_per_device": loss}
    for number in range(1, rounds + 1):
        event = round_event(number, [0, 0, 0, 0], run="fedavg")
        yield {**event, "method": "fedavg", "accuracy": {"micro": 0.3, "macro": 0.3}, "per_center": [0.3]}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DashboardSite]:
    """Half-way: a fifth exchange of fedavg is open."""
    with serve_dashboard(tmp_path) as found:
        for event in events_of_two_runs(4):
            found.hub.event(event)
        heard = {"d0": BEGAN_MS + 59_000, "d1": BEGAN_MS - 1_140_000}
        presence = dict.fromkeys(("d0", "d1", "d2", "d3"), "on")
        exchange = {**EXCHANGE, "run": "1a", "round": 5}
        found.hub.status(
            seen(exchange=exchange, presence=presence, names={"1a": "fedavg"}, heard=heard, unix_ms=BEGAN_MS + 60_000)
        )
        yield found


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[DashboardSite]:
    with serve_dashboard(tmp_path) as found:
        for event in events_of_two_runs(ROUNDS):
            found.hub.event(event)
        found.hub.event({"event": "bundle", "run": "fesem", "unix_ms": BEGAN_MS + 70_000})
        found.hub.event({"event": "done", "seconds": 72.0, "unix_ms": BEGAN_MS + 72_000})
        found.hub.status(seen(phase="serving", unix_ms=BEGAN_MS + 80_000))
        yield found


ON_FIRST_SCREEN = """(selector) => {
  const nodes = [...document.querySelectorAll(selector)];
  return nodes.length > 0 && nodes.every((node) => node.getBoundingClientRect().bottom <= window.innerHeight);
}"""


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_curves_and_the_five_figures_are_on_the_first_screen(
    site: DashboardSite, visit: Open, size: tuple[int, int]
) -> None:
    page = visit(site.link, size=size, touch=size == PHONE).page
    expect(page.locator("#methods path.line")).to_have_count(2)
    assert page.locator(".figure").count() == 5
    for shown in ("#methods svg", ".figure"):
        page.wait_for_function(ON_FIRST_SCREEN, arg=shown)  # every event draws the page again


def test_every_run_is_on_one_axis_with_fedavg_and_the_best_so_far_marked(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    chart = page.locator("#methods")
    expect(chart.locator("path.line")).to_have_count(2)
    dashed = chart.locator("path.line[stroke-dasharray]")
    expect(dashed).to_have_count(1)
    thick = chart.locator("path.line.thick")
    expect(thick).to_have_count(1)
    assert dashed.get_attribute("d") != thick.get_attribute("d")
    expect(chart.locator(".mark-words")).to_have_text("best so far 54.0 %")
    expect(chart.locator("text.end")).to_have_text(["fesem 54.0 %", "fedavg 30.0 %"])
    expect(page.locator("#verdict")).to_have_text("fesem is 24.0 points above fedavg")


def test_the_time_so_far_and_the_time_left_are_shown(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    # ten rounds of 1.5 s are missing
    expect(page.locator("#t-round-more")).to_have_text(re.compile(r"^1 min \d+ s so far, about 15 s left$"))


@pytest.mark.parametrize(
    ("s", "words"), [(59.6, "1 min 0 s"), (119.6, "2 min 0 s"), (3_599.6, "1 h 0 min"), (7_180, "2 h 0 min")]
)
def test_a_time_just_below_a_whole_minute_or_hour_is_that_minute_or_hour(
    tmp_path: Path, visit: Open, s: float, words: str
) -> None:
    with serve_dashboard(tmp_path) as site:
        site.hub.event({"event": "start", "federation": "f", "epoch": 1, "unix_ms": BEGAN_MS, "rounds": {}})
        site.hub.event({"event": "done", "seconds": s, "unix_ms": BEGAN_MS + round(1000 * s)})
        expect(visit(site.link).page.locator("#t-round-more")).to_have_text(f"{words} in all")


def test_the_time_does_not_count_while_the_coordinator_was_off(site: DashboardSite, visit: Open) -> None:
    """The last event before the second start is a minute after the first."""
    site.hub.event({**joined(3), "unix_ms": BEGAN_MS + 60_000})
    site.hub.event({"event": "start", "federation": "f", "epoch": 2, "unix_ms": BEGAN_MS + 720_000})
    site.hub.event({"event": "done", "seconds": 12.4, "unix_ms": BEGAN_MS + 732_000})
    site.hub.event({"event": "start", "federation": "f", "epoch": 3, "unix_ms": BEGAN_MS + 900_000})
    page = visit(site.link).page
    expect(page.locator("#t-round-more")).to_have_text("1 min 12 s in all, without 11 min 0 s off")
    expect(page.locator("#events li", has_text="all done")).to_contain_text("12 s, counted from the last start")


def test_a_paused_page_says_where_the_pause_stands_and_promises_no_time(site: DashboardSite, visit: Open) -> None:
    site.hub.status(seen(phase="paused", paused=True, exchange=None, unix_ms=BEGAN_MS + 61_000))
    page = visit(site.link).page
    expect(page.locator("#phase")).to_have_text("paused")
    expect(page.locator("#doing")).to_have_text("fedavg, after round 4 of 9")
    expect(page.locator("#t-round-more")).to_have_text(re.compile("about 15 s left once resumed$"))
    site.hub.status(seen(phase="no broker", paused=True, exchange=None, unix_ms=BEGAN_MS + 62_000))
    expect(page.locator("#phase")).to_have_text("no broker")


def test_an_accuracy_is_rounded_as_in_the_coordinators_lines(tmp_path: Path, visit: Open) -> None:
    with serve_dashboard(tmp_path) as site:
        page = visit(site.link).page
        for number, share in enumerate((0.6625, 0.6675, 0.3335), 1):
            site.hub.event({**round_event(number, [0]), "accuracy": {"micro": share, "macro": share}})
            expect(page.locator("#t-accuracy")).to_have_text(f"{share:.1%}".replace("%", " %"))


def test_when_an_error_ends_the_coordinator_the_page_says_which(site: DashboardSite, visit: Open) -> None:
    opened = visit(site.link)
    page = opened.page
    expect(page.locator("#phase")).to_have_text("running")
    site.hub.event({"event": "error", "message": "litert-torch is not installed\n\nhint: pip install it"})
    site.hub.close()
    words = "The coordinator has ended with an error: litert-torch is not installed; hint: pip install it"
    expect(page.locator("#notice")).to_have_text(words)
    expect(page.locator("#phase")).to_have_text("not connected")
    page.close()
    assert all("/api/stream" in error for error in opened.errors)  # the page looks for the coordinator again
    opened.errors.clear()


def test_on_a_phone_the_assignment_names_its_devices_and_a_table_shows_that_it_goes_on(
    site: DashboardSite, visit: Open
) -> None:
    opened = visit(site.link, size=PHONE, touch=True)
    page = opened.page
    for heading in ("#h-assignment", "#h-devices", "#h-rounds"):
        page.locator(heading).tap()
    named = """() => {
      const canvas = document.getElementById("assignment");
      const scale = canvas.width / canvas.getBoundingClientRect().width;
      const { data } = canvas.getContext("2d").getImageData(0, 0, 20 * scale, 40 * scale);
      return data.some((value) => value > 0);
    }"""
    page.wait_for_function(named)
    shadow = "node => getComputedStyle(node).backgroundAttachment"
    assert "local" in page.locator("#rounds").locator("..").evaluate(shadow)
    opened.shot("tables")


def test_a_tile_has_the_colour_of_its_center_the_accuracy_and_when_it_was_seen(
    site: DashboardSite, visit: Open
) -> None:
    page = visit(site.link).page
    page.get_by_role("button", name="fesem").click()
    tiles = page.locator("#tiles a")
    expect(tiles).to_have_count(4)
    expect(tiles.nth(3)).to_contain_text("center 1 · 30.0 %")
    expect(tiles.nth(1)).to_contain_text("seen 20 min ago")
    expect(tiles.nth(3)).not_to_contain_text("seen")
    colours = [tile.evaluate("node => getComputedStyle(node).backgroundColor") for tile in tiles.all()]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    tiles.nth(3).click()
    expect(page.get_by_role("heading", name="d3")).to_be_visible()


def test_a_device_that_fetched_a_center_is_not_said_to_have_none(finished: DashboardSite, visit: Open) -> None:
    """It never trained, so no round assigned it; the centers that are published are those of fesem."""
    finished.hub.event({**joined(4), "n": 0})
    finished.hub.event({**joined(5), "n": 0})
    finished.hub.event({"event": "served", "device": "d4", "center": 1, "format": "onnx"})
    page = visit(finished.link).page
    tiles, shown = page.locator("#tiles a"), page.locator("#tiles a span")
    expect(shown.nth(4)).to_have_text("fetched center 1")
    expect(shown.nth(5)).to_have_text("no center")
    colours = [tile.evaluate("node => getComputedStyle(node).backgroundColor") for tile in tiles.all()]
    assert colours[4] == colours[3]  # d3 trained center 1
    expect(page.locator("#t-devices-more")).to_contain_text("4 with a center, 1 fetched one")
    page.get_by_role("button", name="fedavg").click()
    expect(shown.nth(4)).to_have_text("no center")
    tiles.nth(4).click()
    expect(page.locator(".device-head")).to_contain_text("0 training samples, onnx, fetched center 1")


NEAREST_TO_A_CURVE = """(words) => {
  const box = words.getBBox();
  const beside = (at, from, length) => Math.max(from - at, 0, at - from - length);
  const far = ({ x, y }) => Math.hypot(beside(x, box.x, box.width), beside(y, box.y, box.height));
  return Math.min(...[...document.querySelectorAll("#methods path.line")].flatMap((path) =>
    Array.from({ length: 500 }, (_, i) => far(path.getPointAtLength((path.getTotalLength() * i) / 499)))));
}"""


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("best", [0.93, 1.0])
def test_the_words_beside_the_best_round_are_free_of_the_curves(
    tmp_path: Path, visit: Open, size: tuple[int, int], best: float
) -> None:
    with serve_dashboard(tmp_path) as site:
        for run, shift in (("fesem", 0.0), ("fedavg", 0.05)):
            for number, micro in enumerate([0.66, 0.84, 0.88, 0.84, 0.88, 0.86, 0.92, best, 0.86], 1):
                accuracy = {"micro": micro - shift, "macro": 0.4}
                site.hub.event({**round_event(number, [0], run=run), "method": run, "accuracy": accuracy})
        page = visit(site.link, size=size, touch=size == PHONE).page
        words = page.locator("#methods .mark-words")
        expect(words).to_have_text(f"best so far {best:.1%}".replace("%", " %"))
        assert words.evaluate(NEAREST_TO_A_CURVE) > 2.0  # a thick curve reaches 1.6 from its middle
        box = words.evaluate("node => { const b = node.getBBox(); return [b.x, b.y]; }")
        assert min(box) >= 0


def test_the_bytes_of_the_rounds_are_the_sum_that_the_demo_prints_and_the_rest_says_since_when(
    finished: DashboardSite, visit: Open
) -> None:
    finished.hub.status(seen(since_ms=BEGAN_MS, unix_ms=BEGAN_MS + 90_000))
    page = visit(finished.link).page
    clock = page.evaluate("(ms) => new Date(ms).toTimeString().slice(0, 5)", BEGAN_MS)
    runs = finished.hub.snapshot()["runs"]
    down, up = (sum(line["bytes"][way] for run in runs for line in run["lines"]) for way in ("down", "up"))
    sums = page.evaluate(f"() => import('./static/dom.js').then((dom) => [{down}, {up}].map(dom.bytes))")
    told = f"{sums[0]} down, {sums[1]} up; in all 1 B down, 2 B up since .*{clock}"
    expect(page.locator("#t-bytes-more")).to_have_text(re.compile(f"^{told}$"))


def test_the_table_begins_with_the_worst_accuracy_and_sorts_by_any_column(site: DashboardSite, visit: Open) -> None:
    for refused in ("d1", "d2", "d2"):
        site.hub.event(round_event(5, [0, 0, 1, 1], refused={refused: "too large"}))
    page = visit(site.link).page
    page.get_by_role("button", name="fesem").click()
    names = page.locator("#devices tbody td:first-child")
    expect(names).to_have_text(["d0", "d1", "d2", "d3"])
    expect(page.locator("th[aria-sort]")).to_have_text("Accuracy")
    for column, expected in (("Accuracy", ["d3", "d2", "d1", "d0"]), ("Loss", ["d0", "d1", "d2", "d3"])):
        page.locator("#devices").get_by_role("button", name=column).click()
        expect(names).to_have_text(expected)
    page.locator("#devices").get_by_role("button", name="Refused").click()
    expect(names).to_have_text(["d2", "d1", "d0", "d3"])
    page.locator("#devices").get_by_role("button", name="Last seen").click()
    expect(names).to_have_text(["d1", "d0", "d2", "d3"])  # longest ago first; the two that were never heard last
    expect(page.locator("#devices tbody tr").nth(0)).to_contain_text("20 min ago")


def test_an_event_has_its_time_and_its_severity(site: DashboardSite, visit: Open) -> None:
    site.hub.event(round_event(5, [0, 0, 1, 1], refused={"d1": "too large"}))
    site.hub.event({"event": "error", "message": "the disk is full", "unix_ms": BEGAN_MS + 61_000})
    page = visit(site.link).page
    lines = page.locator("#events li")
    expect(lines.nth(0)).to_contain_text("error the disk is full")
    expect(lines.nth(0).locator("time")).to_have_attribute("datetime", "2023-11-14T22:14:21.000Z")
    expect(lines.nth(1)).to_contain_text("warning fesem, round 5: the answer of d1 did not count (too large)")
    assert [line.get_attribute("data-severity") for line in lines.all()][:3] == ["error", "warning", "info"]


def test_a_finished_run_opens_on_its_result_and_has_nothing_to_pause(finished: DashboardSite, visit: Open) -> None:
    visited = visit(finished.link)
    page = visited.page
    expect(page.locator("#runs [aria-pressed=true]")).to_have_text("fesem")
    expect(page.locator("#t-accuracy")).to_have_text("59.0 %")
    expect(page.locator("#t-round-more")).to_have_text("1 min 12 s in all")
    expect(page.locator("#events")).to_contain_text("all done in 1 min 12 s")  # in the words of the tile
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    expect(page.get_by_role("button", name="Close round")).to_be_hidden()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    finished.hub.close()
    expect(page.locator("#phase")).to_have_text("finished")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.close()  # it would look whether the coordinator is back
    visited.errors.clear()


def one_map(centers: int, silhouette: float | None) -> str:
    found = {"run": "fesem", "round": 9, "devices": ["d0", "d1"], "xy": [[0, 1], [5, 5]], "reach": 1.0}
    found |= {"assigned": [0, centers - 1]}
    found |= {"centers": [[i, i] for i in range(centers)], "shares": [0.5, 0.4], "silhouette": silhouette}
    return json.dumps({"map": {**found, "cosine": [[1.0] * centers] * centers}})


@pytest.mark.parametrize(("centers", "silhouette", "shown"), [(1, None, False), (2, 0.5, True)])
def test_cosine_and_silhouette_are_shown_only_where_there_are_two_centers(
    finished: DashboardSite, visit: Open, centers: int, silhouette: float | None, *, shown: bool
) -> None:
    visited = visit("about:blank")
    page = visited.page
    page.route("**/api/map*", lambda route: route.fulfill(body=one_map(centers, silhouette)))
    page.goto(finished.link)
    expect(page.locator("#map-round")).to_have_text("fesem, round 9")
    expect(page.locator("#cosine-card")).to_be_visible(visible=shown)
    assert ("silhouette" in page.locator("#t-centers-more").inner_text()) == shown


def test_a_round_that_can_have_no_map_is_named_with_the_reason(finished: DashboardSite, visit: Open) -> None:
    """The run's folder holds nothing."""
    page = visit(finished.link).page
    expect(page.locator("#map-empty")).to_have_text(
        f"No map of round {ROUNDS}: there is no run in {finished.folder} yet."
    )


def test_the_map_of_a_small_fleet_is_small(finished: DashboardSite, visit: Open) -> None:
    page = visit(finished.link).page
    expect(page.locator("#tiles a")).to_have_count(4)
    few = page.locator("#map-plot").bounding_box()
    for number in range(4, 100):
        finished.hub.event(joined(number))
    expect(page.locator("#t-devices")).to_have_text("100")
    page.reload()
    expect(page.locator("#fleet-plot")).to_be_visible()
    many = page.locator("#map-plot").bounding_box()
    assert few is not None
    assert many is not None
    assert few["height"] < 250
    assert many["height"] > 400


def test_on_a_phone_sections_fold_and_stop_is_behind_more(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link, size=PHONE, touch=True).page
    expect(page.locator("#methods path.line")).to_have_count(2)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.locator("#rounds")).to_be_hidden()
    page.get_by_role("heading", name="Loss per center").tap()
    expect(page.locator("#loss")).to_be_visible()
    more = page.get_by_role("button", name="More")
    more.tap()
    expect(more).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_on_its_ground(site: DashboardSite, visit: Open, *, dark: bool) -> None:
    page = visit(site.link, dark=dark).page
    expect(page.locator("#tiles a")).to_have_count(4)
    page.get_by_role("button", name="fesem").click()
    texts = ("#tiles b, #tiles span, #tiles small", ".quiet, .note, .figure", "button", "#verdict", "th, td, td a")
    for selector in texts:
        assert lowest_contrast(page, selector) >= MIN_CONTRAST, selector


def test_before_the_first_round_there_are_no_empty_charts(tmp_path: Path, visit: Open) -> None:
    with serve_dashboard(tmp_path) as site:
        site.hub.event(joined(0))
        page = visit(site.link).page
        expect(page.locator("#tiles a")).to_have_count(1)
        for chart in ("#accuracy", "#loss", "#assignment", "#bytes", "#seconds", "#rounds"):
            expect(page.locator(chart)).to_be_hidden()
        site.hub.event(round_event(1, [0]))
        expect(page.locator("#accuracy path")).to_have_count(4)
        expect(page.locator("#rounds")).to_be_visible()


def test_while_devices_are_missing_the_header_counts_those_that_came_with_samples(tmp_path: Path, visit: Open) -> None:
    with serve_dashboard(tmp_path) as site:
        site.hub.event({"event": "start", "federation": "f", "epoch": 1, "unix_ms": BEGAN_MS, "rounds": {}, "needs": 3})
        site.hub.event(joined(0))
        site.hub.event({**joined(1), "n": 0})
        site.hub.status(seen(phase="waiting for devices", presence={"d0": "on", "d1": "on", "d2": "off"}))
        page = visit(site.link).page
        expect(page.locator("#phase")).to_have_text("waiting for devices")
        expect(page.locator("#doing")).to_have_text("1 of 3 devices")
        for number in (2, 3, 4, 5):
            site.hub.event(joined(number))
        more = {f"d{number}": "on" for number in range(6)}
        site.hub.status(seen(phase="waiting for devices", presence=more))  # not `5 of 3 devices`
        expect(page.locator("#doing")).to_have_text("")


def test_whatever_has_the_focus_shows_it(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    expect(page.locator("#devices tbody tr")).to_have_count(4)
    assert without_focus_ring(page) == []
