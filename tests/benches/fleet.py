"""`python -m tests.benches.fleet`: memory and time of whole fleets over mosquitto; `make bench-fleet`.

    uploads   1,000 devices, each sends and fetches 1.15 MB: the coordinator above idle, and mosquitto's peak
    many      5,000 devices, each a small task: who is connected, who has answered, how long it took
    crowd     20,000 devices in three processes, as above, until all have trained; the broker needs as many open files

The coordinator, the broker and the fleet are the real programs in processes of their own. The training program is
compiled before, by another process, so that idle is a coordinator without torch. Devices keep their state in memory
(/dev/shm), the coordinator its run in --folder. Memory is resident memory, looked at every 50 ms; `cpu_s` is the
processor time of each. Progress goes to stderr, figures to stdout; nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from coordinator.local_broker import start_broker, terminate_process
from coordinator.storage.status import read_status
from edge_client.errors import UsageError
from emulator.console import ConsoleProgress
from emulator.stop_signals import DeferredSignals
from emulator.testbed.processes import ChildProcess, ChildProcesses
from emulator.testbed.testbed_files import write_toml

if TYPE_CHECKING:
    from coordinator.models.registry import ModelEntry

LOOK_S = 0.05
COMPILE = """
import sys
from contextlib import closing
from pathlib import Path
from coordinator.artifacts.signed_program import prepare_program
from coordinator.config import read_config
from coordinator.identity.signing_key import open_signing_key
from coordinator.storage.run_reader import STORE_FOLDER
from coordinator.storage.store import Store
config = read_config(Path(sys.argv[1]))
config.folder.mkdir()
with closing(Store(config.folder / STORE_FOLDER)) as store:
    prepare_program(config, store, open_signing_key(config.signing_key_folder), config.model.engines)
"""
MB = 10**6
SPARE_FILES = 100  # of the broker, beside one for each device
EXCHANGES = ("training", "testing")  # of a round of FedAvg
BENCHES: dict[str, dict[str, Any]] = {
    "uploads": {"devices": 1_000, "model": "tests.benches.fleet:wide", "workers": 1},
    "many": {"devices": 5_000, "model": "digits-mlp", "workers": 1},
    "crowd": {"devices": 20_000, "model": "digits-mlp", "workers": 3, "ends": "trained"},
}


def wide() -> ModelEntry:
    """64 inputs, 3,833 hidden units, 10 classes: 287,485 parameters, 1.15 MB as float32."""
    from torch import nn

    from coordinator.models.registry import ModelEntry

    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3_833), nn.ReLU(), nn.Linear(3_833, 10))

    return ModelEntry(make=make, input=(1, 8, 8), classes=10)


@dataclass
class Watcher:
    """Looks at the memory of processes all the time; `peaks` holds the most per name and phase, in MB."""

    pids: Mapping[str, int]
    phase: Callable[[], str]
    peaks: dict[tuple[str, str], float] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    asked: bool = False  # whether an exchange was open already

    def look(self) -> None:
        """Until `over`."""
        processes = {name: psutil.Process(pid) for name, pid in self.pids.items()}
        while not self.over.wait(LOOK_S):
            phase = self.phase()
            self.asked |= phase in EXCHANGES
            phase = phase if self.asked else "idle"
            for name, process in processes.items():
                try:
                    resident = process.memory_info().rss / MB
                except psutil.NoSuchProcess:
                    continue
                self.peaks[name, phase] = max(resident, self.peaks.get((name, phase), 0.0))


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="*", default=["uploads", "many"], help=f"some of {', '.join(BENCHES)}")
    parser.add_argument("--devices", type=int, help="another number of devices")
    parser.add_argument("--workers", type=int, help="processes of the fleet")
    parser.add_argument("--broker", default="mosquitto", choices=("mosquitto", "embedded"))
    parser.add_argument("--folder", type=Path, help="where the coordinator keeps its run; else a temporary folder")
    asked = parser.parse_args()
    for name in asked.bench:
        wanted = BENCHES[name] | {k: v for k in ("devices", "workers") if (v := getattr(asked, k)) is not None}
        allow_files(wanted["devices"] + SPARE_FILES)
        folder = Path(tempfile.mkdtemp(prefix="bench-fleet-", dir=asked.folder))
        try:
            found = measured(folder, broker=asked.broker, progress=ConsoleProgress(), **wanted)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.write(json.dumps({"bench": name, **wanted, "broker": asked.broker, **found}, indent=1) + "\n")


def measured(  # noqa: PLR0913 - what a bench is made of
    folder: Path,
    *,
    devices: int,
    model: str,
    workers: int,
    broker: str,
    progress: ConsoleProgress,
    ends: str = "tested",
) -> dict[str, Any]:
    """One run of one round, with everything that is there to see. `ends`: the moment at which it is left."""
    with start_broker(folder / "broker", broker) as own, DeferredSignals() as signals:
        config = folder / "coordinator.toml"
        write_toml(config, _config(folder, own.url, devices, model))
        with ChildProcesses(folder / "logs", signals) as children:
            serve = ("-m", "coordinator", "serve", str(config))
            progress.say("compiling the program")
            subprocess.run([sys.executable, "-c", COMPILE, str(config)], check=True)
            coordinator = children.python("coordinator", *serve)
            until(lambda: phase_of(folder) == "waiting for devices" and pid_listens(coordinator), children)
            arguments = (str(config), "--devices", str(devices), "--workers", str(workers), "--json")
            began_s = time.monotonic()
            fleet = children.python("fleet", "-m", "emulator", "fleet", *arguments)
            return _watched(folder, children, coordinator, fleet, own.pid, devices, began_s, progress, ends)


def _watched(  # noqa: PLR0913, PLR0917 - the parts of a run
    folder: Path,
    children: ChildProcesses,
    coordinator: ChildProcess,
    fleet: ChildProcess,
    broker: int | None,
    devices: int,
    began_s: float,
    progress: ConsoleProgress,
    ends: str,
) -> dict[str, Any]:
    pids = {"coordinator": coordinator.process.pid} | ({} if broker is None else {"broker": broker})
    watcher = Watcher(pids, lambda: phase_of(folder))
    thread = threading.Thread(target=watcher.look, daemon=True)
    thread.start()
    moments: dict[str, dict[str, Any]] = {}
    everyone = {**pids, "fleet": fleet.process.pid}
    fleet_mb = 0.0  # the most

    def looked(name: str, done: Callable[[Mapping[str, Any]], bool]) -> None:
        nonlocal fleet_mb

        def happened() -> bool:
            nonlocal fleet_mb
            fleet_mb = max(fleet_mb, resident_mb(fleet.process.pid))
            return done(told_by(folder))  # not `read_status`, which goes through the folders of all devices

        until(happened, children)
        moments[name] = {
            "s": round(time.monotonic() - began_s, 1),
            "cpu_s": {who: round(processor_s(pid), 1) for who, pid in everyone.items()},
            "mb": {who: round(resident_mb(pid)) for who, pid in everyone.items()},
        }
        progress.say(f"{name}: {moments[name]}")

    looked("connected", lambda found: found["connected"] >= devices)
    looked("trained", lambda found: answers(found) >= devices or bool(last_round(folder)))
    if ends == "tested":
        looked("tested", lambda _: bool(last_round(folder)))
    found = read_status(folder / "run")
    terminate_process(fleet.process, timeout_s=120)  # thousands say goodbye, and their folders go
    watcher.over.set()
    thread.join()
    run = found["runs"][0]
    return {
        "moments": moments,
        "answered": len(json.loads(last_round(folder))["per_device"]) if ends == "tested" else answers(found),
        "refused": len(run["refused"]),
        "why": dict(Counter(run["refused"].values()).most_common(5)),
        "late": len(run["late"]),
        "bytes": run["bytes"],
        "coordinator_mb": {phase: round(mb) for (who, phase), mb in watcher.peaks.items() if who == "coordinator"},
        "broker_mb": {phase: round(mb) for (who, phase), mb in watcher.peaks.items() if who == "broker"},
        "fleet_mb": round(fleet_mb),
        "load": psutil.getloadavg()[1],
    }


def _config(folder: Path, broker: str, devices: int, model: str) -> dict[str, Any]:
    return {
        "federation": "bench",
        "broker": broker,
        "folder": str(folder / "run"),
        "min-devices": devices,
        "max-devices": devices,
        "start-timeout-s": 3600,
        "deadline-s": 3600,
        "below-quorum": "continue",
        "formats": [],
        "codec": "f32",
        "model": {"name": model, "engines": ["onnx"]},
        "runs": [{"method": "fedavg", "num-rounds": 1, "local-steps": 3}],
    }


def told_by(folder: Path) -> dict[str, Any]:
    """What the coordinator last said of itself."""
    try:
        left: dict[str, Any] = json.loads((folder / "run" / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"phase": "not started", "connected": 0, "exchange": None}
    return left


def phase_of(folder: Path) -> str:
    """What the coordinator says that it does; while it asks, which exchange."""
    left = told_by(folder)
    exchange = left["exchange"]
    return str(left["phase"]) if exchange is None else EXCHANGES[min(1, exchange["exchange"])]


def pid_listens(coordinator: ChildProcess) -> bool:
    """Whether this process, not the one before it, has written the status."""
    return "leading" in coordinator.log.read_text(errors="replace")


def answers(found: Mapping[str, Any]) -> int:
    """The devices of the open exchange; of a later one, all."""
    exchange = found["exchange"]
    if exchange is None:
        return 0
    return int(exchange["asked"]) if exchange["exchange"] else len(exchange["answered"])


def last_round(folder: Path) -> str:
    """The newest round in metrics.jsonl; empty before the first."""
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return ([""] + [line for line in lines if '"event":"round"' in line])[-1]


def resident_mb(pid: int) -> float:
    """Of a process and all that it started."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return float(sum(process.memory_info().rss for process in family)) / MB
    except psutil.NoSuchProcess:
        return 0.0


def processor_s(pid: int) -> float:
    """Seconds of CPU of a process and all that it started."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return float(sum(sum(process.cpu_times()[:2]) for process in family))


def allow_files(needed: int) -> None:
    """Let this process and the broker that it starts have so many open files. Raises UsageError."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(hard, needed), max(hard, needed)))
    except ValueError as refused:
        raise UsageError(
            f"the broker needs {needed} open files, a process of this machine may have {hard}",
            hint=f"raise the limit (ulimit -Hn {needed}), or pass --devices {hard - SPARE_FILES}",
        ) from refused


def until(happened: Callable[[], bool], children: ChildProcesses) -> None:
    """Wait while all processes live."""
    while not happened():
        children.check()
        time.sleep(0.5)


if __name__ == "__main__":
    main()
