"""The dashboard of a real run in a real browser: it tells what metrics.jsonl tells, its buttons do what they say."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from coordinator.dashboard.endpoint import LINK_FILE
from coordinator.local_broker import Broker
from coordinator.storage.status import read_status
from emulator.stop_signals import DeferredSignals
from emulator.testbed.processes import ChildProcess, ChildProcesses
from tests.support.browser import PHONE, Open, Visit
from tests.support.patience import patience
from tests.support.process_fleet import DEVICES, SETTINGS, FleetScene, jsonl, until

pytestmark = [pytest.mark.broker, pytest.mark.browser]
ROUNDS = 5
RUN = {**SETTINGS, "method": "fesem", "num-rounds": ROUNDS}
PATIENCE_MS = patience(200_000)
SECOND_LOOK_MS = 1_500  # some looks of the page at a run that should stand still


@contextmanager
def begun(folder: Path, broker: Broker) -> Iterator[tuple[FleetScene, str, ChildProcess]]:
    """A coordinator with a dashboard that waits for devices; half of them are enough for a round."""
    with DeferredSignals() as signals, ChildProcesses(folder / "logs", signals) as children:
        testbed = FleetScene(folder / "run", broker.url, children, (RUN,), ("--dashboard", "0"))
        coordinator = testbed.start_coordinator(quorum=0.5)
        until((testbed.folder / LINK_FILE).exists, children, "the dashboard's link")
        yield testbed, (testbed.folder / LINK_FILE).read_text().strip(), coordinator


def rounds_in(folder: Path) -> list[dict[str, Any]]:
    return [event for event in jsonl(folder / "metrics.jsonl") if event["event"] == "round"]


def shown(page: Page) -> list[list[float]]:
    """The table of rounds, oldest first: accuracy, then that of each center, then moved, bytes and seconds."""
    rows = page.locator("#rounds tbody tr").all()
    return [
        [float(cell.get_attribute("data-value") or "nan") for cell in row.locator("td[data-value]").all()]
        for row in reversed(rows)
    ]


def expected(event: dict[str, Any], moved: int) -> list[float]:
    centers = [float("nan") if x is None else x for x in event["per_center"]]
    traffic = [event["bytes"]["down"], event["bytes"]["up"], event["seconds"]]
    return [event["accuracy"]["micro"], *centers, moved, *traffic]


def moves(rounds: list[dict[str, Any]]) -> list[int]:
    pairs = zip([rounds[0], *rounds], rounds, strict=False)
    return [sum(a["assignment"].get(c, k) != k for c, k in b["assignment"].items()) for a, b in pairs]


def wait_for_rounds(page: Page, count: int) -> None:
    page.locator("#rounds tbody tr").nth(count - 1).wait_for(state="attached", timeout=PATIENCE_MS)


def stands_still(page: Page, folder: Path) -> None:
    expect(page.locator("#phase")).to_have_text("paused", timeout=PATIENCE_MS)
    before = (folder / "metrics.jsonl").read_bytes()
    page.wait_for_timeout(SECOND_LOOK_MS)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert (read_status(folder)["phase"], read_status(folder)["exchange"]) == ("paused", None)


def goes_on_without_the_silent_half(page: Page, testbed: FleetScene, worker: ChildProcess) -> None:
    """Half of the devices freeze in the pause, so that none of them answers; the round closes when someone says so.

    Pause is pressed again while they are frozen: the run cannot end before that, however slow the browser is.
    """
    os.kill(worker.process.pid, signal.SIGSTOP)
    try:
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#phase")).not_to_have_text("paused")
        half = DEVICES // 2
        until(lambda: testbed.replies_of_the_open_exchange() == half, testbed.children, "half of the answers")
        number = read_status(testbed.folder)["exchange"]["round"]
        expect(page.locator("#exchange-words")).to_contain_text(f"{half} of {DEVICES} answers")
        page.get_by_role("button", name="Close round").click()
        expect(page.get_by_role("dialog")).to_contain_text(f"{half} of {DEVICES} devices have answered")
        page.get_by_role("dialog").get_by_role("button", name="Close round").click()
        expect(page.locator("li[data-state=late] b")).to_have_text(str(half))
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
    finally:
        os.kill(worker.process.pid, signal.SIGCONT)
    stands_still(page, testbed.folder)
    page.get_by_role("button", name="Resume").click()
    wait_for_rounds(page, number)


def stops(visited: Visit, coordinator: ChildProcess) -> None:
    page = visited.page
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    assert coordinator.process.wait(PATIENCE_MS / 1000) == 0
    expect(page.locator("#notice")).to_contain_text("The coordinator has ended")
    expect(page.locator("#export")).to_contain_text("fedcenters-export serve FOLDER/bundle")
    expect(page.locator("#export button")).to_have_count(0)  # nothing answers a download
    expect(page.locator("#join")).to_contain_text("fedcenters-edge nearest --federation http://HOST:8081")
    expect(page.locator("#join .qr")).to_have_count(0)
    page.close()  # it would go on looking whether the coordinator is back
    assert all("ERR_CONNECTION_REFUSED" in error or "ERR_INCOMPLETE" in error for error in visited.errors)
    visited.errors.clear()


def test_a_real_run_is_shown_and_steered(tmp_path: Path, mosquitto: Broker, visit: Open) -> None:
    with begun(tmp_path / "scene", mosquitto) as (scene, link, coordinator):
        visited = visit(link)
        page = visited.page
        page.get_by_role("button", name="Pause").click(timeout=PATIENCE_MS)
        workers = scene.start_devices(2)
        stands_still(page, scene.folder)
        goes_on_without_the_silent_half(page, scene, workers[0])
        scene.wait_for("done")
        wait_for_rounds(page, ROUNDS)

        rounds = rounds_in(scene.folder)
        for found, event, moved in zip(shown(page), rounds, moves(rounds), strict=True):
            assert found == pytest.approx(expected(event, moved), nan_ok=True)
        assert float(page.locator("#t-accuracy").get_attribute("data-value") or 0) == rounds[-1]["accuracy"]["micro"]
        expect(page.locator("#map-round")).to_have_text(f"fesem, round {ROUNDS}")
        assert page.locator("#cosine [data-value]").count() == SETTINGS["clusters"] ** 2
        assert page.locator("#t-centers-more").get_attribute("data-value")
        assert visited.shot("desktop").stat().st_size > 50_000

        newest: dict[str, float] = {}  # a device may miss the last test on a busy machine
        for event in rounds:
            newest |= event["per_device"]
        worst = page.locator("#devices tbody tr").first.locator("td").nth(2)
        expect(worst).to_have_text(f"{100 * min(newest.values()):.1f} %")
        assert all(line["unix_ms"] > 0 for line in jsonl(scene.folder / "metrics.jsonl") if line["event"] != "round")
        expect(page.locator("#tiles small").first).to_contain_text("seen ")
        expect(page.get_by_role("button", name="Pause")).to_be_hidden()
        page.locator("#devices").get_by_role("link", name="device-03").click()
        expect(page.get_by_role("heading", name="device-03")).to_be_visible()
        assert page.locator(".bars .number").count() == SETTINGS["clusters"]
        strip = [span.inner_text() for span in page.locator(".strip span").all()]
        assert strip == [str(event["assignment"]["device-03"]) for event in rounds]
        visited.shot("device")
        page.get_by_role("link", name="← Overview").click()

        looks_on = visit(link.partition("#")[0], size=PHONE, dark=True, touch=True)
        wait_for_rounds(looks_on.page, ROUNDS)
        expect(looks_on.page.get_by_role("button", name="Enter token")).to_be_visible()
        expect(looks_on.page.get_by_role("button", name="Stop")).to_be_hidden()
        assert looks_on.page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        looks_on.shot("phone")
        looks_on.page.close()

        stops(visited, coordinator)
        scene.children.wait_for_exit([coordinator, *workers])
