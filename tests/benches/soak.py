"""`python -m tests.benches.soak`: hours of a fleet whose links break, and the memory of every process; `make soak`.

The coordinator and mosquitto are processes. So is one device, whose memory is measured; the other devices share a
process, a thread each. Every device reaches the broker over a link of its own, which is down for `--cut` of the time.
Devices take seconds for a step, so that the rounds are slow; with `--hurry 6` there are about six times as many. stdout
has one JSON line a sample and a summary line:

    slope       of resident memory in kB/h after the warm-up, with its 95 % interval. The interval is of a line through
                means of two minutes, because samples that follow each other are not independent
                `coordinator_heap` is what the coordinator's malloc has given out and not got back, with glibc: resident
                memory is that, Python's own arenas, the code, and free blocks that glibc keeps
    lost        updates that a device was told are accepted, and that their exchange was not closed with
    unanswered  updates, other than a device's last, that the device never got an answer for
    overtaken   statistics without an answer before the next task came, which says that nothing waits for them

The process of many devices has one malloc arena: glibc gives threads up to eight for each core, and what one of them
keeps free no thread of another can use, so that hundreds of threads make a process grow in which no device does. The
device whose memory is measured has arenas as usual. `fleet` is that process; `fleet_device`, one device's part of its
slope, is what has to be flat, measured by the memory of a device in a process of its own.

The warm-up is half of the run, because caches with a bound, such as glibc's for each thread, fill slowly.
`first_slope` is the slope before that, without the first twelfth, in which programs are loaded.

The exit status is 1 where something is lost, no update was compared, or a slope is neither zero within its interval
nor below `--flat` a hour.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import scipy.stats

from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import terminate_process
from coordinator.storage.database import DATABASE_FILE
from coordinator.storage.run_reader import STORE_FOLDER
from edge_client.protocol.task import Array, Tensors
from edge_client.runtime.client import Client
from tests.support import softmax_program
from tests.support.flaky_links import FlakyLinks, flaky_links
from tests.support.heap_use import HEAP_FILE
from tests.support.live_federation import ProcessScene, client, run_until_told, settings
from tests.support.virtual_federation import WideEngine

SAMPLE_S, BLOCK_S = 10.0, 120.0
STEP_S = (1.0, 4.0)  # of each of a round's three steps
WARM_SHARE, START_SHARE = 1 / 2, 1 / 12  # of the run: until caches are full; until everything is loaded
STOP_S = 60.0
BALLAST = 4_000  # values beside the model of 24: an update has five blocks
MANY = 1_000_000  # rounds
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
JOBS = ("fit", "probe")  # by the number of the exchange


class SlowEngine(WideEngine):
    """A device that takes seconds for a step."""

    hurry: ClassVar[float] = 1.0

    def step(self, feeds: Tensors) -> dict[str, Any]:
        time.sleep(random.uniform(*STEP_S) / self.hurry)  # noqa: S311 - how slow it is
        return super().step(feeds)


def fleet(folder: Path, name: str) -> None:
    """The devices of one process; their numbers and links are in a file, what they tell goes to another."""
    wanted: Mapping[str, str] = json.loads((folder / f"{name}.json").read_text())
    local = softmax_program.grouped_fleet(settings(folder).fleet.min_devices, 2)
    with (folder / f"{name}.told").open("a", buffering=1) as told:

        def made(number: int, cid: str, url: str) -> Client:
            def tell(event: Mapping[str, Any]) -> None:
                if event["event"] in ("result", "answered"):
                    told.write(json.dumps({"cid": cid, **event}) + "\n")

            return client(folder, url, number, cid, local[cid], engine=SlowEngine, tell=tell, jitter=random.uniform)

        run_until_told([made(number, cid, url) for number, (cid, url) in enumerate(wanted.items())])


@dataclass
class Account:
    """What the coordinator closed exchanges with, and what devices heard of their results."""

    folder: Path
    closed: dict[tuple[int, str], set[str]] = field(default_factory=dict)

    def read_closed(self) -> None:
        """Look at the store before it forgets old rounds."""
        store = settings(self.folder).folder / STORE_FOLDER / DATABASE_FILE
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=30)) as database:
            rows = database.execute(
                "select round, exchange, cid from closings join exchanges using (run, round, exchange) where closed"
            ).fetchall()
        for number, exchange, cid in rows:
            self.closed.setdefault((number, JOBS[min(exchange, 1)]), set()).add(cid)

    def result(self) -> dict[str, Any]:
        """Counts over all devices."""
        results: dict[str, dict[tuple[int, str], str]] = {}
        for file in sorted(self.folder.glob("*.told")):
            for line in file.read_text().splitlines():
                event = json.loads(line)
                place = (event["round"], event["job"])
                of_device = results.setdefault(event["cid"], {})
                of_device[place] = event.get("status", of_device.get(place, ""))
        said = [(cid, place, status) for cid, found in results.items() for place, status in found.items()]
        accepted = [(cid, place) for cid, place, status in said if status in ("ok", "dup")]
        known = [(cid, place) for cid, place in accepted if place in self.closed]
        lasts = {cid: max(found, key=lambda place: (place[0], JOBS.index(place[1]))) for cid, found in results.items()}
        open_jobs = [place[1] for cid, place, status in said if not status and place != lasts[cid]]
        return {
            "results": len(said),
            "accepted": len(accepted),
            "compared": len(known),
            "late": sum(status == "late" for _, _, status in said),
            "lost": sum(cid not in self.closed[place] for cid, place in known),
            "unanswered": open_jobs.count("fit"),
            "overtaken": open_jobs.count("probe"),
        }


def slope(seconds: Sequence[float] | Array, kilobytes: Sequence[float] | Array) -> dict[str, Any]:
    """Of a line through means of BLOCK_S, in kB/h, with its 95 % interval; `mean` is in kB."""
    times, values = np.asarray(seconds), np.asarray(kilobytes)
    block = ((times - times[0]) // BLOCK_S).astype(int)
    means = [(times[block == b].mean() / 3600, values[block == b].mean()) for b in np.unique(block)]
    mean = float(values.mean())
    if len(means) < 3:
        return {"mean": mean, "slope": None, "low": None, "high": None}
    line = scipy.stats.linregress(*np.transpose(means))
    half = float(scipy.stats.t.ppf(0.975, len(means) - 2)) * float(np.nan_to_num(line.stderr))  # nan: no value differs
    found = {"mean": mean, "slope": line.slope, "low": line.slope - half, "high": line.slope + half}
    return {name: round(float(value), 1) for name, value in found.items()}


def slope_between(lines: Sequence[Mapping[str, Any]], name: str, from_s: float, to_s: float) -> dict[str, Any]:
    """The `slope` of one process over the samples of this time."""
    part = [line for line in lines if from_s <= line["s"] <= to_s]
    return slope([line["s"] for line in part], [line[name] for line in part])


def is_flat(found: Mapping[str, Any], flat: float) -> bool:
    """Whether a `slope` is zero within its interval, falls, or is below `flat` of the mean an hour for certain."""
    return found["slope"] is not None and (found["low"] <= 0 or found["high"] <= flat * found["mean"])


def is_whole(counts: Mapping[str, int]) -> bool:
    """Whether updates were compared, and none was lost or went without an answer."""
    return counts["compared"] > 0 and not counts["lost"] and not counts["unanswered"]


def of_one(found: Mapping[str, Any], devices: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """A device's part of the `slope` of a process of many, beside the mean memory of the device with one of its own."""
    parts = {name: round(found[name] / devices, 1) for name in ("slope", "low", "high") if found[name] is not None}
    return {**found, **parts, "mean": own["mean"]}


def watch(
    here: ProcessScene, links: FlakyLinks, account: Account, pids: Mapping[str, int], minutes: float
) -> list[dict[str, Any]]:
    """Sample until the time is over; every line goes to stdout as well."""
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    began_s, lines = time.monotonic(), list[dict[str, Any]]()
    while time.monotonic() < began_s + 60 * minutes:
        time.sleep(SAMPLE_S)
        if over := [name for name, process in processes.items() if process.status() == psutil.STATUS_ZOMBIE]:
            raise RuntimeError(f"{over} ended; {here.folder} has the logs, where --folder names it")
        rounds = len(here.rounds())
        if rounds:
            account.read_closed()
            links.begin()
        line = {"s": round(time.monotonic() - began_s, 1), "round": rounds, "down": links.down, "cuts": links.cuts}
        line |= {f"{name}_kb": process.memory_info().rss // 1024 for name, process in processes.items()}
        if heap := (here.folder / HEAP_FILE).read_text():
            line["coordinator_heap_kb"] = int(heap) // 1024
        times = [process.cpu_times() for process in processes.values()]
        line["cpu_s"] = round(sum(each.user + each.system for each in times), 1)
        lines.append(line)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return lines


def soak(folder: Path, *, devices: int, minutes: float, cut: float, flat: float, hurry: float) -> int:
    """One run in an empty folder; -> the exit status."""
    changes = {
        "devices": devices,
        "rounds": 1_000_000,
        "quorum": 0.5,
        "deadline_s": 60.0 / hurry,
        "below_quorum": "continue",  # on a busy machine a round may have few answers
        "codec": "i8",
        "ballast": BALLAST,
    }
    here, children = ProcessScene(folder, changes=changes), dict[str, subprocess.Popen[bytes]]()
    open_signing_key(settings(folder).folder)
    (folder / HEAP_FILE).touch()
    account = Account(folder)
    here.start("broker")
    try:
        with flaky_links(here.port, devices, share=cut) as links:
            here.start("coordinator")
            ways = dict(zip(softmax_program.grouped_fleet(devices, 2, n=1), links.urls, strict=True))
            first = next(iter(ways))
            shares = {"device": {first: ways[first]}, "fleet": {cid: ways[cid] for cid in ways if cid != first}}
            for name, share in shares.items():
                (folder / f"{name}.json").write_text(json.dumps(share))
                with (folder / f"{name}.log").open("ab") as log:
                    command = [sys.executable, "-m", "tests.benches.soak", "--part", name, "--folder", str(folder)]
                    command += ["--hurry", str(hurry)]
                    children[name] = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        env={**os.environ, **(ONE_ARENA if name == "fleet" else {})},
                    )
            pids = {name: process.pid for name, process in {**here.processes, **children}.items()}
            lines = watch(here, links, account, pids, minutes)
            account.read_closed()
    finally:
        for child in children.values():
            terminate_process(child, timeout_s=STOP_S)
        here.end()
    last, counts = lines[-1], account.result()
    start_s, warm_s = START_SHARE * last["s"], WARM_SHARE * last["s"]
    cold = {name: slope_between(lines, f"{name}_kb", start_s, warm_s)["slope"] for name in pids}
    memory = {name: slope_between(lines, f"{name}_kb", warm_s, last["s"]) for name in pids}
    memory = {name: found | {"first_slope": cold[name]} for name, found in memory.items()}
    memory["fleet_device"] = of_one(memory["fleet"], devices - 1, memory["device"])
    moves = [name for name, found in memory.items() if name != "fleet" and not is_flat(found, flat)]
    if "coordinator_heap_kb" in lines[0]:
        memory["coordinator_heap"] = slope_between(lines, "coordinator_heap_kb", warm_s, last["s"])
    summary = {"devices": devices, "minutes": round(last["s"] / 60, 1), "warm_minutes": round(warm_s / 60, 1)}
    summary |= {"rounds": last["round"], "cuts": last["cuts"], "cores": round(last["cpu_s"] / last["s"], 2)}
    sys.stdout.write(json.dumps({"summary": summary | counts | {"memory_kb_per_h": memory, "not_flat": moves}}) + "\n")
    return int(bool(moves) or not is_whole(counts))


def main() -> int:
    """Measure, or be one of the processes of devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--cut", type=float, default=0.2, help="share of the time that a device's link is down")
    parser.add_argument("--flat", type=float, default=0.01, help="growth an hour that counts as none, of the mean")
    parser.add_argument("--hurry", type=float, default=1.0, help="how many times shorter steps and deadlines are")
    parser.add_argument("--folder", type=Path, help="an empty folder for the run; else a temporary one")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        SlowEngine.hurry = asked.hurry
        fleet(asked.folder, asked.part)
        return 0
    options = {name: getattr(asked, name) for name in ("devices", "minutes", "cut", "flat", "hurry")}
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
        return soak(asked.folder, **options)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        return soak(Path(name), **options)


if __name__ == "__main__":
    sys.exit(main())
