"""The phone's page as an app, in a real Chromium: it opens without its coordinator, and goes on after it was killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import expect
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from coordinator.config import read_config
from coordinator.phone import routes
from emulator.stop_signals import DeferredSignals
from emulator.testbed.processes import ChildProcesses
from tests.support.browser import FLAGS, PHONE, Open, find_chromium
from tests.support.node import third_party
from tests.support.phone_federation import RUN, federation_of_one, known_model
from tests.support.phone_page import PATIENCE_MS, another_release, load_table, served, text
from tests.support.ports import free_port
from tests.support.process_fleet import FleetScene

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page
    from starlette.types import ASGIApp, Receive, Scope, Send

pytestmark = pytest.mark.browser
SAMPLES = 60

KEPT = "caches.keys().then((names) => names.filter((name) => name.startsWith('fedcenters-page/')))"
REFUSED = """(elsewhere) => new Promise((end) => {
    addEventListener("securitypolicyviolation", ({ effectiveDirective }) => end(effectiveDirective));
    fetch(elsewhere).catch(() => {});
})"""
WAITING = "navigator.serviceWorker.getRegistration().then((found) => found.waiting?.state === 'installed')"
STATUS = "(address) => fetch(address).then(({ status }) => status)"
READY = "navigator.serviceWorker.ready.then((found) => found.active.state)"


@contextmanager
def own_browser(chromium: Browser, profile: Path) -> Iterator[BrowserContext]:
    """A browser of its own process, whose storage is in `profile`."""
    context = chromium.browser_type.launch_persistent_context(
        profile,
        executable_path=find_chromium(),
        headless=True,
        args=list(FLAGS),
        viewport={"width": PHONE[0], "height": PHONE[1]},
        is_mobile=True,
    )
    context.set_default_timeout(PATIENCE_MS)
    yield context
    with suppress(PlaywrightError):  # it may have been killed
        context.close()


def kill_browser(profile: Path) -> None:
    """End its first process at once, as a system that is short of memory does."""
    (found,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if f"--user-data-dir={profile}" in (line := process.info["cmdline"] or []) and "--type" not in " ".join(line)
    )
    found.kill()
    found.wait(PATIENCE_MS / 1000)


@pytest.mark.broker
def test_a_browser_that_is_killed_in_a_fit_trains_to_the_end_when_the_page_is_opened_again(
    chromium: Browser, tmp_path: Path
) -> None:
    broker = f"mqtt://127.0.0.1:{free_port()}"
    with DeferredSignals() as signals, ChildProcesses(tmp_path / "logs", signals) as children:
        testbed = FleetScene(tmp_path / "run", broker, children, (RUN,))
        with served(federation_of_one(testbed)) as url:
            profile = tmp_path / "profile"
            with own_browser(chromium, profile) as context:
                page = context.pages[0]
                page.goto(url)
                page.wait_for_selector("#entry:not([hidden])", timeout=PATIENCE_MS)
                load_table(page, tmp_path, SAMPLES)
                page.get_by_role("button", name="Take part").click()
                text(page, "doing", "training, step")
                me = page.locator("#name").inner_text()
                kill_browser(profile)
            assert testbed.of("round") == []
            with own_browser(chromium, profile) as context:
                page = context.pages[0]
                page.goto(url)
                text(page, "count", f"^{SAMPLES} in 10 classes")
                assert page.locator("#name").inner_text() == me
                text(page, "doing", "training, step")  # nothing was pressed
                (done,) = testbed.wait_for("round")
                assert list(done["assignment"]) == [me]
                assert text(page, "rounds", "1") == "1"
            children.wait_for_exit(children.running)


def add_a_sample(page: Page, folder: Path) -> None:
    """As a person does: what is not shown yet takes nothing."""
    page.wait_for_selector("#entry:not([hidden])")
    table = folder / "one.csv"
    table.write_text("1,2,3,4,5,0\n")
    page.set_input_files("#table", table)


def listening(app: ASGIApp, asked: list[str]) -> ASGIApp:
    """The same, and each path that is asked for is in `asked`."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        await app(scope, receive, send)

    return answer


def wait_until(page: Page, promised: str) -> None:
    """Ask the page until what it promises is true. `wait_for_function` takes the promise itself for true."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(promised):
        assert time.monotonic() < deadline, promised
        page.wait_for_timeout(50)


def test_the_page_opens_without_its_coordinator_and_an_old_one_never_speaks_to_a_newer_coordinator(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, port = known_model(tmp_path), free_port()
    with served(config, port=port) as url:
        opened = visit(url, size=PHONE, touch=True)
        page = opened.page
        page.wait_for_selector("#entry:not([hidden])")
        assert page.evaluate(READY) in ("activating", "activated")
        (first,) = page.evaluate(KEPT)
        add_a_sample(page, tmp_path)
        text(page, "count", "^1 in 1 class")
        me = page.locator("#name").inner_text()
    dialled: list[str] = []
    page.goto("about:blank")  # the page that had its coordinator dials no more
    page.on("websocket", lambda line: dialled.append(line.url))
    page.goto(url)
    text(page, "offline", "^Cannot reach the coordinator.")
    add_a_sample(page, tmp_path)
    text(page, "count", "^2 in 1 class")
    assert page.locator("#name").inner_text() == me
    assert page.evaluate("crossOriginIsolated")  # headers are kept with the files, the content security policy too
    assert page.evaluate(REFUSED, f"http://127.0.0.1:{free_port()}/") == "connect-src"
    expect(page.get_by_role("button", name="Take part")).to_be_disabled()
    opened.shot("offline-start")
    assert dialled == []
    another_release(monkeypatch)
    with served(config, port=port) as url:
        text(page, "trouble", "^this page is older than its coordinator; load it again$")
        assert dialled == []
        page.reload()
        text(page, "count", "^2 in 1 class")
        assert first.split("/")[1] not in str(page.locator("script").get_attribute("src"))
        page.goto("about:blank")
    opened.errors.clear()  # connections that nothing answers


def test_an_open_page_keeps_its_own_files_through_an_upgrade_and_the_next_opening_has_the_new_ones_only(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, port = known_model(tmp_path), free_port()
    with served(config, port=port) as url:
        opened = visit(url, size=PHONE, touch=True)
        page = opened.page
        add_a_sample(page, tmp_path)
        text(page, "count", "^1 in 1 class")
        page.evaluate(READY)
        (first,) = page.evaluate(KEPT)
        old_file = f"{first.split('/')[1]}/main.js"
        page.evaluate("delete document.getElementById('pad').dataset.blank")  # in the midst of a drawing it stays
    another_release(monkeypatch)
    asked: list[str] = []
    with served(config, port=port, around=lambda app: listening(app, asked)) as url:
        other = page.context.new_page()
        other.goto(url)  # a browser looks for a newer worker at each visit
        text(other, "trouble", "^this phone takes part already, in another tab")
        wait_until(other, WAITING)
        assert len(page.evaluate(KEPT)) == 2
        assert page.request.get(url + old_file).status == 404  # the coordinator has it no more
        assert page.evaluate(STATUS, old_file) == 200
        add_a_sample(page, tmp_path)
        text(page, "count", "^2 in 1 class")
        assert [path for path in asked if path.endswith("/main.js")]
        assert [path for path in asked if "/third/" in path] == []  # these are the same in both, and here already
        other.close()
        page.goto("about:blank")
        page.goto(url)
        while page.evaluate(WAITING):  # the browser still had the earlier page when this one began
            page.goto("about:blank")
            page.goto(url)
        text(page, "count", "^2 in 1 class")
        wait_until(page, f"{KEPT}.then((names) => names.length === 1)")
        (second,) = page.evaluate(KEPT)
        assert second != first
        assert page.locator("script").get_attribute("src") == f"{second.split('/')[1]}/main.js"
        page.goto("about:blank")
    opened.errors.clear()  # connections that nothing answers


def beside(app: ASGIApp, other: ASGIApp, place: str) -> ASGIApp:
    """Two coordinators at one address, as behind a proxy: what is asked below `place` is asked of the other one."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        below = path.startswith(f"{place}/")
        await (other if below else app)({**scope, "path": path.removeprefix(place) if below else path}, receive, send)

    return answer


def test_of_two_coordinators_at_one_address_each_has_a_page_that_opens_without_it(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their installations are of different versions."""
    config, annex, port = known_model(tmp_path / "home"), known_model(tmp_path / "annex"), free_port()
    annex.write_text(annex.read_text().replace('"demo"', '"annex"'))
    another_release(monkeypatch)
    other = Starlette(routes=routes.phone_routes(read_config(annex), third=third_party()))
    monkeypatch.undo()
    with served(config, port=port, around=lambda app: beside(app, other, "/annex")) as url:
        opened = visit(url, size=PHONE, touch=True)
        page, elsewhere = opened.page, url.replace("/phone/", "/annex/phone/")
        places = [(url, "federation demo"), (elsewhere, "federation annex")]
        for place, federation in places:
            page.goto(place)
            text(page, "where", f"^{federation}$")
            wait_until(page, f"{READY}.then((state) => state === 'activated')")
        page.goto("about:blank")
    for place, federation in places:
        page.goto(place)
        text(page, "where", f"^{federation}$")
        text(page, "offline", "^Cannot reach the coordinator.")
    page.goto("about:blank")
    opened.errors.clear()  # connections that nothing answers


def test_the_page_opens_from_its_own_files_where_a_proxy_holds_its_coordinator_up(visit: Open, tmp_path: Path) -> None:
    config, port = known_model(tmp_path), free_port()
    with served(config, port=port) as url:
        opened = visit(url, size=PHONE, touch=True)
        page = opened.page
        text(page, "where", "^federation demo$")
        wait_until(page, f"{READY}.then((state) => state === 'activated')")
        page.goto("about:blank")
    with served(config, port=port, around=lambda _: PlainTextResponse("later", 429)) as url:
        page.goto(url)
        text(page, "where", "^federation demo$")
        text(page, "offline", "^Cannot reach the coordinator.")
        page.goto("about:blank")
    opened.errors.clear()  # connections that nothing answers


def test_a_phone_that_has_a_network_again_dials_at_once(visit: Open, tmp_path: Path) -> None:
    with served(known_model(tmp_path)) as url:
        opened = visit("about:blank", size=PHONE, touch=True)
        page = opened.page
        page.add_init_script("Math.random = () => 1000")  # by itself it would dial in half an hour
        page.goto(url)
        text(page, "offline", "^Cannot reach the coordinator.")
        with page.expect_websocket():
            page.evaluate("dispatchEvent(new Event('online'))")
        page.goto("about:blank")
    opened.errors.clear()  # a broker that is not there


def test_what_is_wrong_comes_into_sight_of_who_pressed_a_button_far_below(visit: Open, tmp_path: Path) -> None:
    with served(known_model(tmp_path, input=(1, 8, 8))) as url:
        opened = visit(url, size=(390, 500), touch=True)
        page = opened.page
        page.wait_for_selector("#entry:not([hidden])")
        page.evaluate("document.getElementById('keep').scrollIntoView({ block: 'end' })")
        page.get_by_role("button", name="Add drawing").click()
        text(page, "trouble", "^draw something first$")
        expect(page.locator("#trouble")).to_be_in_viewport(ratio=0.9)
        page.goto("about:blank")
    opened.errors.clear()  # a broker that is not there
