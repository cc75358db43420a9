"""A phone's browser in masked sums beside Python devices of every engine, over a real broker: its page is reloaded at
every stage, and FeSEM begins with more random groups than centers.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from playwright.sync_api import expect

from coordinator.identity.signing_key import open_signing_key
from emulator.stop_signals import DeferredSignals
from emulator.testbed import testbed_files as stage
from emulator.testbed.processes import ChildProcesses
from tests.support.browser import PHONE, Open, Visit
from tests.support.phone_page import PATIENCE_MS, digits, listens, load_table, local, served, text
from tests.support.phone_traffic import overheard
from tests.support.ports import free_port
from tests.support.process_fleet import FleetScene, centers_in, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.broker, pytest.mark.browser]

ENGINES = (*["onnx"] * 9, "litert", "pt2")  # of the Python devices; with the phone two groups of six
SAMPLES, FEWER, ON_PHONE = 150, 110, 120  # four fifths of them are for training
ME = "phone-1"
STAGES = ("prekeys", "shares", "add", "show")
BATCH = 8  # the LiteRT file of the compiled program takes no other
CLEAR: dict[str, Any] = {
    "method": "fedavg",
    "num-rounds": 2,
    "local-steps": 10,
    "batch-size": BATCH,
    "learning-rate": 0.1,
    "name": "clear",
}
SUMMED: dict[str, Any] = CLEAR | {"secure": "updates", "name": "summed"}
HIDDEN: dict[str, Any] = SUMMED | {"method": "ifca", "clusters": 2, "secure": "updates+membership", "name": "hidden"}
NOISY: dict[str, Any] = SUMMED | {"num-rounds": 1, "privacy-noise": 0.1, "privacy-clip": 1.0, "name": "noisy"}
# With 15 devices: three random groups, four sorts, and the merge; three rounds by loss, and one by distance.
MORE_ENGINES = (*["onnx"] * 3, *ENGINES)
SORTED: dict[str, Any] = CLEAR | {
    "method": "fesem",
    "clusters": 2,
    "num-rounds": 4,
    "start": "loss",
    "name": "sorted",
}
SORTED_SUMS: dict[str, Any] = SORTED | {"secure": "updates+membership", "secure-clip": 10.0, "name": "sorted-sums"}
LONG_S = 600.0  # for the masked sums of a first round


class Moments:
    """What the phone is asked of sums and what it announces, as it happens: ("asked" or "announced", stage)."""

    def __init__(self) -> None:
        self.seen: queue.Queue[tuple[str, str]] = queue.Queue()
        self._stage = ""

    def hear(self, said: Mapping[str, Any]) -> None:
        if said["k"] == "task":
            self._stage = said.get("stage", "")
        if self._stage and said["k"] in ("task", "rdy"):
            self.seen.put(("asked" if said["k"] == "task" else "announced", self._stage))


def reload_at_every_stage(page: Page, moments: Moments) -> None:
    """Close and open the page when a stage is first asked, and when its answer is first announced."""
    wanted = {(what, name) for name in STAGES for what in ("asked", "announced")}
    while wanted:
        moment = moments.seen.get(timeout=PATIENCE_MS / 1000)
        if moment in wanted:
            wanted.remove(moment)
            page.reload()


def start(scene: FleetScene, port: int, python: Sequence[str] = ENGINES, samples: int = SAMPLES) -> Path:
    """The coordinator with its broker, and the Python devices; -> the coordinator's configuration."""
    engines = tuple(dict.fromkeys(python))
    model = {"name": stage.DEMO_MODEL, "engines": list(engines), "batch-size": BATCH}
    more: dict[str, Any] = {"broker": f"mosquitto:{port}", "web_port": free_port(), "formats": [], "model": model}
    scene.start_coordinator(engines=engines, min_devices=len(python) + 1, **more)
    until(lambda: listens(port), scene.children, "the coordinator's broker")
    key = open_signing_key(scene.folder).public.hex()
    x, y = digits()
    np.savez(scene.work / stage.REFERENCE_FILE, x=x[:8].reshape(-1, 1, 8, 8))
    configs: dict[str, list[str]] = {}
    for i, engine in enumerate(python):
        part = slice(ON_PHONE + i * samples, ON_PHONE + (i + 1) * samples)
        told: dict[str, str] = {"engine": engine, "broker": scene.broker, "key": key}
        files = stage.write_device(scene.work, f"device-{i:02d}", local(x[part], y[part], samples * 4 // 5), **told)
        configs.setdefault(engine, []).append(str(files.config))
    for engine, paths in configs.items():
        scene.children.python(f"devices-{engine}", "-m", "emulator.testbed.threaded_fleet", *paths)
    return scene.work / "coordinator.toml"


def take_part(visit: Open, url: str, folder: Path) -> Visit:
    """The phone's page with its samples, in the fleet."""
    opened = visit(f"{url}#id={ME}", size=PHONE, touch=True)
    page = opened.page
    page.wait_for_selector("#entry:not([hidden])", timeout=PATIENCE_MS)
    load_table(page, folder, ON_PHONE)
    text(page, "count", f"^{ON_PHONE} in 10 classes")
    page.get_by_role("button", name="Take part").click()
    expect(page.locator("#pause")).to_have_text("Pause")
    return opened


@pytest.mark.timeout(900)
def test_a_phone_and_python_devices_of_every_engine_are_summed_though_the_page_is_reloaded_at_every_stage(
    visit: Open, tmp_path: Path
) -> None:
    port, moments = free_port(), Moments()
    with DeferredSignals() as signals, ChildProcesses(tmp_path / "logs", signals) as children:
        scene = FleetScene(tmp_path / "run", f"mqtt://127.0.0.1:{port}", children, (CLEAR, SUMMED, HIDDEN, NOISY))
        with served(start(scene, port)) as url, overheard(port, stage.DEMO_FEDERATION, ME, moments.hear):
            opened = take_part(visit, url, tmp_path)
            page = opened.page
            reload_at_every_stage(page, moments)
            scene.wait_for("round", 7)
            opened.shot("summed")
            scene.wait_for("bundle")
            page.goto("about:blank")  # before the broker ends
            children.wait_for_exit(children.running)
    rounds = scene.of("round")
    assert [event["secure"]["mode"] for event in rounds[2:]] == [
        *["updates"] * 2,
        *["updates+membership"] * 2,
        "updates",
    ]
    assert rounds[-1]["privacy"]["releases"] == 1
    assert not any("failed" in event["secure"] for event in rounds[2:])
    assert not any(event.get("refused") for event in rounds)
    (clear,), (summed,) = centers_in(scene.folder, "clear"), centers_in(scene.folder, "summed")
    for name, weights in clear.items():
        # The sum of twelve devices in words of 32 bits; the devices' seeds are the same.
        np.testing.assert_allclose(summed[name], weights, atol=1e-5)
    assert len(centers_in(scene.folder, "hidden")) == 2


@pytest.mark.slow
def test_fesem_on_sums_with_a_phone_in_the_cohort_ends_with_the_centers_of_its_run_in_the_clear(
    visit: Open, tmp_path: Path
) -> None:
    port = free_port()
    with DeferredSignals() as signals, ChildProcesses(tmp_path / "logs", signals) as children:
        scene = FleetScene(tmp_path / "run", f"mqtt://127.0.0.1:{port}", children, (SORTED, SORTED_SUMS))
        with served(start(scene, port, MORE_ENGINES, FEWER)) as url:
            page = take_part(visit, url, tmp_path).page
            for number in range(2 * SORTED["num-rounds"]):
                scene.wait_for("round", number + 1, patience_s=LONG_S)
            scene.wait_for("bundle", patience_s=LONG_S)
            page.goto("about:blank")  # before the broker ends
            children.wait_for_exit(children.running)
    rounds = scene.of("round")
    assert not any(event.get("refused") or "failed" in event.get("secure", {}) for event in rounds)
    clear, summed = centers_in(scene.folder, "sorted"), centers_in(scene.folder, "sorted-sums")
    assert len(clear) == len(summed) == SORTED["clusters"]
    for one, other in zip(clear, summed, strict=True):
        for name, weights in one.items():
            np.testing.assert_allclose(other[name], weights, atol=1e-4)  # nine sums add their rounding
