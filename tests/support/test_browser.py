"""The browser of the tests sees what a person would: a page's pictures, its colours, and what goes wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.browser import PHONE, Open
from tests.support.served_dashboard import serve_dashboard

pytestmark = pytest.mark.browser
DARK = "matchMedia('(prefers-color-scheme: dark)').matches"


def test_an_error_in_a_page_is_told(visit: Open) -> None:
    page = visit("data:text/html,<script>console.error('first'); throw new Error('second')</script>")
    assert [word for error in page.errors for word in ("first", "second") if word in error] == ["first", "second"]
    page.errors.clear()


def test_a_window_has_the_size_and_the_colours_that_were_asked_for(visit: Open) -> None:
    page = visit("data:text/html,<p>hello", size=PHONE, dark=True)
    assert page.page.evaluate(f"[innerWidth, {DARK}]") == [PHONE[0], True]
    assert page.shot("hello").stat().st_size > 0


def test_a_page_is_closed_before_its_dashboard_ends_so_that_it_does_not_look_for_it(
    visit: Open, tmp_path: Path
) -> None:
    with serve_dashboard(tmp_path) as site:
        visited, other = visit(site.link), visit("data:text/html,<p>hello")
        expect(visited.page.locator("#phase")).not_to_be_empty()
    assert visited.page.is_closed()
    assert not other.page.is_closed()
