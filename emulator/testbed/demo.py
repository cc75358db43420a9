"""The whole chain once, on this machine: broker, coordinator, twelve devices over MQTT, bundle, three new devices.

Read `run` top to bottom for the story. Everything that trains, decides or serves is the real program in a process of
its own; this file only sets the stage, watches, and tells. The true groups are known here and nowhere else.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.errors import NetworkError
from emulator.console import ConsoleProgress
from emulator.reports.demo_page import round_events, write_report
from emulator.testbed import demo_result, monitor, testbed
from emulator.testbed import testbed_files as stage
from emulator.testbed.processes import LOGS_HINT, ChildProcess
from emulator.testbed.testbed import POLL_S, SILENCE_TIMEOUT_S, Testbed

if TYPE_CHECKING:
    from emulator.data.fleet_split import FleetData

Show = Callable[[dict[str, Any], list[dict[str, Any]]], None]
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


def run_demo(settings: DemoSettings, progress: ConsoleProgress, show: Show) -> None:
    """The demo, start to end; `show` is called with the JSON object, and how each new device chose.

    Leaves a finished run folder, or one with the logs of what failed, or what was done before a signal.
    """
    folder = settings.out / f"demo-{dt.datetime.now(dt.timezone.utc):%Y%m%d-%H%M%S}"
    testbed.run_testbed(
        folder,
        settings.broker,
        progress,
        lambda it: _DemoSteps(settings, it, show).play(),
        federation=stage.DEMO_FEDERATION,
    )


@dataclass(frozen=True)
class _DemoSteps:
    """The pieces of one demo that every step needs."""

    settings: DemoSettings
    testbed: Testbed
    show: Show

    def play(self) -> None:
        split = self._cut_data()
        self._start_coordinator()  # compiles for a while; the devices are prepared meanwhile
        self.testbed.progress.say("the devices start; the coordinator compiles the training program for them")
        workers = self.testbed.start_devices(split.devices, stage.engine_for)
        tail = monitor.FileTail(self.testbed.folder / "metrics.jsonl")
        events = self.testbed.follow(tail, "bundle", doing="compiling the training program", words=_words)
        memory = {child.name.removeprefix("devices-"): _resident_mb(child) for child in workers}
        self.testbed.children.ask_to_leave(workers)
        new = self._new_devices(split, events)
        events += tail.read_new()
        result = self._tell(split, events, new, memory)
        self.testbed.progress.close()
        self.show(result, new)
        demo_result.check_choices(new)

    def _cut_data(self) -> FleetData:
        self.testbed.progress.say("reading the digits")
        from emulator.data.fleet_split import digits_fleet

        s = self.settings
        split = digits_fleet(s.devices, s.new_devices, s.groups, s.seed)
        stage.write_reference(self.testbed.folder, split.reference)
        samples = sum(len(local.train) for local in split.devices.values())
        self.testbed.progress.say(
            f"{samples} digits for {s.devices} devices; {s.groups} groups write their labels differently"
        )
        return split

    def _start_coordinator(self) -> None:
        reference = self.testbed.folder.resolve() / stage.REFERENCE_FILE  # `serve` reads it again, to show the run
        self.testbed.start_coordinator(
            devices=self.settings.devices,
            runs=stage.demo_runs(self.settings.rounds),
            seed=self.settings.seed,
            dashboard="0",  # any free port of this machine's loopback
            reference=str(reference),
        )

    def _new_devices(self, split: FleetData, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Three devices that never trained: each picks its nearest center, downloads its file, runs it."""
        asked = self.settings.new_devices
        self.testbed.progress.say(
            f"{asked} new devices start; each looks for its center, downloads its file and runs it"
        )
        started = []
        for i, (cid, local) in enumerate(sorted(split.new_devices.items())):
            engine, form = stage.engine_and_format_for(i)
            files = self.testbed.write_device("new", cid, local, engine=engine)
            out = self.testbed.work / "new" / f"{cid}.json"
            arguments = ("-m", "edge_client.cli", "nearest", "--config", str(files.config), "--format", form, "--json")
            started.append((cid, form, out, self.testbed.children.python(cid, *arguments, stdout=out)))
        group_of = demo_result.group_by_center(events, stage.FESEM_RUN["method"], split.groups)
        found = []
        for cid, form, out, child in started:
            self._wait(child, may_leave=[c for *_, c in started])
            answer = json.loads(out.read_text(encoding="utf-8"))
            found.append(demo_result.judge_choice(cid, form, answer, group=split.groups[cid], group_of=group_of))
            self.testbed.progress.say(demo_result.format_choice(found[-1]))
        return found

    def _wait(self, child: ChildProcess, *, may_leave: Sequence[ChildProcess]) -> None:
        """Until a new device has left in good order."""
        began = time.monotonic()
        while child.process.poll() is None:
            self.testbed.check(may_leave=may_leave)
            if time.monotonic() - began > SILENCE_TIMEOUT_S:
                raise NetworkError(f"{child.name} found no center within {SILENCE_TIMEOUT_S:.0f} s", hint=LOGS_HINT)
            self.testbed.progress.busy(f"{child.name} looks for its center")
            time.sleep(POLL_S)
        self.testbed.check(may_leave=may_leave)

    def _tell(
        self,
        split: FleetData,
        events: Sequence[Mapping[str, Any]],
        new: list[dict[str, Any]],
        memory: Mapping[str, float],
    ) -> dict[str, Any]:
        """The JSON object, summary.json and report.html."""
        answered_s = round(self.testbed.progress.elapsed_s, 1)
        self.testbed.progress.say("drawing the report")
        engines = {e["device"]: e["engine"] for e in events if e["event"] == "joined" and e["device"] in split.devices}
        result = demo_result.demo_result(self.testbed.folder, events, groups=split.groups, engines=engines, new=new)
        result |= {"seconds": answered_s, "run": str(self.testbed.folder)}
        result |= {"parity_values": demo_result.compared_values(self.testbed.folder)}
        summary = {
            "result": result,
            "method": stage.FESEM_RUN["method"],
            "baseline": stage.FEDAVG_RUN["method"],
            "groups": {d: g for d, g in split.groups.items() if d in split.devices},
            "engines": engines,
            "memory_mb": dict(memory),
            "new_devices": new,
            "points": demo_result.update_points(self.testbed.folder, stage.FESEM_RUN["method"]),
            "command": command_again(self.settings),
            "versions": _versions(),
        }
        (self.testbed.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        write_report(self.testbed.folder)
        self.testbed.progress.say(f"report: {self.testbed.folder / 'report.html'}")
        return result


def _words(events: Sequence[Mapping[str, Any]]) -> str:
    """What is said of the last of these: of the clustered run's end, whether its assignment had settled."""
    if said := monitor.format_milestone(events[-1]):
        return said
    method = stage.FESEM_RUN["method"]
    ended = events[-1].get("run") if events[-1]["event"] == "run-done" else None
    if ended == stage.FEDAVG_RUN["method"]:
        return "training is over; exporting every center and comparing each file with torch"
    if ended != method:
        return ""
    return monitor.format_stability([event["assignment"] for event in round_events(events, method)])


def command_again(settings: DemoSettings) -> str:
    """What gives the same numbers again; with the program's folder where PATH lacks it, as after `make demo`."""
    program = Path(sys.executable).with_name("fedcenters-emulator")
    if program.is_file() and shutil.which(program.name) is None:
        name = os.path.relpath(program) if program.is_relative_to(Path.cwd()) else str(program)
    else:
        name = program.name
    words = [name, "demo", "--seed", str(settings.seed), "--rounds", str(settings.rounds)]
    return shlex.join([*words, *(["--broker", settings.broker] if settings.broker != "auto" else [])])


def _resident_mb(child: ChildProcess) -> float:
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
