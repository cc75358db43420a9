"""The dashboard for people who read with contrast, with keys, with a screen reader, or in the system's own colours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.coordinator.dashboard.test_displayed_metrics import joined, round_event
from tests.support.browser import DESKTOP, MIN_CONTRAST, PHONE, Open, lowest_contrast
from tests.support.served_dashboard import DashboardSite, serve_dashboard

pytestmark = pytest.mark.browser
CENTERS = 8
COSINES = [[1.0 if i == j else (i + j) / 2 / CENTERS for j in range(CENTERS)] for i in range(CENTERS)]
CELLS = """async (cosines) => {
  const { heat } = await import("./static/charts.js");
  heat(document.getElementById("cosine"), cosines, "cosines");
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  return [...document.querySelectorAll("#cosine .cell-words")].map((words) =>
    [words.previousSibling, words].map((node) => numbers(getComputedStyle(node).fill)));
}"""
UNDER_THE_HEADER = """() => {
  const node = document.activeElement, header = document.querySelector("header");
  if (node === document.body || header.contains(node)) return null;
  const covered = node.getBoundingClientRect().top < header.getBoundingClientRect().bottom - 1;
  return covered ? node.outerHTML.slice(0, 80) : "";
}"""
CUT = "all => all.filter((node) => node.scrollWidth > node.clientWidth + 1).map((node) => node.textContent)"
MAX_TABS = 100


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DashboardSite]:
    with serve_dashboard(tmp_path) as found:
        found.hub.event({"event": "start", "federation": "lab", "epoch": 1, "unix_ms": 1, "rounds": {"fesem": 9}})
        for number in range(CENTERS):
            found.hub.event(joined(number))
        for number in (1, 2):
            each = [0.5 + k / 20 for k in range(CENTERS)]
            found.hub.event({**round_event(number, list(range(CENTERS))), "per_center": each})
        yield found


def light(colour: list[float]) -> float:
    """Relative luminance (WCAG 2.2)."""
    linear = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_the_names_of_curves_can_be_read_whatever_colour_a_curve_has(
    site: DashboardSite, visit: Open, *, dark: bool
) -> None:
    opened = visit(site.link, dark=dark)
    expect(opened.page.locator("#accuracy .end")).to_have_count(CENTERS + 1)  # and that of all devices
    assert lowest_contrast(opened.page, ".chart .end") >= MIN_CONTRAST
    opened.shot("curves")


@pytest.mark.parametrize("dark", [False, True])
def test_each_number_on_a_coloured_cell_can_be_read(site: DashboardSite, visit: Open, *, dark: bool) -> None:
    page = visit(site.link, dark=dark).page
    cells = page.evaluate(CELLS, COSINES)
    assert len(cells) == CENTERS**2
    pairs = [sorted((light(ground), light(ink))) for ground, ink in cells]
    assert min((high + 0.05) / (low + 0.05) for low, high in pairs) >= MIN_CONTRAST


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_what_has_the_focus_is_never_under_the_header(site: DashboardSite, visit: Open, size: tuple[int, int]) -> None:
    page = visit(site.link, size=size).page
    expect(page.locator("#devices tbody tr")).to_have_count(CENTERS)
    page.locator("summary").last.focus()
    seen = []
    for _ in range(MAX_TABS):
        page.keyboard.press("Shift+Tab")
        covered = page.evaluate(UNDER_THE_HEADER)
        if covered is None:
            break
        seen.append(covered)
    assert len(seen) > CENTERS  # it went through the page
    assert [each for each in seen if each] == []


def test_the_link_to_the_overview_is_called_what_it_shows(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    expect(page.get_by_role("heading", level=1)).to_have_accessible_name("lab")
    expect(page.get_by_role("link", name="lab", exact=True)).to_be_visible()


def test_every_column_has_a_name_and_every_heading_that_folds_is_large_enough_to_press(
    site: DashboardSite, visit: Open
) -> None:
    page = visit("about:blank").page
    files = {"files": [{"path": "centers/center-0/model.onnx", "size": 20_000}]}
    page.route("**/api/files", lambda route: route.fulfill(body=json.dumps(files)))
    page.goto(site.link)
    expect(page.locator("#export tbody tr")).to_have_count(1)
    assert [name for name in page.locator("th").all_inner_texts() if not name.strip()] == []
    for heading in page.locator("summary:visible").all():
        box = heading.bounding_box()
        assert box is not None
        assert box["height"] >= 24


@pytest.mark.parametrize(("width", "text"), [(320, "100%"), (320, "200%"), (1280, "200%")])
def test_no_tile_and_no_row_cuts_a_name_or_a_number(tmp_path: Path, visit: Open, width: int, text: str) -> None:
    """Names of one fleet often differ in their last letters alone; "100.…" is no number."""
    names = [f"building-3-floor-2-room-{'2' * 30}-sensor-{i}" for i in range(4)]
    event = round_event(1, [0, 0, 1, 1]) | {"per_device": dict.fromkeys(names, 1.0)}
    event |= {"bytes": {"down": 11_100_000_000, "up": 1_800_000_000}}
    runs = ["wecfl-with-a-long-name-lam-0.05", "fedavg-with-a-long-name-seed-17"]
    with serve_dashboard(tmp_path) as site:
        for name in names:
            site.hub.event({"event": "joined", "device": name, "engine": "onnx", "n": 40})
        for run in runs:
            site.hub.event(event | {"run": run, "assignment": dict.fromkeys(names, 0)})
        opened = visit(site.link, size=(width, 900))
        page = opened.page
        page.evaluate("for (const card of document.querySelectorAll('details')) card.open = true")
        page.evaluate(f"document.documentElement.style.fontSize = '{text}'")
        expect(page.locator("#tiles li")).to_have_count(4)
        assert page.locator("#tiles b, #tiles span, #tiles small").evaluate_all(CUT) == []
        page.wait_for_function("width => document.documentElement.scrollWidth === width", arg=width)
        assert page.locator("#devices tbody td:first-child").evaluate_all("all => all[0].clientWidth") >= width / 4
        opened.shot(f"tiles-{width}-{text[:-1]}")


def test_keys_of_colours_are_told_apart_where_the_system_sets_the_colours(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    expect(page.locator("#bytes rect").first).to_be_visible()
    page.emulate_media(forced_colors="active")
    ground = "node => getComputedStyle(node).backgroundColor"
    assert page.locator("#key-down").evaluate(ground) != page.locator("#key-up").evaluate(ground)
