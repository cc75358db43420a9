"""The reports in a browser: no wider than a phone, readable in light and dark, the result first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect

from emulator.options import SimulateArgs
from emulator.reports.comparison import write_comparison
from emulator.reports.demo_page import write_report
from emulator.reports.html_page import MIN_TEXT_PX
from emulator.simulate import simulate_json
from tests.support import finished_run
from tests.support.browser import DESKTOP, MIN_CONTRAST, PHONE, Open, lowest_contrast, without_focus_ring

pytestmark = pytest.mark.browser
ASKED = SimulateArgs(engine="lean", devices=6, rounds=2, settings={"local-steps": 3})
TEXTS = (
    "h1, h2, p, figcaption, summary",
    ".verdict b, .verdict span, .tile span",
    "th, td, pre",
    "svg g[id^=xtick] text, svg g[id^=ytick] text, svg g[id^=legend] text",
)
SMALLEST_WORDS = """() => Math.min(...[...document.querySelectorAll("figure svg text")].map((words) => {
  const { a, b } = words.getScreenCTM();
  return parseFloat(getComputedStyle(words).fontSize) * Math.hypot(a, b) + 0.01;
}))"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("pages")
    runs = [Path(simulate_json(replace(ASKED, out=out, devices=n, name=f"of-{n}"))["run"]) for n in (6, 5)]
    return {
        "demo": write_report(finished_run.write_demo_run(out / "demo")),
        "comparison": write_comparison(runs, out / "both.html"),
    }


@pytest.mark.parametrize("name", ["demo", "comparison"])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_a_report_fits_the_window_and_can_be_read(
    pages: dict[str, Path], visit: Open, name: str, size: tuple[int, int], *, dark: bool
) -> None:
    page = visit(pages[name].as_uri(), size=size, dark=dark, touch=size == PHONE).page
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 3 * 60) == dark
    whole = "pre" if name == "comparison" else ".scroll, pre"  # a table of all methods is wider, and scrolls
    shown = f"[...document.querySelectorAll('{whole}')].filter((node) => node.clientWidth)"
    wider = "(node) => node.scrollWidth > node.clientWidth"
    cut = page.evaluate(f"{shown}.filter({wider}).map((node) => node.textContent)")
    assert cut == []
    assert page.evaluate(SMALLEST_WORDS) >= MIN_TEXT_PX
    for selector in TEXTS:
        assert lowest_contrast(page, selector) >= MIN_CONTRAST, selector


def test_the_demos_figures_fit_a_phone_and_do_not_scroll(pages: dict[str, Path], visit: Open) -> None:
    page = visit(pages["demo"].as_uri(), size=PHONE, touch=True).page
    wider = "[...document.querySelectorAll('figure')].filter((node) => node.scrollWidth > node.clientWidth).length"
    assert page.evaluate(wider) == 0


def test_the_result_comes_before_figures_and_tables_and_details_are_folded(pages: dict[str, Path], visit: Open) -> None:
    page = visit(pages["demo"].as_uri()).page
    order = page.evaluate("[...document.querySelectorAll('.verdict, figure, table')].map((node) => node.className)")
    assert order[0] == "verdict"
    assert "verdict" not in order[1:]
    box = page.locator(".verdict").bounding_box()
    assert box is not None
    assert box["y"] < DESKTOP[1] / 2
    devices = page.get_by_text("device-03", exact=True)
    expect(devices).to_be_hidden()
    page.get_by_text("Devices", exact=True).click()
    expect(devices).to_be_visible()


def test_figures_are_vectors_but_for_the_devices_images(pages: dict[str, Path], visit: Open) -> None:
    page = visit(pages["comparison"].as_uri()).page
    expect(page.locator(".warning")).to_contain_text("Not comparable")
    figures = page.locator("figure")
    with_images = figures.filter(has=page.locator("image"))
    assert figures.count() > with_images.count() == 2  # a run each
    for text in with_images.all_inner_texts():
        assert "Training images of the devices of each center" in text


@pytest.mark.parametrize("name", ["demo", "comparison"])
def test_whatever_has_the_focus_shows_it(pages: dict[str, Path], visit: Open, name: str) -> None:
    page = visit(pages[name].as_uri(), size=PHONE).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== document.body")
    assert without_focus_ring(page) == []
