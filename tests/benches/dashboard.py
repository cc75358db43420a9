"""How smooth the dashboard is for a large fleet: frame times and long tasks in a real browser, and a survey's cost.

    python -m tests.benches.dashboard [--devices 5000] [--seconds 20] [--json FILE]

Feeds a page as a coordinator would: every half second another tenth of the fleet has changed its state, every two
seconds a round ends and the map moves. The page is open in headless Chromium, which paints with the CPU. Prints the
median and the 99th percentile of the time from one frame to the next (16.7 ms when nothing is in the way) and every
task that blocked the page for more than 50 ms. No network of devices: this measures the page and the hub.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.dashboard.embedding_map import make_embedding_map
from tests.support.browser import FLAGS, find_chromium
from tests.support.doc_pages import machine
from tests.support.served_dashboard import DashboardSite, serve_dashboard

CENTERS = 8
WIDTH = 9_000  # parameters; digits-mlp has 4,810
LOOK_S, ROUND_LOOKS = 0.5, 4
WATCH = """
() => {
  window.gaps = []; window.tasks = [];
  let last = performance.now();
  const tick = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((e) => e.duration)))
    .observe({ entryTypes: ["longtask"] });
}
"""


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=5_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = {"machine": machine(), "devices": asked.devices}
    found |= {"survey": surveyed(asked.devices), "page": watched(asked.devices, asked.seconds)}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def surveyed(devices: int) -> dict[str, float]:
    """CPU seconds of one map of as many models of WIDTH parameters, which are drawn as they are asked for."""
    centers = np.random.default_rng(0).standard_normal((CENTERS, WIDTH)).astype(np.float32)
    noise = np.random.default_rng(1).standard_normal((64, WIDTH)).astype(np.float32)
    models = ((f"d{i:05d}", centers[i % CENTERS] + noise[i % 64]) for i in range(devices))
    began_s = time.process_time()
    make_embedding_map(models, centers, {f"d{i:05d}": i % CENTERS for i in range(devices)}, count=devices)
    return {"cpu_s": round(time.process_time() - began_s, 2)}


def watched(devices: int, seconds: float) -> dict[str, Any]:
    """What the browser measured while the fleet was busy for so long."""
    from playwright.sync_api import sync_playwright

    with (
        tempfile.TemporaryDirectory() as folder,
        serve_dashboard(Path(folder)) as site,
        sync_playwright() as playwright,
    ):
        fleet = BusyFleet(site, devices)
        fleet.look()
        fleet.round()
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.route("**/api/map*", lambda route: route.fulfill(json={"map": fleet.map()}))
        page.goto(site.link)
        page.locator("#rounds tbody tr").first.wait_for(state="attached")
        page.evaluate(WATCH)
        stop = threading.Event()
        feeder = threading.Thread(target=fleet.live, args=(stop,))
        feeder.start()
        page.wait_for_timeout(seconds * 1000)
        stop.set()
        feeder.join()
        gaps, tasks = page.evaluate("[window.gaps, window.tasks]")
        browser.close()
    return {
        "seconds": seconds,
        "frames": len(gaps),
        "frame_ms": {"median": round(float(np.median(gaps)), 1), "p99": round(float(np.percentile(gaps, 99)), 1)},
        "long_tasks": len(tasks),
        "longest_task_ms": round(max(tasks, default=0.0), 1),
    }


class BusyFleet:
    """Devices that all do something."""

    def __init__(self, site: DashboardSite, devices: int) -> None:
        self._site, self._rng = site, np.random.default_rng(0)
        self._names = [f"d{i:05d}" for i in range(devices)]
        self._number, self._places = 0, self._rng.standard_normal((devices, 2)) * 900
        self._middles = self._rng.integers(-8_000, 8_000, (CENTERS, 2))
        self._answered: set[str] = set()
        self._centers = self._rng.integers(0, CENTERS, devices)
        for name in self._names:
            site.hub.event({"event": "joined", "device": name, "engine": "onnx", "n": 100})

    def look(self) -> None:
        """Another tenth has answered."""
        self._answered |= set(self._rng.choice(self._names, len(self._names) // 10).tolist())
        waiting = [name for name in self._names if name not in self._answered]
        exchange = {"run": "1f", "round": self._number + 1, "exchange": 0, "asked": len(self._names)}
        exchange |= {"wanted": len(self._names), "quorum": 1, "left_s": 60.0, "closed": False, "refused": []}
        exchange |= {"answered": sorted(self._answered), "uploading": waiting[:32], "waiting": waiting[32:300]}
        exchange |= {"open": waiting[300:]}
        seen = {
            "phase": "asking",
            "paused": False,
            "unix_ms": 0,
            "since_ms": 0,
            "connected": len(self._names),
            "exchange": exchange,
        }
        seen |= {"bytes": {"down": 1, "up": 1}, "presence": dict.fromkeys(self._names, "on"), "names": {"1f": "fesem"}}
        seen |= {"heard": dict.fromkeys(self._names, int(time.time() * 1000))}
        seen |= {"devices": dict.fromkeys(self._names, ("onnx", 100))}
        self._site.hub.status(seen)

    def round(self) -> None:
        """A round ends; a twentieth of the devices has moved."""
        self._number += 1
        self._answered.clear()
        moved = self._rng.random(len(self._names)) < 1 / 20
        self._centers[moved] = self._rng.integers(0, CENTERS, int(moved.sum()))
        self._middles = self._middles + self._rng.integers(-300, 300, (CENTERS, 2))
        shares = self._rng.random(CENTERS).tolist()
        self._site.hub.event(
            {
                "event": "round",
                "run": "fesem",
                "method": "fesem",
                "round": self._number,
                "of": 100,
                "accuracy": {"micro": 0.9, "macro": 0.9},
                "f1_of_devices": {"weighted": 0.9, "unweighted": 0.9},
                "f1_pooled": 0.9,
                "per_device": dict.fromkeys(self._names, 0.9),
                "per_center": shares,
                "loss_per_center": shares,
                "assignment": dict(zip(self._names, self._centers.tolist(), strict=True)),
                "bytes": {"down": 10**8, "up": 10**8},
                "seconds": 2.0,
            }
        )

    def map(self) -> dict[str, Any]:
        """As Survey.told has it."""
        xy = (self._places + self._middles[self._centers]).clip(-10_000, 10_000).astype(int)
        cosine = np.eye(CENTERS).tolist()
        shown = {"devices": self._names, "assigned": self._centers.tolist(), "xy": xy.tolist()}
        shown["centers"] = self._middles.clip(-10_000, 10_000).tolist()
        return {"run": "fesem", "round": self._number, **shown, "reach": 1.0, "cosine": cosine, "silhouette": 0.5}

    def live(self, stop: threading.Event) -> None:
        """Until `stop`."""
        looks = 0
        while not stop.wait(LOOK_S):
            looks += 1
            self.look()
            if looks % ROUND_LOOKS == 0:
                self.round()


if __name__ == "__main__":
    main()
