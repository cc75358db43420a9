"""One federation over mosquitto in which every environment's own `fedcenters-edge` takes part, with each runtime.

First each device trains alone, so that one which computes wrongly is known by its own accuracy; then all train one
model together, and a new device of each environment looks for it. The coordinator runs in this environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from emulator.console import ConsoleProgress
from emulator.data.fleet_split import FleetData, digits_fleet
from emulator.reports.demo_page import round_events
from emulator.testbed import monitor
from emulator.testbed import testbed_files as stage
from emulator.testbed.testbed import Testbed, run_testbed

ENGINES = ("onnx", "litert")
ALONE = {"method": "nonfed", "num-rounds": 3}
TOGETHER = {"method": "fedavg", "num-rounds": 3}
# A tenth is chance, which is where a device ends that trains on garbage. A device with few digits is above this.
RIGHT = 0.5
HEALTHY = ("python", "glibc", "runtime", "data", "broker")  # of doctor's checks: those that are not about the hardware
PATIENCE_S, NEAREST_S = 300.0, 60.0


@dataclass
class Told:
    """What one environment's processes showed with one runtime; `wrong` says what failed."""

    alone: float = 0.0
    together: float = 0.0
    nearest: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Device:
    """A process of an environment."""

    python: Path
    files: stage.DeviceFiles
    process: subprocess.Popen[bytes]
    log: Path


def federate(pythons: Mapping[str, Path], folder: Path) -> dict[tuple[str, str], Told]:
    """(environment, engine) -> what it showed. Never raises for what an environment does wrong."""
    return run_testbed(
        folder, "mosquitto", ConsoleProgress(), lambda scene: _play(scene, pythons), federation=stage.DEMO_FEDERATION
    )


def _play(testbed: Testbed, pythons: Mapping[str, Path]) -> dict[tuple[str, str], Told]:
    who = [(name, engine) for name in pythons for engine in ENGINES]
    split = digits_fleet(len(who), new=len(who), groups=1)
    np.savez(testbed.work / stage.REFERENCE_FILE, x=split.reference)
    # An environment that fails shall not keep the others waiting.
    facts: dict[str, Any] = {"quorum": 0.25, "deadline_s": 30, "start_timeout_s": 60, "bundle_run": TOGETHER["method"]}
    coordinator = testbed.start_coordinator(devices=len(who), runs=[ALONE, TOGETHER], seed=0, **facts)
    told = {each: Told() for each in who}
    with contextlib.ExitStack() as stack:
        devices = {
            (name, engine): stack.enter_context(_joined(testbed, pythons[name], f"d-{i}", split, cid, engine))
            for i, ((name, engine), cid) in enumerate(zip(who, sorted(split.devices), strict=True))
        }
        events = _until_the_bundle(testbed)
        for each, cid in zip(who, sorted(split.devices), strict=True):
            _judge(told[each], devices[each], events, cid)
        for each, cid in zip(who, sorted(split.new_devices), strict=True):
            _nearest(testbed, told[each], pythons[each[0]], split, cid, each[1])
    testbed.children.wait_for_exit([coordinator])
    return told


@contextlib.contextmanager
def _joined(testbed: Testbed, python: Path, name: str, split: FleetData, cid: str, engine: str) -> Iterator[Device]:
    """`fedcenters-edge join`, which is asked to leave afterwards."""
    files = testbed.write_device("devices", cid, split.devices[cid], engine=engine)
    log = testbed.work / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python.with_name("fedcenters-edge"), "join", "--config", files.config],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_environment(),
        )  # fmt: skip
    try:
        yield Device(python, files, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_the_bundle(testbed: Testbed) -> list[dict[str, Any]]:
    tail, events = monitor.FileTail(testbed.folder / "metrics.jsonl"), list[dict[str, Any]]()
    deadline_s = time.monotonic() + PATIENCE_S
    while not any(event["event"] == "bundle" for event in events):
        events += tail.read_new()
        testbed.children.check()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no bundle within {PATIENCE_S:.0f} s")
        time.sleep(0.1)
    return events


def _judge(told: Told, device: Device, events: list[dict[str, Any]], cid: str) -> None:
    """The device's own accuracy, that of the common model on it, how its process is, and what doctor says."""
    for run, into in ((ALONE, "alone"), (TOGETHER, "together")):
        accuracy = round_events(events, str(run["method"]))[-1]["per_device"].get(cid, 0.0)
        setattr(told, into, accuracy)
        if not accuracy > RIGHT:
            told.wrong.append(f"{into}: accuracy {accuracy:.2f}")
    if device.process.poll() is not None:
        told.wrong.append(f"join left with {device.process.returncode}: {_last(device.log.read_text())}")
    done = _ran(device.python, "doctor", "--config", str(device.files.config), "--json")
    checks = json.loads(done.stdout)["checks"] if done.stdout.startswith("{") else []
    told.wrong += [f"doctor: {c['name']}: {c['said']}" for c in checks if c["name"] in HEALTHY and not c["ok"]]
    if not checks:
        told.wrong.append(f"doctor left with {done.returncode}: {_last(done.stderr)}")


def _nearest(testbed: Testbed, told: Told, python: Path, split: FleetData, cid: str, engine: str) -> None:
    """A device that never trained fetches the center and runs it."""
    files = testbed.write_device("new", cid, split.new_devices[cid], engine=engine)
    form = "onnx" if engine == "onnx" else "tflite"
    done = _ran(python, "nearest", "--config", str(files.config), "--format", form, "--json")
    if done.returncode:
        told.wrong.append(f"nearest left with {done.returncode}: {_last(done.stderr)}")
        return
    told.nearest = float(json.loads(done.stdout)["accuracy"] or 0.0)
    if not told.nearest > RIGHT:
        told.wrong.append(f"nearest: accuracy {told.nearest:.2f}")


def _ran(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python.with_name("fedcenters-edge"), *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=_environment(), timeout=NEAREST_S, check=False,
    )  # fmt: skip


def _environment() -> dict[str, str]:
    """Without this environment's packages and without configuration of this shell."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("FEDCENTERS_")}


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["nothing said"])[-1][:200]
