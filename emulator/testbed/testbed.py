"""A run of real processes on this machine: a broker, a coordinator, devices in processes of their own, and their end.

The demo and `simulate --broker` run on it. No process is left running. A finished run leaves its folder, and a failed
run the logs of its processes; a run that a signal ended leaves what the coordinator wrote, and one that never began
nothing. A run is finished when its results are written and shown. How its processes end after that is a warning at
most.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.config import read_config
from coordinator.identity.signing_key import CURRENT_KEY_FILE, PUBLIC_KEY_FILE, open_signing_key
from coordinator.local_broker import Broker, start_broker
from edge_client.errors import NetworkError
from emulator.console import ConsoleProgress
from emulator.stop_signals import DeferredSignals
from emulator.testbed import monitor, testbed_files
from emulator.testbed.processes import LOGS_HINT, ChildProcess, ChildProcesses

if TYPE_CHECKING:
    from edge_client.data.dataset import DeviceData

SILENCE_TIMEOUT_S = 300.0  # nothing new from a coordinator for so long: give up; a small board compiles for minutes
POLL_S = 0.1
COORDINATOR_MODULE, DEVICES_MODULE = "emulator.testbed.coordinator_process", "emulator.testbed.threaded_fleet"
LEAVE_TIMEOUT_S = 15.0  # for the processes of a finished run
# made before the coordinator, whose work is not there
FIRST_FILES = frozenset({CURRENT_KEY_FILE, PUBLIC_KEY_FILE, testbed_files.REFERENCE_FILE})
Events = list[dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Testbed:
    """The parts that every step of a run uses. `work` is a folder that is deleted after the run."""

    folder: Path
    work: Path
    broker: Broker
    children: ChildProcesses
    progress: ConsoleProgress
    federation: str

    @property
    def key(self) -> str:
        return open_signing_key(self.folder).public.hex()

    def start_coordinator(self, **facts: Any) -> ChildProcess:  # noqa: ANN401 - those of testbed_files.write_coordinator
        """Write its configuration, which is checked here and now, and start it."""
        config = self.work / "coordinator.toml"
        testbed_files.write_coordinator(
            config, self.folder, broker=self.broker.url, federation=self.federation, **facts
        )
        read_config(config, environ={})
        open_signing_key(self.folder)  # made here, so that no device waits for the coordinator to make it
        return self.children.python("coordinator", "-m", COORDINATOR_MODULE, str(os.getpid()), str(config))

    def write_device(self, folder: str, cid: str, local: DeviceData, *, engine: str) -> testbed_files.DeviceFiles:
        """A device's own folder in `work`/`folder`."""
        return testbed_files.write_device(
            self.work / folder,
            cid,
            local,
            engine=engine,
            broker=self.broker.url,
            key=self.key,
            federation=self.federation,
        )

    def start_devices(self, fleet: Mapping[str, DeviceData], engine_of: Callable[[int], str]) -> list[ChildProcess]:
        """One process per engine: where ONNX Runtime trains, torch is never loaded."""
        devices = [
            self.write_device("devices", cid, local, engine=engine_of(i))
            for i, (cid, local) in enumerate(sorted(fleet.items()))
        ]
        workers = []
        for engine in dict.fromkeys(d.engine for d in devices):
            configs = [str(d.config) for d in devices if d.engine == engine]
            workers.append(self.children.python(f"devices-{engine}", "-m", DEVICES_MODULE, *configs))
        return workers

    def check(self, *, may_leave: Sequence[ChildProcess] = ()) -> None:
        """Raise if a child left by itself (`ChildProcesses.check`), or the broker: all others would wait for it."""
        if self.broker.has_ended():
            hint = "start the run again; fc.federation needs a new `with` block for it"
            raise NetworkError(f"{self.broker.kind} has ended", hint=hint)
        self.children.check(may_leave=may_leave)

    def follow(
        self,
        tail: monitor.FileTail,
        until: str,
        *,
        doing: str,
        words: Callable[[Sequence[Mapping[str, Any]]], str] = lambda events: monitor.format_milestone(events[-1]),
        silence_s: float = SILENCE_TIMEOUT_S,
    ) -> Events:
        """Tell what the coordinator writes, until the event `until`; `words` is about the last of the events so far."""
        events: Events = []
        last_s, link = time.monotonic(), ""
        while True:
            if not link and (link := monitor.dashboard_url(self.folder)):
                self.progress.say(f"watch it in a browser as long as it runs: {link}")
            for event in tail.read_new():
                events.append(event)
                last_s = time.monotonic()
                if said := words(events):
                    self.progress.say(said)
                doing = monitor.describe_next_step(events) or doing
                if event["event"] == until:
                    return events
            self.check()
            doing_now = doing
            if monitor.is_paused(self.folder):
                last_s, doing_now = time.monotonic(), "paused on the dashboard"
            elif part := monitor.part_in_work(self.folder):
                doing_now = f"{doing}; the coordinator prepares {part}"
            if time.monotonic() - last_s > silence_s:
                raise NetworkError(f"nothing from the coordinator for {silence_s:.0f} s while {doing}", hint=LOGS_HINT)
            self.progress.busy(doing_now)
            time.sleep(POLL_S)


def _federation(named: str | Callable[[str], str], folder: str, broker: Broker) -> str:
    """Another one for each run: a broker that was not started here may have runs of other folders and machines."""
    name = named if isinstance(named, str) else named(folder)
    return f"{name[:23]}-{secrets.token_hex(4)}" if broker.kind == "external" else name


def run_testbed(
    folder: Path,
    broker: str | Broker,
    progress: ConsoleProgress,
    play: Callable[[Testbed], T],
    *,
    federation: str | Callable[[str], str],
) -> T:
    """Open a testbed, `play` on it, and close it. The folder gets a number when its name is taken.

    `broker` is what `start_broker` takes, or one of the caller's, which keeps running. `federation` is a name, or gives
    that for the folder's; at a broker that was not started here it gets a random ending.
    `play` shows its results itself: they come before the end of the processes.
    """
    finished = False
    with DeferredSignals() as signals:
        folder = testbed_files.new_folder(folder.parent, folder.name)
        work = folder / ".work"
        try:
            with ChildProcesses(work / "processes", signals) as children:
                brokers = ExitStack()
                try:
                    with signals.hold():  # a signal that came meanwhile is raised here, when there is a broker to stop
                        started = (
                            brokers.enter_context(start_broker(work / "broker", broker))
                            if isinstance(broker, str)
                            else broker
                        )
                    name = _federation(federation, folder.name, started)
                    broker_name = "the broker" if started.kind == "external" else started.kind
                    progress.say(f"{broker_name} listens at {started.url}; the run is kept in {folder}")
                    result = play(
                        Testbed(
                            folder=folder,
                            work=work,
                            broker=started,
                            children=children,
                            progress=progress,
                            federation=name,
                        )
                    )
                except KeyboardInterrupt:
                    progress.say("interrupted: stopping what was started")
                    raise
                else:
                    finished = True
                    return result
                finally:
                    with signals.hold():
                        progress.busy("stopping what was started")
                        wrong = children.stop(timeout_s=LEAVE_TIMEOUT_S) if finished else children.stop()
                        brokers.close()  # after its clients
                        if finished and wrong:
                            _keep_logs(work / "processes", folder / "logs")
                            progress.say(f"warning: {'; '.join(wrong)}. The results are complete; {LOGS_HINT}")
        except KeyboardInterrupt:
            raise
        except BaseException:
            _keep_logs(work / "processes", folder / "logs")
            raise
        finally:
            with signals.hold():
                progress.close()
                shutil.rmtree(work, ignore_errors=True)
                if not _removed_unused(folder) and not finished:
                    progress.say(f"what was done is kept in {folder}; to look: fedcenters-coordinator status {folder}")


def _removed_unused(folder: Path) -> bool:
    """Remove the folder of a run in which nothing happened; whether it was one."""
    try:
        if {path.name for path in folder.iterdir()} <= FIRST_FILES:
            for name in FIRST_FILES:
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        return False
    return True


def _keep_logs(written: Path, kept: Path) -> None:
    for log in written.glob("*.log"):
        kept.mkdir(exist_ok=True)
        shutil.copy(log, kept)
