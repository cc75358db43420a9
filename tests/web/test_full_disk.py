"""The phone's page on a disk without room: nothing is lost, it says what is wrong, and goes on when there is room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from emulator.stop_signals import DeferredSignals
from emulator.testbed.processes import ChildProcesses
from tests.support.browser import PHONE, Open, Visit
from tests.support.phone_federation import RUN, federation_of_one, known_model
from tests.support.phone_page import PATIENCE_MS, load_table, ring, served, text
from tests.support.ports import free_port
from tests.support.process_fleet import FleetScene

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser
ROUNDS = 5
ROOM = 24_000_000  # bytes for the page, its files and what it keeps
KEPT = "navigator.serviceWorker.ready.then(() => true)"  # a worker that fills the disk later leaves its room to others
FULL = "^this phone has no room left for this page: nothing was added"
STUCK = "^This phone has no room left for this page: it takes no more samples and cannot train"
FILL = """async () => {
  const settle = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const opening = indexedDB.open("filler", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("all", { autoIncrement: true });
  const database = await settle(opening);
  const put = (size) => new Promise((resolve) => {
    const transaction = database.transaction("all", "readwrite");
    transaction.objectStore("all").put(crypto.getRandomValues(new Uint8Array(size)));
    transaction.oncomplete = () => resolve("");
    transaction.onabort = () => resolve(transaction.error.name);
  });
  const ends = [];
  for (const size of [65536, 1024, 1]) {
    let end = "";
    while (!end) end = await put(size);
    ends.push(end);
  }
  return ends;
}"""


def allow_room(page: Page, url: str, size: int | None) -> None:
    """How much the browser keeps for the page's site, in bytes; None: what the disk has."""
    limits: dict[str, Any] = {"origin": url.rpartition("/phone/")[0]} | ({} if size is None else {"quotaSize": size})
    page.context.new_cdp_session(page).send("Storage.overrideQuotaForOrigin", limits)


def devices_of_rounds(scene: FleetScene, rounds: int) -> list[list[str]]:
    """The devices that were tested in each of the first rounds, when so many have ended."""
    return [list(event["per_device"]) for event in scene.wait_for("round", rounds)]


@contextmanager
def on_a_small_disk(visit: Open, config: Path) -> Iterator[tuple[Visit, Page, str]]:
    """The page of a coordinator, opened where the browser keeps ROOM for it, with its address."""
    with served(config) as url:
        opened = visit("about:blank", size=PHONE, touch=True)
        allow_room(opened.page, url, ROOM)
        opened.page.goto(url)
        opened.page.wait_for_selector("#entry:not([hidden])")
        opened.page.evaluate(KEPT)
        yield opened, opened.page, url
        opened.page.goto("about:blank")
    opened.errors.clear()  # a broker that is not there


def test_on_a_full_disk_nothing_is_lost_and_the_page_says_why_it_takes_nothing(visit: Open, tmp_path: Path) -> None:
    with on_a_small_disk(visit, known_model(tmp_path, input=(1, 8, 8))) as (opened, page, url):
        hint, add = page.locator("#pad + span"), page.get_by_role("button", name="Add drawing")
        ring(page, "#pad")
        assert page.evaluate(FILL) == ["QuotaExceededError"] * 3
        add.click()
        text(page, "trouble", FULL)
        opened.shot("full-disk")
        expect(hint).to_be_hidden()  # the drawing is on the pad
        expect(page.locator("#count")).to_have_text("none yet")
        table = tmp_path / "one.csv"
        table.write_text(",".join("1" * 64) + ",0\n")
        page.locator("#trouble").evaluate("node => { node.textContent = ''; }")
        page.set_input_files("#table", table)
        text(page, "trouble", FULL)
        allow_room(page, url, None)
        add.click()
        text(page, "count", "^1 in 1 class")
        expect(hint).to_be_visible()
        expect(page.locator("#trouble")).to_be_hidden()


def test_a_page_that_opens_on_a_full_disk_shows_its_samples_and_where_to_add_more(visit: Open, tmp_path: Path) -> None:
    with on_a_small_disk(visit, known_model(tmp_path, input=(1, 8, 8))) as (opened, page, _):
        ring(page, "#pad")
        page.get_by_role("button", name="Add drawing").click()
        text(page, "count", "^1 in 1 class")
        assert page.evaluate(FILL) == ["QuotaExceededError"] * 3
        page.reload()
        expect(page.locator("#entry")).to_be_visible()
        text(page, "count", "^1 in 1 class")
        text(page, "trouble", STUCK)
        opened.shot("opened-on-a-full-disk")


@pytest.mark.broker
def test_a_phone_whose_disk_fills_up_in_a_fit_says_so_and_trains_to_the_end_when_there_is_room(
    visit: Open, tmp_path: Path
) -> None:
    broker = f"mqtt://127.0.0.1:{free_port()}"
    with DeferredSignals() as signals, ChildProcesses(tmp_path / "logs", signals) as children:
        testbed = FleetScene(tmp_path / "run", broker, children, ({**RUN, "num-rounds": ROUNDS, "local-steps": 800},))
        with on_a_small_disk(visit, federation_of_one(testbed, below_quorum="continue")) as (opened, page, url):
            load_table(page, tmp_path, 60)
            page.get_by_role("button", name="Take part").click()
            text(page, "doing", "training, step")
            assert page.evaluate(FILL) == ["QuotaExceededError"] * 3
            text(page, "trouble", STUCK)
            opened.shot("trained-on-a-full-disk")
            expect(page.locator("#link")).to_have_text("connected")
            assert any([] in devices_of_rounds(testbed, n) for n in range(1, ROUNDS - 1))
            allow_room(page, url, None)
            expect(page.locator("#trouble")).to_be_hidden(timeout=PATIENCE_MS)  # once the next fit is stored
            text(page, "rounds", "[1-9]")
            rounds = devices_of_rounds(testbed, ROUNDS)
            assert rounds[-1] == [page.locator("#name").inner_text()]
            children.wait_for_exit(children.running)
