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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.data.dataset import DeviceData
from emulator.console import ConsoleProgress
from emulator.data.fleet_split import digits_fleet
from emulator.reports.demo_page import round_events
from emulator.testbed import monitor
from emulator.testbed import testbed_files as stage
from emulator.testbed.testbed import Testbed, run_testbed
from tests.support.process_fleet import until

ENGINES = ("onnx", "litert")
ALONE = {"method": "nonfed", "num-rounds": 3}
TOGETHER = {"method": "fedavg", "num-rounds": 3}
SHARES = 3  # of the digits for devices that train, and as many for new ones
RIGHT = 0.5  # a tenth is chance, which is where a device ends that trains on garbage
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
        folder,
        "mosquitto",
        ConsoleProgress(),
        lambda testbed: _play(testbed, pythons),
        federation=stage.DEMO_FEDERATION,
    )


def _play(testbed: Testbed, pythons: Mapping[str, Path]) -> dict[tuple[str, str], Told]:
    told = {(name, engine): Told() for name in pythons for engine in ENGINES}
    # The same few shares, however many take part: on a few digits an accuracy says little.
    split = digits_fleet(SHARES, new=SHARES, groups=1)
    stage.write_reference(testbed.work, split.reference)
    trains, comes = ([*part.values()] for part in (split.devices, split.new_devices))
    # An environment that fails shall not keep the others waiting.
    facts: dict[str, Any] = {"quorum": 0.25, "deadline_s": 30, "start_timeout_s": 60, "bundle_run": TOGETHER["method"]}
    coordinator = testbed.start_coordinator(devices=len(told), runs=[ALONE, TOGETHER], seed=0, **facts)
    with contextlib.ExitStack() as stack:
        devices = {
            each: stack.enter_context(_joined(testbed, pythons[each[0]], trains[i % SHARES], each))
            for i, each in enumerate(told)
        }
        events = _until_the_bundle(testbed)
        for i, (each, device) in enumerate(devices.items()):
            _judge(told[each], device, events)
            _nearest(testbed, told[each], pythons[each[0]], comes[i % SHARES], each)
    testbed.children.wait_for_exit([coordinator])
    return told


def _cid(who: tuple[str, str]) -> str:
    """A device's id: no dots in it."""
    return "-".join(who).replace(".", "-")


@contextlib.contextmanager
def _joined(testbed: Testbed, python: Path, local: DeviceData, who: tuple[str, str]) -> Iterator[Device]:
    """`fedcenters-edge join`, which is asked to leave afterwards."""
    files = testbed.write_device("devices", _cid(who), local, engine=who[1])
    log = testbed.work / f"{files.cid}.log"
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

    def published() -> bool:
        events.extend(tail.read_new())
        return any(event["event"] == "bundle" for event in events)

    until(published, testbed.children, f"no bundle within {PATIENCE_S:.0f} s", patience_s=PATIENCE_S)
    return events


def _judge(told: Told, device: Device, events: list[dict[str, Any]]) -> None:
    """The device's own accuracy, that of the common model on it, how its process is, and what doctor says."""
    for run, into in ((ALONE, "alone"), (TOGETHER, "together")):
        accuracy = round_events(events, str(run["method"]))[-1]["per_device"].get(device.files.cid, 0.0)
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


def _nearest(testbed: Testbed, told: Told, python: Path, local: DeviceData, who: tuple[str, str]) -> None:
    """A device that never trained fetches the center and runs it."""
    files = testbed.write_device("new", f"new-{_cid(who)}", local, engine=who[1])
    form = "onnx" if who[1] == "onnx" else "tflite"
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
