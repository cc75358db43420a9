"""The phone's page warns of a table in another range than the samples before, and its button takes that table back."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.browser import PHONE, Open
from tests.support.phone_federation import known_model
from tests.support.phone_page import ring, served, text

pytestmark = pytest.mark.browser
REFUSING = """() => {
  window.kept = IDBObjectStore.prototype.delete;
  IDBObjectStore.prototype.delete = () => { throw new Error("the disk is busy"); };
}"""


def test_the_button_of_the_range_warning_removes_the_samples_of_that_table_and_no_others(
    visit: Open, tmp_path: Path
) -> None:
    table = tmp_path / "ink.csv"
    table.write_text("".join(",".join(["16"] * 64) + f",{label}\n" for label in (1, 2)))
    with served(known_model(tmp_path, input=(1, 8, 8))) as url:
        opened = visit(url, size=PHONE, touch=True)
        page = opened.page
        page.wait_for_selector("#entry:not([hidden])")
        warning, remove = page.locator("#range"), page.get_by_role("button", name="Remove these")
        ring(page, "#pad")
        page.get_by_role("button", name="Add drawing").click()
        text(page, "count", "^1 in 1 class")
        expect(warning).to_be_hidden()
        page.get_by_role("tab", name="Table").click()
        page.set_input_files("#table", table)
        text(page, "count", "^3 in 3 classes")
        text(page, "range-words", "^These values go up to 16, those of your other samples up to .*“Divide values by”")
        remove.scroll_into_view_if_needed()
        opened.shot("warned")
        remove.evaluate("(button) => { button.click(); button.click(); }")  # pressed twice before the first is done
        text(page, "count", "^1 in 1 class")
        expect(warning).to_be_hidden()
        page.fill("#scale", "16")
        page.set_input_files("#table", table)
        text(page, "count", "^3 in 3 classes")
        expect(warning).to_be_hidden()
        opened.shot("divided")
        page.goto("about:blank")
    opened.errors.clear()  # a broker that is not there


def test_a_table_that_could_not_be_removed_can_be_removed_again(visit: Open, tmp_path: Path) -> None:
    table = tmp_path / "ink.csv"
    table.write_text(",".join(["16"] * 64) + ",1\n")
    with served(known_model(tmp_path, input=(1, 8, 8))) as url:
        opened = visit(url, size=PHONE, touch=True)
        page = opened.page
        page.wait_for_selector("#entry:not([hidden])")
        page.get_by_role("tab", name="Table").click()
        page.set_input_files("#table", table)
        text(page, "range-words", "^These values go up to 16")
        page.evaluate(REFUSING)
        remove = page.get_by_role("button", name="Remove these")
        for _ in range(2):
            remove.click()
            text(page, "trouble", "^the disk is busy$")
            page.locator("#trouble").evaluate("node => { node.textContent = ''; }")
        page.evaluate("() => { IDBObjectStore.prototype.delete = window.kept; }")
        remove.click()
        text(page, "count", "^none yet$")
        page.goto("about:blank")
    opened.errors.clear()  # a broker that is not there
