"""Pages in a real browser: fixtures on playwright with the Chromium of this machine, headless.

`visit(url, ...)` opens a page in a context of its own and gives a `Visit`. What the page wrote to its console as an
error, what it did not catch, and what it could not load is in `Visit.errors`; a test during which a page had any fails
at its end, unless it looked and cleared the list. A site that ends before the test calls `close_pages_of` first, since
its pages would look for it. Mark such a test `@pytest.mark.browser`. While a module's browser runs, its thread has a
running event loop: no `asyncio.run` in those modules.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.support.patience import patience

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # a container's tests run as root, and the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP, PHONE = (1280, 900), (390, 844)  # CSS pixels
PATIENCE_MS = patience(90_000)
MIN_CONTRAST = 4.5  # of text, WCAG 2.2 level AA
MAX_TABS = 200
_FOCUS = """() => {
  const node = document.activeElement;
  if (node === document.body || node.dataset.hadFocus) return ["", true];
  node.dataset.hadFocus = "yes";
  const near = [node, node.nextElementSibling, node.parentElement].filter(Boolean);
  const rings = near.map((each) => getComputedStyle(each));
  const seen = rings.some((style) => style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2);
  return [seen ? "" : node.outerHTML.slice(0, 200), false];
}"""
_CONTRAST = """(selector) => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const ink = (node) => getComputedStyle(node)[node.ownerSVGElement ? "fill" : "color"];
  return Math.min(...[...document.querySelectorAll(selector)].filter((node) => node.checkVisibility()).map((node) => {
    const [a, b] = [light(parse(ink(node))), light(ground(node))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
}"""


def find_chromium() -> str | None:
    """The browser on PATH, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def lowest_contrast(page: Page, selector: str) -> float:
    """The least contrast of the text of the visible elements with the ground that they stand on (WCAG 2.2)."""
    found: float = page.evaluate(_CONTRAST, selector)
    assert math.isfinite(found), f"nothing is shown of {selector}"
    return found


def without_focus_ring(page: Page) -> list[str]:
    """Walks through the page with the Tab key, once round; -> the elements that have the focus without showing it."""
    page.evaluate("document.activeElement.blur()")
    found = []
    for number in range(MAX_TABS):
        page.keyboard.press("Tab")
        missing, again = page.evaluate(_FOCUS)
        if again:
            assert number, "nothing takes the focus"
            break
        found += [missing] if missing else []
    page.evaluate("for (const node of document.querySelectorAll('[data-had-focus]')) delete node.dataset.hadFocus")
    return found


@dataclass
class Visit:
    """One open page; `errors` are in the words of the browser, in order."""

    page: Page
    shots: Path
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", self._on_error)
        self.page.on("requestfailed", self._on_failed)

    def shot(self, name: str, *, whole: bool = True) -> Path:
        """A picture of the page, or of what of it is in the window, as `name`.png in the test's folder."""
        path = self.shots / f"{name}.png"
        self.page.screenshot(path=path, full_page=whole)
        return path

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _on_error(self, error: Error) -> None:
        self.errors.append(f"not caught: {error}")

    def _on_failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # a page that is left ends its event stream
            self.errors.append(f"not loaded: {request.url} ({request.failure})")


class Open(Protocol):
    """What the fixture `visit` gives."""

    def __call__(
        self,
        url: str,
        *,
        size: tuple[int, int] = DESKTOP,
        dark: bool = False,
        touch: bool = False,
        any_certificate: bool = False,
    ) -> Visit:
        """Open `url` in a window of `size`; `touch` makes it a phone, `any_certificate` believes every TLS server."""


_visits: list[Visit] = []  # of the test that runs


def close_pages_of(site: str) -> None:
    """Close the test's pages whose address begins with `site`."""
    for visited in _visits:
        if visited.page.url.startswith(site):
            visited.page.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser for the tests of one module."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)  # 5 s are too few beside other work
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), headless=True, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens pages, each with its own cookies and storage; closes them when the test ends, and fails it for errors."""

    def opened(
        url: str,
        *,
        size: tuple[int, int] = DESKTOP,
        dark: bool = False,
        touch: bool = False,
        any_certificate: bool = False,
    ) -> Visit:
        context = chromium.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
            is_mobile=touch,
            ignore_https_errors=any_certificate,
            reduced_motion="no-preference",
        )
        context.set_default_timeout(PATIENCE_MS)
        _visits.append(Visit(context.new_page(), tmp_path))
        _visits[-1].page.goto(url)
        return _visits[-1]

    yield opened
    visits = list(_visits)
    _visits.clear()
    for visited in visits:
        visited.page.context.close()
    assert [error for visited in visits for error in visited.errors] == []
