"""What a browser lends the phone's page: storage that it refuses or takes back, one tab's turn, readable pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.support.browser import PHONE, Open, Visit, without_focus_ring
from tests.support.phone_federation import known_model
from tests.support.phone_page import ring, served, text
from tests.support.ports import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Dialog, Page, Route

pytestmark = pytest.mark.browser
REFUSING = "IDBFactory.prototype.open = () => { throw new DOMException('denied in this context', 'SecurityError'); }"


@pytest.fixture
def opened(visit: Open, tmp_path: Path) -> Iterator[Visit]:
    """The page of a model of 8 x 8 pixels, ready to take samples."""
    with served(known_model(tmp_path, input=(1, 8, 8))) as url:
        found = visit(url, size=PHONE, touch=True)
        found.page.wait_for_selector("#entry:not([hidden])")
        yield found
        found.page.goto("about:blank")
    found.errors.clear()  # a broker that is not there


def draw(page: Page) -> None:
    ring(page, "#pad")
    page.get_by_role("button", name="Add drawing").click()


def test_a_browser_that_lends_no_storage_is_told_so_with_what_to_do(opened: Visit) -> None:
    page = opened.page.context.new_page()
    page.add_init_script(REFUSING)
    page.goto(opened.page.url)
    text(page, "trouble", r"^this browser lends this page no storage \(denied.* open it in an ordinary window")
    expect(page.locator("#link")).to_have_text("stopped")
    expect(page.locator("#waiting")).to_be_hidden()
    expect(page.get_by_text("connecting…")).to_have_count(0)


def test_a_page_that_is_opened_at_an_address_without_https_says_what_it_needs(opened: Visit) -> None:
    """Away from its own computer, as a phone in the same network has it."""
    site, elsewhere = opened.page.url.rpartition("/phone/")[0], "http://home.example"
    page = opened.page.context.new_page()

    def from_there(route: Route) -> None:
        route.fulfill(response=route.fetch(url=route.request.url.replace(elsewhere, site)))

    page.route(f"{elsewhere}/**", from_there)
    page.goto(f"{elsewhere}/phone/")
    text(page, "trouble", "^this page needs https://")
    expect(page.locator("#link")).to_have_text("stopped")
    page.close()


def test_a_page_whose_data_are_cleared_says_so_and_does_not_call_its_samples_safe(opened: Visit) -> None:
    page = opened.page
    draw(page)
    text(page, "count", "^1 in 1 class")
    text(page, "offline", "samples are safe")
    site = {"origin": page.url.rpartition("/phone/")[0], "storageTypes": "indexeddb"}
    page.context.new_cdp_session(page).send("Storage.clearDataForOrigin", site)
    text(page, "trouble", "^this browser has deleted what this page had kept.* Load the page again$")
    expect(page.locator("#offline")).to_be_hidden()
    expect(page.locator("#link")).to_have_text("stopped")
    draw(page)
    text(page, "trouble", "^this browser has deleted")
    opened.shot("cleared")
    page.reload()
    text(page, "count", "^none yet$")


def test_a_second_tab_goes_on_by_itself_when_the_first_one_is_closed(opened: Visit) -> None:
    draw(opened.page)
    text(opened.page, "count", "^1 in 1 class")
    other = opened.page.context.new_page()
    other.goto(opened.page.url)
    text(other, "trouble", "^this phone takes part already, in another tab")
    expect(other.locator("#count")).to_be_empty()  # it has not looked
    other.screenshot(path=opened.shots / "second-tab.png")
    opened.page.goto("about:blank")
    text(other, "count", "^1 in 1 class")
    expect(other.locator("#trouble")).to_be_hidden()
    other.close()


def test_two_tabs_that_are_opened_at_once_are_one_phone(visit: Open, tmp_path: Path) -> None:
    """Each chose a name, of which later visits knew the last one: what was drawn in the other tab was gone."""
    with served(known_model(tmp_path, input=(1, 8, 8))) as url:
        opened = visit(f"{url}join.json", size=PHONE, touch=True)  # of the same site
        tabs = []
        for _ in range(2):
            with opened.page.context.expect_page() as another:
                opened.page.evaluate("(url) => { window.open(url); }", url)
            tabs.append(another.value)
        names = {text(tab, "name", "^phone-") for tab in tabs}
        assert len(names) == 1
        for tab in tabs:
            tab.close()
        opened.errors.clear()  # it has no icon


def test_a_new_link_asks_once_whether_the_samples_of_the_name_before_are_taken_over(opened: Visit) -> None:
    page, asked = opened.page, list[str]()
    answers = iter([False, True, False])

    def answer(dialog: Dialog) -> None:
        asked.append(dialog.message)
        if next(answers):
            dialog.accept()
        else:
            dialog.dismiss()

    page.on("dialog", answer)
    address = page.url

    def visited(name: str, count: str) -> None:
        page.goto(f"{address}#id={name}")
        text(page, "name", f"^{name}$")
        text(page, "count", count)

    visited("web-0001", "^none yet$")
    draw(page)
    text(page, "count", "^1 in 1 class")
    visited("web-0002", "^none yet$")
    page.reload()  # it does not ask again
    text(page, "count", "^none yet$")
    assert len(asked) == 1
    visited("web-0001", "^1 in 1 class")  # where the sample stayed
    visited("web-0002", "^1 in 1 class")
    page.reload()
    text(page, "count", "^1 in 1 class")
    visited("web-0001", "^none yet$")
    words = "This browser has 1 sample of {}, as this phone was called before. Take it over?"
    assert asked == [words.format(name) for name in ("web-0001", "web-0001", "web-0002")]


def test_a_file_that_is_no_picture_is_named_and_those_beside_it_are_not_added(opened: Visit, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "IMG_0042.heic"
    Image.new("RGB", (40, 60)).save(good)
    bad.write_bytes(b"of another kind")
    opened.page.get_by_role("tab", name="Photos").click()
    opened.page.set_input_files("#photos", [good, bad])
    text(opened.page, "trouble", "^IMG_0042.heic is no picture that this browser reads")
    expect(opened.page.locator("#count")).to_have_text("none yet")


def test_a_photo_is_taken_upright_whatever_way_the_camera_was_held(opened: Visit, tmp_path: Path) -> None:
    """The upper half is white as a person sees it; the file has it at the side, and says so (EXIF orientation 6)."""
    lying = Image.new("L", (60, 60))
    lying.paste(255, (0, 0, 30, 60))
    exif = Image.Exif()
    exif[0x0112] = 6
    lying.save(tmp_path / "photo.jpg", exif=exif)
    page = opened.page
    page.get_by_role("tab", name="Photos").click()
    page.set_input_files("#photos", tmp_path / "photo.jpg")
    text(page, "count", "^1 in 1 class")
    shown = page.locator("#strip canvas").evaluate(
        "(canvas) => [...canvas.getContext('2d').getImageData(0, 0, 8, 8).data].filter((_, i) => i % 4 === 0)"
    )
    assert min(shown[:24]) > 200
    assert max(shown[40:]) < 50


def test_a_transparent_picture_lies_on_white(opened: Visit, tmp_path: Path) -> None:
    drawn = Image.new("RGBA", (60, 60), (0, 0, 0, 0))
    drawn.paste((0, 0, 0, 255), (0, 0, 60, 30))
    drawn.save(tmp_path / "drawn.png")
    page = opened.page
    page.get_by_role("tab", name="Photos").click()
    page.set_input_files("#photos", tmp_path / "drawn.png")
    text(page, "count", "^1 in 1 class")
    shown = page.locator("#strip canvas").evaluate(
        "(canvas) => [...canvas.getContext('2d').getImageData(0, 0, 8, 8).data].filter((_, i) => i % 4 === 0)"
    )
    assert abs(shown[0] - shown[-1]) > 200  # black all over before, whether ink is 1 or 0


def test_with_a_hundred_classes_the_pad_is_in_sight_and_each_class_can_be_reached_with_keys(
    visit: Open, tmp_path: Path
) -> None:
    with served(known_model(tmp_path, input=(1, 8, 8), target=(100,))) as url:
        opened = visit(url, size=PHONE, touch=True)
        page = opened.page
        expect(page.locator("#labels input")).to_have_count(100)
        expect(page.locator("#pad")).to_be_in_viewport(ratio=1)
        opened.shot("a-hundred-classes")
        page.locator("#labels input").first.focus()
        page.keyboard.press("ArrowUp")  # from the first to the last
        expect(page.locator("#labels span").last).to_be_in_viewport(ratio=1)
        assert without_focus_ring(page) == []
        page.goto("about:blank")
    opened.errors.clear()  # a broker that is not there


def test_a_coordinator_that_prepares_another_model_is_waited_for(visit: Open, tmp_path: Path) -> None:
    """What a phone kept for an offline start is the model of before."""
    port = free_port()
    before, after = tmp_path / "before", tmp_path / "after"
    config = known_model(before, input=(1, 8, 8))
    (after / "run").mkdir(parents=True)
    for path in (before / "run").iterdir():
        if path.is_file():
            shutil.copy2(path, after / "run")  # the same key
    (after / "coordinator.toml").write_text(config.read_text().replace(str(before), str(after)))
    with served(config, port=port) as url:
        opened = visit(url, size=PHONE, touch=True)
        opened.page.wait_for_selector("#entry:not([hidden])")
        opened.page.goto("about:blank")
    with served(after / "coordinator.toml", port=port) as url:
        opened.page.goto(url)
        text(opened.page, "name", "^phone-")
        expect(opened.page.locator("#waiting")).to_be_visible()
        expect(opened.page.locator("#entry")).to_be_hidden()
        known = known_model(after, input=(1, 4, 4))
        assert known == after / "coordinator.toml"
        opened.page.wait_for_selector("#entry:not([hidden])")
        text(opened.page, "shape", "^4 × 4$")
        opened.page.goto("about:blank")
    opened.errors.clear()  # connections that nothing answers
