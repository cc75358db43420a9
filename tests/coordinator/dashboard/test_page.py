"""The page in a browser, over a hub that a test feeds: with keys alone, on a phone, locked, with a large fleet."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from coordinator.phone import vendored_files
from tests.coordinator.dashboard.test_displayed_metrics import EXCHANGE, joined, round_event, seen
from tests.coordinator.dashboard.test_endpoint import token
from tests.support.browser import PHONE, Open
from tests.support.served_dashboard import DashboardSite, serve_dashboard

pytestmark = pytest.mark.browser
LARGE = 5_000
UNNAMED = """() => [...document.querySelectorAll('a[href], button, input, select, canvas, [role=img], [tabindex="0"]')]
  .filter((node) => node.offsetParent !== null)
  .filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length
    || document.getElementById(node.getAttribute('aria-labelledby'))?.textContent))
  .map((node) => node.outerHTML.slice(0, 200))"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DashboardSite]:
    with serve_dashboard(tmp_path) as found:
        for number in range(4):
            found.hub.event(joined(number))
        for number in (1, 2):
            found.hub.event({**round_event(number, [0, 0, 1, 1]), "loss_per_center": [1 / number, 0.5, None]})
        found.hub.status(seen(exchange=EXCHANGE, presence=dict.fromkeys(("d0", "d1", "d2", "d3"), "on")))
        yield found


def pressed(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))


def test_everything_can_be_reached_and_pressed_with_keys_alone(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    expect(page.locator("#phase")).to_have_text("running")
    order = []
    for _ in range(5):
        pressed(page, "Tab")
        order.append(focused(page))
    assert order[0] == "Skip to the run"
    assert order[2:] == ["pause", "close", "stop"]
    pressed(page, "Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    assert focused(page) == "ask-no"
    pressed(page, "Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert site.buttons.asked == []
    assert focused(page) == "stop"
    with page.expect_response("**/api/control"):
        pressed(page, "Enter", "Tab", "Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()
    with page.expect_response("**/api/control"):
        pressed(page, "Shift+Tab", "Shift+Tab", "Enter")
    assert site.buttons.asked == ["stop", "pause"]


def test_the_arrow_keys_read_a_chart_and_its_name_says_the_newest_values(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    chart = page.locator("#accuracy")
    expect(chart.locator("path")).to_have_count(4)
    assert "Newest, round 2: center 0 50.0 %, center 1 25.0 %" in str(chart.get_attribute("aria-label"))
    chart.focus()
    pressed(page, "ArrowLeft", "ArrowLeft")
    expect(chart.locator("output")).to_contain_text("round 1: center 0 50.0 %")
    pressed(page, "Control+ArrowRight")  # the browser's, as Alt is, which goes to another page
    assert chart.locator("output").inner_text().startswith("round 1: ")
    expect(page.locator("#loss path")).to_have_count(3)


@pytest.mark.parametrize(
    ("accuracies", "losses", "percents", "numbers"),
    [
        ([0.9, 0.98], [0.5, 0.2], ["90.0 %", "92.5 %", "95.0 %", "97.5 %"], ["0.0", "0.2", "0.4"]),
        ([0.1, 0.98], [4e-4, 1e-4], ["25 %", "50 %", "75 %", "100 %"], ["0.0000", "0.0002", "0.0004"]),
        ([0.1, 0.98], [8e-5, 1e-5], ["25 %", "50 %", "75 %", "100 %"], ["0", "2.5e-5", "5e-5", "7.5e-5"]),
        ([0.1, 0.98], [5e9, 1e9], ["25 %", "50 %", "75 %", "100 %"], ["0", "2e+9", "4e+9"]),  # it diverges
    ],
)
def test_equal_steps_of_an_axis_look_equal(
    accuracies: list[float], losses: list[float], percents: list[str], numbers: list[str], tmp_path: Path, visit: Open
) -> None:
    with serve_dashboard(tmp_path) as site:
        for number, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True), 1):
            measured = {"accuracy": {"micro": accuracy, "macro": accuracy}, "per_center": [accuracy] * 2}
            site.hub.event({**round_event(number, [0, 0, 1, 1]), **measured, "loss_per_center": [loss] * 2})
        opened = visit(site.link)
        axis = "g text[text-anchor=end], svg > text[text-anchor=end]"
        expect(opened.page.locator("#accuracy").locator(axis)).to_have_text(percents)
        expect(opened.page.locator("#loss").locator(axis)).to_have_text(numbers)
        opened.shot(f"axis-{numbers[-1]}")


def test_of_a_run_on_sums_the_page_says_what_the_coordinator_sees_and_which_sums_were_not_made(
    site: DashboardSite, visit: Open
) -> None:
    opened = visit(site.link)
    page = opened.page
    expect(page.locator("#map-empty")).to_have_count(1)
    expect(page.locator("#secure")).to_be_hidden()
    sees = "sums of 5 or more devices; no update, no loss, no accuracy of one device"
    secure = {"mode": "updates+membership", "least_members": 5, "sees": sees, "failed": ["4 devices uploaded"]}
    site.hub.event({**round_event(3, [0, 0, 1, 1]), "secure": secure})
    expect(page.locator("#secure")).to_have_text(
        f"secure = updates+membership: the coordinator sees {sees}. No sum in round 3: 4 devices uploaded."
    )
    expect(page.locator("#map-empty")).to_have_text(f"No map: of this run the coordinator sees {sees}.")
    expect(page.locator("#map-note")).to_be_hidden()
    opened.shot("secure")


def test_a_devices_page_follows_the_run_and_keeps_the_focus(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    page.locator("#devices a", has_text="d2").click()
    centers = page.locator("#device .strip span")
    expect(centers).to_have_text(["1", "1"])
    assert focused(page) == "← Overview"
    site.hub.event(round_event(3, [0, 0, 0, 1]))
    expect(centers).to_have_text(["1", "1", "0"])
    assert focused(page) == "← Overview"


def test_an_address_that_names_no_device_shows_the_overview(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    expect(page.locator("#rounds tbody tr")).to_have_count(2)
    page.evaluate("location.hash = '#device/%'")
    site.hub.event(round_event(3, [0, 0, 0, 1]))
    expect(page.locator("#rounds tbody tr")).to_have_count(3)
    expect(page.locator("#overview")).to_be_visible()


def test_a_download_that_fails_is_told(site: DashboardSite, visit: Open) -> None:
    opened = visit("about:blank")
    page = opened.page
    page.route("**/api/files", lambda route: route.fulfill(json={"files": [{"path": "centers/c.onnx", "size": 9}]}))
    page.goto(site.link)
    page.get_by_role("button", name="Download centers/c.onnx").click()
    expect(page.locator("#notice")).to_have_text("Not downloaded: the bundle has no such file.")
    opened.errors.clear()
    page.route("**/api/files/**", lambda route: route.abort())
    page.get_by_role("button", name="Download centers/c.onnx").click()
    expect(page.locator("#notice")).to_have_text("Not downloaded: the coordinator does not answer.")
    opened.errors.clear()


def test_a_stream_that_falls_silent_is_told_as_lost_and_begun_anew(site: DashboardSite, visit: Open) -> None:
    """As when the network goes, or the other machine: no one closes the connection."""
    page = visit("about:blank").page
    page.clock.install()
    page.goto(site.link)
    expect(page.locator("#phase")).to_have_text("running")
    page.evaluate(
        "window.told = []; new MutationObserver(() => told.push(document.getElementById('notice').textContent))"
        ".observe(document.getElementById('notice'), { childList: true })"
    )
    page.clock.run_for(20_000)
    assert page.evaluate("told") == []
    page.clock.run_for(40_000)  # the server says something every 10 s of its own clock
    expect(page.locator("#notice")).to_be_hidden()
    assert page.evaluate("told") == ["The connection is lost; trying again.", ""]
    site.hub.event(round_event(3, [0, 0, 0, 1]))
    page.clock.run_for(2_000)
    expect(page.locator("#rounds tbody tr")).to_have_count(3)


def test_every_control_and_picture_has_a_name(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    expect(page.locator("#devices tbody tr")).to_have_count(4)
    assert page.evaluate(UNNAMED) == []
    assert "4 devices: " in str(page.locator("#fleet").get_attribute("aria-label"))


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_has_it_all_without_scrolling_sideways(site: DashboardSite, visit: Open, *, dark: bool) -> None:
    page = visit(site.link, size=PHONE, dark=dark, touch=True).page
    expect(page.locator("#devices tbody tr")).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 3 * 60) == dark
    page.get_by_role("button", name="Pause").tap()
    expect(page.locator("#devices a", has_text="d3")).to_be_hidden()
    page.locator("#h-devices").tap()
    page.locator("#devices a", has_text="d3").tap()
    expect(page.get_by_role("heading", name="d3")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]


def test_the_link_leaves_no_token_in_the_address(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    expect(page.locator("#phase")).to_have_text("running")
    assert site.control not in page.url
    assert site.control not in page.content()


def test_who_may_only_read_has_no_buttons_until_the_token_is_entered(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link.partition("#")[0]).page
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.get_by_role("button", name="Enter token").click()
    page.get_by_label("Token").fill(site.control)
    pressed(page, "Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_enabled()


def test_a_locked_page_asks_for_its_token_and_opens_with_it(tmp_path: Path, visit: Open) -> None:
    read = token(tmp_path, "read")
    with serve_dashboard(tmp_path, dashboard_read_token=read) as site:
        site.hub.event(joined(1))
        visited = visit(site.link.partition("#")[0])
        page = visited.page
        expect(page.get_by_role("dialog")).to_contain_text("locked")
        pressed(page, "Enter")  # with no token
        page.get_by_label("Token").fill(read.read_text())
        pressed(page, "Enter")
        expect(page.locator("#devices tbody tr")).to_have_count(1)
        assert all("401" in error for error in visited.errors)
        visited.errors.clear()


def test_what_a_browser_cannot_copy_has_no_button(site: DashboardSite, visit: Open) -> None:
    page = visit(site.link).page
    expect(page.get_by_role("button", name="Copy")).to_be_visible()
    page.add_init_script("delete Navigator.prototype.clipboard")  # as over http:// from another machine
    page.reload()
    expect(page.locator("#join pre").first).to_be_visible()
    expect(page.get_by_role("button", name="Copy")).to_have_count(0)


def test_five_thousand_devices_are_shown_and_each_is_found(tmp_path: Path, visit: Open) -> None:
    with serve_dashboard(tmp_path) as site:
        for number in range(LARGE):
            site.hub.event(joined(number))
        site.hub.event(round_event(1, [number % 3 for number in range(LARGE)]))
        site.hub.status(seen(presence={f"d{number}": "on" for number in range(LARGE)}))
        page = visit(site.link).page
        expect(page.locator("#t-devices")).to_have_text(str(LARGE))
        expect(page.locator("li[data-state=idle] b")).to_have_text(str(LARGE))
        expect(page.locator("#devices-more")).to_contain_text(f"60 of {LARGE} devices")
        page.get_by_label("Name").fill("d4999")
        expect(page.locator("#devices tbody tr")).to_have_count(1)
        page.locator("#devices a").click()
        expect(page.get_by_role("heading", name="d4999")).to_be_visible()


def test_where_phones_can_join_the_page_shows_their_link_as_a_qr_code(
    tmp_path: Path, visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = tmp_path / "third"
    third.mkdir()
    for name in vendored_files.VENDORED_FILES:
        (third / name).write_bytes(b"export {};")
        (third / f"{name}.gz").write_bytes(gzip.compress(b"export {};"))
    (third / "packages.txt").write_text(vendored_files._stamp(vendored_files.NPM_PACKAGES))
    monkeypatch.setenv(vendored_files.FOLDER_VARIABLE, str(third))
    with serve_dashboard(tmp_path, web_broker="ws://127.0.0.1:9001") as site:
        page = visit(site.link).page
        code = page.get_by_role("img", name="QR code")
        expect(code).to_be_visible()
        assert code.evaluate("image => image.naturalWidth") > 0
        link = page.get_by_role("link", name="Open on a phone").get_attribute("href")
        assert link == f"http://127.0.0.1:{site.port}/phone/"
        status, headers, _ = site.ask("GET", "/phone/")
        assert (status, "wasm-unsafe-eval" in str(headers["content-security-policy"])) == (200, True)
