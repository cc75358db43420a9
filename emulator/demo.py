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
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.broker import Broker, start_broker
from edge_client.errors import NetworkError
from emulator import outcome, stage, watch
from emulator.processes import LOGS_HINT, Child, Children, Signals
from emulator.report import rounds_of, write_report
from emulator.talk import Talk

if TYPE_CHECKING:
    from emulator.partitions import Split

SILENCE_S = 300.0  # nothing new from a living coordinator for so long: give up; a small board compiles for minutes
POLL_S = 0.1
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
    began = dt.datetime.now(dt.timezone.utc)
    with Signals() as signals:
        folder = stage.new_folder(settings.out, f"demo-{began:%Y%m%d-%H%M%S}")
        work = folder / ".work"  # what only the run needs
        try:
            with Children(work / "processes", signals) as children:
                with signals.held():
                    broker = start_broker(work / "broker", settings.broker)
                try:
                    return _Demo(settings, talk, folder, work, broker, children).play()
                finally:
                    with signals.held():
                        talk.busy("stopping what was started")
                        children.stop()  # before their broker
                        broker.stop()
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except BaseException:
            _keep_logs(work / "processes", folder / "logs")
            raise
        finally:
            with signals.held():
                talk.close()
                shutil.rmtree(work, ignore_errors=True)
                with contextlib.suppress(OSError):
                    folder.rmdir()  # nothing happened in it


def _keep_logs(written: Path, kept: Path) -> None:
    for log in written.glob("*.log"):
        kept.mkdir(exist_ok=True)
        shutil.copy(log, kept)


@dataclass(frozen=True)
class _Demo:
    """The pieces of one demo that every step needs."""

    settings: DemoSettings
    talk: Talk
    folder: Path
    work: Path
    broker: Broker
    children: Children

    def play(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Every step in order."""
        self.talk.say(f"{self.broker.kind} listens at {self.broker.url}; the run is kept in {self.folder}")
        key = self._signing_key()
        coordinator = self._start_coordinator()  # compiles for a while; the rest is prepared meanwhile
        split = self._cut_data()
        workers = self._start_devices(split, key)
        tail = watch.Tail(self.folder / "metrics.jsonl")
        events = self._follow(tail, "bundle", doing="compiling the training program")
        memory = {child.name.removeprefix("devices-"): _resident_mb(child) for child in workers}
        self.children.leave(workers)
        new = self._new_devices(split, key, events)
        events += tail.new()
        self.children.leave([coordinator])
        result = self._tell(split, events, new, memory)
        outcome.insist_on_choices(new)
        return result, new

    def _signing_key(self) -> str:
        """The public key that devices pin; made here so that nobody waits for the coordinator."""
        from coordinator.security import open_key

        return open_key(self.folder).public.hex()

    def _cut_data(self) -> Split:
        self.talk.busy("reading the digits")
        from emulator.partitions import digits_fleet

        s = self.settings
        split = digits_fleet(s.devices, s.new_devices, s.groups, s.seed)
        np.savez(self.work / stage.REFERENCE, x=split.reference)
        samples = sum(len(local.train) for local in split.devices.values())
        self.talk.say(f"{samples} digits for {s.devices} devices; {s.groups} groups write their labels differently")
        return split

    def _start_coordinator(self) -> Child:
        config = self.work / "coordinator.toml"
        stage.write_coordinator(
            config,
            self.folder,
            broker=self.broker.url,
            devices=self.settings.devices,
            runs=stage.demo_runs(self.settings.rounds),
            seed=self.settings.seed,
            dashboard="0",  # any free port of this machine's loopback
        )
        return self.children.python("coordinator", "-m", "coordinator.cli", "serve", str(config))

    def _start_devices(self, split: Split, key: str) -> list[Child]:
        """One worker process per engine: an ONNX worker must never load torch."""
        devices = [
            stage.write_device(
                self.work / "devices", cid, local, engine=stage.engine_of(i), broker=self.broker.url, key=key
            )
            for i, (cid, local) in enumerate(sorted(split.devices.items()))
        ]
        workers = []
        for engine in dict.fromkeys(d.engine for d in devices):
            configs = [str(d.config) for d in devices if d.engine == engine]
            workers.append(self.children.python(f"devices-{engine}", "-m", "emulator.fleet", *configs))
        return workers

    def _follow(self, tail: watch.Tail, until: str, *, doing: str) -> list[dict[str, Any]]:
        """Tell what the coordinator writes, until the event `until`."""
        events: list[dict[str, Any]] = []
        last_s, link = time.monotonic(), ""
        while True:
            if not link and (link := watch.dashboard(self.folder)):
                self.talk.say(f"watch it in a browser as long as it runs: {link}")
            for event in tail.new():
                events.append(event)
                last_s = time.monotonic()
                if words := watch.in_words(event) or _stability(events):
                    self.talk.say(words)
                doing = watch.next_step(event) or doing
                if event["event"] == until:
                    return events
            self.children.check()
            doing_now = doing
            if watch.paused(self.folder):
                last_s, doing_now = time.monotonic(), "paused on the dashboard"
            if time.monotonic() - last_s > SILENCE_S:
                raise NetworkError(f"nothing from the coordinator for {SILENCE_S:.0f} s while {doing}", hint=LOGS_HINT)
            self.talk.busy(doing_now)
            time.sleep(POLL_S)

    def _new_devices(self, split: Split, key: str, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Three devices that never trained: each picks its nearest center, downloads its file, runs it."""
        self.talk.busy("three new devices look for their center")
        started = []
        for i, (cid, local) in enumerate(sorted(split.new_devices.items())):
            engine, form = stage.chooser_of(i)
            files = stage.write_device(self.work / "new", cid, local, engine=engine, broker=self.broker.url, key=key)
            out = self.work / "new" / f"{cid}.json"
            arguments = ("-m", "edge_client.cli", "nearest", "--config", str(files.config), "--format", form, "--json")
            started.append((cid, form, out, self.children.python(cid, *arguments, stdout=out)))
        group_of = outcome.group_of_center(events, stage.FESEM["method"], split.groups)
        found = []
        for cid, form, out, child in started:
            self._wait(child, may_leave=[c for *_, c in started])
            answer = json.loads(out.read_text(encoding="utf-8"))
            found.append(outcome.judged(cid, form, answer, group=split.groups[cid], group_of=group_of))
            self.talk.say(outcome.choice_in_words(found[-1]))
        return found

    def _wait(self, child: Child, *, may_leave: Sequence[Child]) -> None:
        """Until a new device has left in good order."""
        began = time.monotonic()
        while child.process.poll() is None:
            self.children.check(may_leave=may_leave)
            if time.monotonic() - began > SILENCE_S:
                raise NetworkError(f"{child.name} found no center within {SILENCE_S:.0f} s", hint=LOGS_HINT)
            self.talk.busy(f"{child.name} looks for its center")
            time.sleep(POLL_S)
        self.children.leave([child])

    def _tell(
        self,
        split: Split,
        events: Sequence[Mapping[str, Any]],
        new: list[dict[str, Any]],
        memory: Mapping[str, float],
    ) -> dict[str, Any]:
        """The JSON object, summary.json and report.html."""
        self.talk.busy("drawing the report")
        engines = {e["device"]: e["engine"] for e in events if e["event"] == "joined" and e["device"] in split.devices}
        result = outcome.result(self.folder, events, groups=split.groups, engines=engines, new=new)
        result |= {"seconds": round(self.talk.elapsed_s, 1), "run": str(self.folder)}
        summary = {
            "result": result,
            "method": stage.FESEM["method"],
            "baseline": stage.FEDAVG["method"],
            "groups": {d: g for d, g in split.groups.items() if d in split.devices},
            "engines": engines,
            "memory_mb": dict(memory),
            "new_devices": new,
            "points": outcome.points(self.folder, stage.FESEM["method"]),
            "command": _command(self.settings),
            "versions": _versions(),
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        write_report(self.folder)
        self.talk.say(f"report: {self.folder / 'report.html'}")
        return result


def _stability(events: Sequence[Mapping[str, Any]]) -> str:
    """When the clustered run is over: whether its assignment had settled."""
    method = stage.FESEM["method"]
    if (events[-1]["event"], events[-1].get("run")) != ("run-done", method):
        return ""
    return watch.stability([event["assignment"] for event in rounds_of(events, method)])


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
