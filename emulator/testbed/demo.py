"""The whole chain once, on this machine: broker, coordinator, twelve devices over MQTT, bundle, three new devices.

Read `run` top to bottom for the story. Everything that trains, decides or serves is the real program in a process of
its own; this file only sets the stage, watches, and tells. The true groups are known here and nowhere else.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_client.errors import NetworkError
from emulator.console import Talk
from emulator.reports.demo_page import rounds_of, write_report
from emulator.testbed import demo_result, monitor, testbed
from emulator.testbed import testbed_files as stage
from emulator.testbed.processes import LOGS_HINT, Child
from emulator.testbed.testbed import POLL_S, SILENCE_S, Scene

if TYPE_CHECKING:
    from emulator.data.fleet_split import Split

PACKAGES = ("fedcenters", "numpy", "torch", "onnxruntime", "ai-edge-litert", "litert-torch", "paho-mqtt")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the command line can change; `out` is the folder that the run's own folder is made in."""

    devices: int = 12
    new_devices: int = 3
    groups: int = 3
    rounds: int = 10
    seed: int = 0
    out: Path = Path("runs")
    broker: str = "auto"


def run(settings: DemoSettings, talk: Talk) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The demo, start to end: the JSON object, and how each new device chose.

    Leaves a finished run folder, or one with the logs of what failed, or nothing after a signal.
    """
    folder = settings.out / f"demo-{dt.datetime.now(dt.timezone.utc):%Y%m%d-%H%M%S}"
    return testbed.played(
        folder, settings.broker, talk, lambda it: _Demo(settings, it).play(), federation=stage.FEDERATION
    )


@dataclass(frozen=True)
class _Demo:
    """The pieces of one demo that every step needs."""

    settings: DemoSettings
    scene: Scene

    def play(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Every step in order."""
        coordinator = self._start_coordinator()  # compiles for a while; the rest is prepared meanwhile
        split = self._cut_data()
        workers = self.scene.start_devices(split.devices, stage.engine_of)
        tail = monitor.Tail(self.scene.folder / "metrics.jsonl")
        events = self.scene.follow(tail, "bundle", doing="compiling the training program", words=_words)
        memory = {child.name.removeprefix("devices-"): _resident_mb(child) for child in workers}
        self.scene.children.leave(workers)
        new = self._new_devices(split, events)
        events += tail.new()
        self.scene.children.leave([coordinator])
        result = self._tell(split, events, new, memory)
        demo_result.insist_on_choices(new)
        return result, new

    def _cut_data(self) -> Split:
        self.scene.talk.busy("reading the digits")
        from emulator.data.fleet_split import digits_fleet

        s = self.settings
        split = digits_fleet(s.devices, s.new_devices, s.groups, s.seed)
        np.savez(self.scene.work / stage.REFERENCE, x=split.reference)
        samples = sum(len(local.train) for local in split.devices.values())
        self.scene.talk.say(
            f"{samples} digits for {s.devices} devices; {s.groups} groups write their labels differently"
        )
        return split

    def _start_coordinator(self) -> Child:
        return self.scene.start_coordinator(
            devices=self.settings.devices,
            runs=stage.demo_runs(self.settings.rounds),
            seed=self.settings.seed,
            dashboard="0",  # any free port of this machine's loopback
        )

    def _new_devices(self, split: Split, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Three devices that never trained: each picks its nearest center, downloads its file, runs it."""
        self.scene.talk.busy("three new devices look for their center")
        started = []
        for i, (cid, local) in enumerate(sorted(split.new_devices.items())):
            engine, form = stage.chooser_of(i)
            files = self.scene.write_device("new", cid, local, engine=engine)
            out = self.scene.work / "new" / f"{cid}.json"
            arguments = ("-m", "edge_client.cli", "nearest", "--config", str(files.config), "--format", form, "--json")
            started.append((cid, form, out, self.scene.children.python(cid, *arguments, stdout=out)))
        group_of = demo_result.group_of_center(events, stage.FESEM["method"], split.groups)
        found = []
        for cid, form, out, child in started:
            self._wait(child, may_leave=[c for *_, c in started])
            answer = json.loads(out.read_text(encoding="utf-8"))
            found.append(demo_result.judged(cid, form, answer, group=split.groups[cid], group_of=group_of))
            self.scene.talk.say(demo_result.choice_in_words(found[-1]))
        return found

    def _wait(self, child: Child, *, may_leave: Sequence[Child]) -> None:
        """Until a new device has left in good order."""
        began = time.monotonic()
        while child.process.poll() is None:
            self.scene.children.check(may_leave=may_leave)
            if time.monotonic() - began > SILENCE_S:
                raise NetworkError(f"{child.name} found no center within {SILENCE_S:.0f} s", hint=LOGS_HINT)
            self.scene.talk.busy(f"{child.name} looks for its center")
            time.sleep(POLL_S)
        self.scene.children.leave([child])

    def _tell(
        self,
        split: Split,
        events: Sequence[Mapping[str, Any]],
        new: list[dict[str, Any]],
        memory: Mapping[str, float],
    ) -> dict[str, Any]:
        """The JSON object, summary.json and report.html."""
        self.scene.talk.busy("drawing the report")
        engines = {e["device"]: e["engine"] for e in events if e["event"] == "joined" and e["device"] in split.devices}
        result = demo_result.result(self.scene.folder, events, groups=split.groups, engines=engines, new=new)
        result |= {"seconds": round(self.scene.talk.elapsed_s, 1), "run": str(self.scene.folder)}
        summary = {
            "result": result,
            "method": stage.FESEM["method"],
            "baseline": stage.FEDAVG["method"],
            "groups": {d: g for d, g in split.groups.items() if d in split.devices},
            "engines": engines,
            "memory_mb": dict(memory),
            "new_devices": new,
            "points": demo_result.points(self.scene.folder, stage.FESEM["method"]),
            "command": _command(self.settings),
            "versions": _versions(),
        }
        (self.scene.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        write_report(self.scene.folder)
        self.scene.talk.say(f"report: {self.scene.folder / 'report.html'}")
        return result


def _words(events: Sequence[Mapping[str, Any]]) -> str:
    """What is said of the last of these: of the clustered run's end, whether its assignment had settled."""
    if said := monitor.in_words(events[-1]):
        return said
    method = stage.FESEM["method"]
    if (events[-1]["event"], events[-1].get("run")) != ("run-done", method):
        return ""
    return monitor.stability([event["assignment"] for event in rounds_of(events, method)])


def _command(settings: DemoSettings) -> str:
    """What gives the same numbers again."""
    words = ["fedcenters-emulator", "demo", "--seed", str(settings.seed), "--rounds", str(settings.rounds)]
    return shlex.join([*words, *(["--broker", settings.broker] if settings.broker != "auto" else [])])


def _resident_mb(child: Child) -> float:
    """Memory of a running child, in MB of 10^6 bytes."""
    import psutil

    resident: int = psutil.Process(child.process.pid).memory_info().rss
    return round(resident / 1e6, 1)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
