"""The phone's page with keys alone, large text, forced colours, two fingers, a phone on its side, an old browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.support.browser import PHONE, Open, Visit, without_focus_ring
from tests.support.phone_federation import known_model
from tests.support.phone_page import load_table, served, text

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser
WIDTH, HEIGHT = PHONE
ON_ITS_SIDE = (640, 360)
GROUND = "node => getComputedStyle(node).backgroundColor"
INK = """canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
  .reduce((sum, value, i) => sum + (i % 4 === 0 && value > 127 ? 1 : 0), 0)"""
IS_LEFT = """(node, held) =>
  node.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft", cancelable: true, ...held }))"""
FOCUSABLE = {"type": "booleanOrUndefined", "value": True}
TARGETS = """() => [...document.querySelectorAll("button, a[href], label, canvas[tabindex], input[type=number]")]
  .filter((node) => node.checkVisibility()).map((node) => [node.outerHTML.slice(0, 80), node.getBoundingClientRect()])
  .filter(([, box]) => box.width < 24 || box.height < 24).map(([words]) => words)"""


@pytest.fixture
def opened(visit: Open, tmp_path: Path) -> Iterator[Visit]:
    """The page of a model of 8 x 8 pixels, ready to take samples."""
    with served(known_model(tmp_path, input=(1, 8, 8), target=(10,))) as url:
        found = visit(url, size=PHONE, touch=True)
        found.page.wait_for_selector("#entry:not([hidden])")
        yield found
        found.page.goto("about:blank")
    found.errors.clear()  # a broker that is not there


def again(opened: Visit, *, script: str = "", style: str = "", main: str = "") -> Page:
    """The page once more: after `script`, with another style sheet, with another main script."""
    page = opened.page.context.new_page()
    opened.page.goto("about:blank")
    if script:
        page.add_init_script(script)
    if style:
        page.route("**/style.css", lambda route: route.fulfill(body=style, content_type="text/css"))
    if main:
        page.route("**/main.js", lambda route: route.fulfill(body=main, content_type="text/javascript"))
    return page


def test_what_can_be_done_with_a_finger_can_be_done_with_keys(opened: Visit) -> None:
    page = opened.page
    page.locator("#tab-draw").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tab", name="Table")).to_be_focused()
    expect(page.locator("#panel-table")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#panel-draw")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator("#labels input").first).to_be_focused()  # the other tabs are behind the arrow keys
    page.keyboard.press("Tab")
    pad = page.locator("#pad")
    expect(pad).to_be_focused()
    expect(page.get_by_text("arrow keys move the pen").first).to_be_visible()
    expect(page.locator("#pad ~ i")).to_be_visible()  # where the pen is
    for _ in range(10):
        page.keyboard.press("ArrowUp")
    assert pad.evaluate(INK) == 0  # the pen is not down yet
    page.keyboard.press("Space")
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    drawn = pad.evaluate(INK)
    assert drawn > 2000  # of 256 x 256: a line as thick as the pen
    page.keyboard.press("ArrowRight")
    assert pad.evaluate(INK) == drawn
    opened.shot("drawn-with-keys")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    text(page, "count", "^1 in 1 class")
    assert without_focus_ring(page) == []


def test_space_that_is_held_down_sets_the_pen_down_once(opened: Visit) -> None:
    page = opened.page
    pad = page.locator("#pad")
    pad.focus()
    page.keyboard.down("Space")
    page.keyboard.down("Space")  # as the system repeats it
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    page.keyboard.up("Space")
    assert pad.evaluate(INK) > 2000


def test_an_arrow_key_with_another_key_is_the_browsers(opened: Visit) -> None:
    """Alt and an arrow key go back in the history."""
    for node in (opened.page.locator("#pad"), opened.page.locator("#tab-draw")):
        assert [node.evaluate(IS_LEFT, {key: True}) for key in ("altKey", "ctrlKey", "metaKey")] == [True] * 3
        assert not node.evaluate(IS_LEFT, {})


def test_samples_that_go_on_beyond_the_edge_can_be_reached_with_keys(opened: Visit, tmp_path: Path) -> None:
    page = opened.page
    strip = page.locator("#strip")
    expect(strip).to_be_hidden()  # nothing to stop at
    load_table(page, tmp_path, 20)
    text(page, "count", "^20 in")
    assert strip.evaluate("node => node.scrollWidth > node.clientWidth && node.tabIndex === 0")


def test_a_second_finger_draws_nothing(opened: Visit) -> None:
    page = opened.page
    pad = page.locator("#pad")
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    assert box is not None
    x, y, side = box["x"], box["y"], box["width"]
    touch = page.context.new_cdp_session(page)

    def fingers(kind: str, *places: tuple[float, float]) -> None:
        points = [{"x": x + side * across, "y": y + side * down, "id": i} for i, (across, down) in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", (0.2, 0.2))
    fingers("touchMove", (0.2, 0.8))
    drawn = pad.evaluate(INK)
    assert drawn > 0
    fingers("touchStart", (0.2, 0.8), (0.8, 0.2))
    fingers("touchMove", (0.2, 0.8), (0.9, 0.3))
    fingers("touchEnd")
    assert pad.evaluate(INK) == drawn
    fingers("touchStart", (0.8, 0.2))
    fingers("touchMove", (0.8, 0.8))
    fingers("touchEnd")
    assert pad.evaluate(INK) > 1.5 * drawn  # the next stroke


def test_text_of_twice_the_size_fits_and_covers_nothing(opened: Visit, tmp_path: Path) -> None:
    page = opened.page
    load_table(page, tmp_path, 20)
    text(page, "count", "^20 in")
    page.evaluate("document.documentElement.style.fontSize = '200%'")
    assert page.evaluate("document.documentElement.scrollWidth") == WIDTH
    count, tabs = page.locator("#count").bounding_box(), page.locator(".tabs").bounding_box()
    assert count is not None
    assert tabs is not None
    assert count["y"] + count["height"] <= tabs["y"] + 1
    opened.shot("twice")


def test_on_a_phone_on_its_side_the_pad_and_its_buttons_fit_at_once(opened: Visit) -> None:
    page = opened.page
    page.set_viewport_size({"width": ON_ITS_SIDE[0], "height": ON_ITS_SIDE[1]})
    page.evaluate("document.getElementById('pad').scrollIntoView()")
    expect(page.locator("#pad")).to_be_in_viewport(ratio=0.99)  # of a pixel there may be a part
    expect(page.get_by_role("button", name="Add drawing")).to_be_in_viewport(ratio=1)


def test_every_control_has_a_name_and_is_large_enough_for_a_finger(opened: Visit) -> None:
    page = opened.page
    tree = page.context.new_cdp_session(page)
    for tab in ("Draw", "Photos", "Table"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate(TARGETS) == []
        nodes = [node for node in tree.send("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
        focusable = [node for node in nodes if {"name": "focusable", "value": FOCUSABLE} in node.get("properties", [])]
        assert len(focusable) > 5
        assert [node["role"]["value"] for node in focusable if not node["name"]["value"]] == []


def test_the_page_does_not_jump_when_the_screen_is_kept_on(opened: Visit) -> None:
    heights = opened.page.evaluate("""async () => {
      const { View } = await import(document.querySelector("script[type=module]").src.replace("main.js", "view.js"));
      const view = new View(document);
      return [false, true, false].map((on) => (view.showAwake(on), document.documentElement.scrollHeight));
    }""")
    assert len(set(heights)) == 1


@pytest.mark.parametrize("dark", [False, True])
def test_the_chosen_class_is_seen_where_the_system_sets_the_colours(opened: Visit, *, dark: bool) -> None:
    page = opened.page
    page.emulate_media(forced_colors="active", color_scheme="dark" if dark else "light")
    chosen, other = (page.locator("#labels span").nth(k).evaluate(GROUND) for k in (0, 1))
    assert chosen != other
    assert chosen != page.locator("body").evaluate(GROUND)
    assert page.locator("#tab-draw").evaluate(GROUND) != page.locator("#tab-table").evaluate(GROUND)


def test_the_pen_of_the_keys_is_seen_on_the_black_field_where_the_system_sets_the_colours(opened: Visit) -> None:
    page = opened.page
    page.emulate_media(forced_colors="active", color_scheme="light")
    page.locator("#pad").focus()
    page.keyboard.press("ArrowUp")
    assert page.locator("#pad ~ i").evaluate("node => getComputedStyle(node).borderTopColor") != "rgb(0, 0, 0)"


def test_the_chosen_class_is_seen_in_a_browser_without_light_dark(opened: Visit) -> None:
    """As Safari 17.0 to 17.4, which can take part."""
    style = opened.page.evaluate("fetch(document.querySelector('link[rel=stylesheet]').href).then((got) => got.text())")
    address = opened.page.url
    page = again(opened, style=style.replace("light-dark(", "unknown("))
    page.goto(address)
    page.wait_for_selector("#entry:not([hidden])")
    for dark in (False, True):
        page.emulate_media(color_scheme="dark" if dark else "light")
        chosen, other = (page.locator("#labels span").nth(k).evaluate(GROUND) for k in (0, 1))
        assert chosen != other
        assert page.locator("#keep").evaluate(GROUND) == chosen
    page.close()


@pytest.mark.parametrize("script", ["delete globalThis.WebAssembly", "WebAssembly.validate = () => false"])
def test_a_browser_that_cannot_train_says_so_before_anything_is_drawn(opened: Visit, script: str) -> None:
    """As an iPhone in Lockdown Mode; it was told so after all samples were drawn."""
    address = opened.page.url
    page = again(opened, script=script)
    page.goto(address)
    text(page, "trouble", "^this browser lends no WebAssembly with SIMD, which training needs.*take a newer browser$")
    expect(page.locator("#link")).to_have_text("stopped")
    expect(page.locator("#entry")).to_be_hidden()
    page.close()


def test_a_browser_that_cannot_read_the_pages_script_is_not_told_to_wait_for_the_coordinator(opened: Visit) -> None:
    address = opened.page.url
    page = again(opened, main="this is no script")
    page.goto(address)
    waiting = page.locator("#waiting")
    expect(waiting).to_contain_text("this browser is too old")
    expect(waiting).not_to_contain_text("coordinator")
    page.close()
