"""The browser of the tests sees what a person would: a page's pictures, its colours, and what goes wrong in it."""

from __future__ import annotations

import pytest

from tests.support.browser import PHONE, Open

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
