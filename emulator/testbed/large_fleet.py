"""A fleet of real edge clients on one machine: `fedcenters-emulator fleet`, thousands of them in each process.

The clients run the code of `fedcenters-edge join` in one thread (event_loop.py). Clients with equal signed containers
share one open engine. Each has a draw of a data set's training samples, a folder for its state, and an id. The
coordinator's configuration has the broker and the public key. Where the broker asks for certificates, the devices are
those of `identities`, the folder that `provision` fills.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.config import CoordinatorConfig, read_config
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import broker_url
from coordinator.storage.status import read_status
from edge_client.config import ClientConfig, load_config
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.engines.base import Engine, open_engine
from edge_client.engines.golden_run import run_golden
from edge_client.errors import ConfigError, FedcentersError, UsageError
from edge_client.printable import counted
from edge_client.protocol.golden_run import Golden
from edge_client.protocol.program import Program
from edge_client.protocol.topics import Topics
from edge_client.run_cli import run_cli
from edge_client.runtime.client import Client
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import check_encrypted, parse_url
from edge_client.transport.tls import Credentials, check_subject
from emulator.data import registry
from emulator.stop_signals import DeferredSignals
from emulator.testbed.event_loop import ClientEventLoop, LoopTransport
from emulator.testbed.parent import stop_with_parent
from emulator.testbed.processes import ChildProcesses

RAM_DISK = Path("/dev/shm")  # noqa: S108 - a device syncs each step to disk; thousands of them would wait for ours
FILES_PER_DEVICE, PROCESS_FILES = 2, 200  # a socket, and a download under way; the process's own
COUNT_INTERVAL_S = 1.0
REPORT_INTERVAL_S = 5.0
DISCONNECT_TIMEOUT_S = 10.0
CHILD_POLL_S = 0.2
COUNTS_BYTES = 4_096  # the end of a file of counts, which grows by a line a second
ALWAYS_READY: Mapping[str, Any] = {"min_battery_percent": 0, "quiet_hours": ""}
COUNT_NAMES = ("connected", "computed", "acknowledged")


@dataclass(frozen=True, kw_only=True)
class FleetArgs:
    """The options of the command. Devices `first` to `first + devices` of the fleet run in this process."""

    config: Path
    devices: int
    first: int = 0
    data_set: str = "digits"
    samples: int = 40  # training samples of each device; a quarter as many to test on
    seed: int = 0
    state: Path | None = None  # where devices keep theirs; None: in memory, and removed at the end
    identities: Path | None = None  # a folder with a folder for each device: client.toml, certificate and key
    data: Path | None = None


class ClientProcess:
    """The devices of one process, whose folders are in `state`. `close` ends them."""

    def __init__(self, args: FleetArgs, state: Path) -> None:
        self._args, self._config = args, read_config(args.config)
        url = broker_url(self._config.broker)
        check_encrypted(url, insecure=False)
        _allow_files(FILES_PER_DEVICE * args.devices + PROCESS_FILES)
        self._folder = state
        self.loop = ClientEventLoop(url, jitter=random.Random(args.seed).uniform)  # noqa: S311 - spreads connections
        self.clients = self._made(url)

    def _made(self, url: str) -> list[Client]:
        args, config = self._args, self._config
        identities = _identities(args, config)
        engine = "onnx" if "onnx" in config.model.engines else config.model.engines[0]
        engines, draw = SharedEngines(), _drawn(args)
        clients = []
        for index in range(args.first, args.first + args.devices):
            who = identities(index)
            settings = replace(
                who, broker=url, data=self._folder, state=self._folder / who.device_id, engine=engine, **ALWAYS_READY
            )
            clients.append(self._client(settings, draw(index), engines, np.random.default_rng([args.seed, index])))
        return clients

    def _client(
        self, settings: ClientConfig, local: DeviceData, engines: SharedEngines, rng: np.random.Generator
    ) -> Client:
        made: list[LoopTransport] = []
        credentials = Credentials(ca=settings.ca, certificate=settings.certificate, key=settings.key)
        name = Topics(settings.federation).client_id(settings.device_id)

        def dial(will: Callable[[], Any]) -> LoopTransport:
            made.append(self.loop.transport(name, will, credentials))
            return made[-1]

        client = Client(
            settings, dial, local=local, clock=SystemClock(), rng=rng, open_engine=engines, check=engines.check
        )
        self.loop.add(client.loop(), made[0])
        return client

    def counts(self) -> dict[str, int]:
        """How many devices are connected, have computed a reply, and have it acknowledged; memory in MB."""
        results = [client.state.result for client in self.clients]
        return {
            "devices": len(self.clients),
            "connected": self.loop.connected,
            "computed": sum(result is not None for result in results),
            "acknowledged": sum(result is not None and result.status is not None for result in results),
            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 10**6,  # the most so far
        }

    def run(self, over: Callable[[], bool], tell: Callable[[Mapping[str, int]], None]) -> None:
        """Run until `over`, and report the counts every second. Raises the error that ended a device."""
        told_s = time.monotonic()
        while not over():
            self.loop.run_once()
            if time.monotonic() >= told_s + COUNT_INTERVAL_S:
                told_s = time.monotonic()
                tell(self.counts())
                for wrong in self.loop.errors():
                    raise wrong
        tell(self.counts())

    def close(self) -> None:
        self.loop.close(DISCONNECT_TIMEOUT_S)


class SharedEngines:
    """`open_engine` for the devices of one process: one open engine for each set of containers."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, frozenset[str]], Engine] = {}
        self._off: dict[int, float] = {}  # by the id of an engine, which this object keeps

    def __call__(self, name: str, program: Program, files: Mapping[str, Path], **settings: Any) -> Engine:  # noqa: ANN401
        """Open the engine, or return the open one; containers are named by their hashes."""
        key = name, program.schema.sha256, frozenset(file.name for file in files.values())
        if key not in self._open:
            self._open[key] = open_engine(name, program, files, **settings)
        return self._open[key]

    def check(self, engine: Engine, program: Program, golden: Golden) -> float:
        """The golden run of an engine, made once for all devices."""
        if id(engine) not in self._off:
            self._off[id(engine)] = run_golden(engine, program, golden)
        return self._off[id(engine)]


def _identities(args: FleetArgs, config: CoordinatorConfig) -> Callable[[int], ClientConfig]:
    """-> name, keys and certificate of the device with this number. Raises UsageError where the broker wants others."""
    url = broker_url(config.broker)
    if args.identities is None:
        if parse_url(url)[2]:
            raise UsageError(
                f"the broker at {url} asks each device for a certificate",
                hint="add --identities keys/devices, the folder that `fedcenters-coordinator provision` filled",
            )
        key = open_signing_key(config.signing_key_folder).public
        return lambda index: ClientConfig(
            federation=config.federation,
            device_id=f"device-{index:05d}",
            broker=url,
            data=Path(),
            state=Path(),
            signing_keys=(key,),
        )
    files = sorted(args.identities.glob("*/client.toml"))
    if len(files) < args.first + args.devices:
        raise UsageError(
            f"{args.identities} has {counted(len(files), 'folder')} with a client.toml; "
            f"{args.first + args.devices} devices are wanted",
            hint="name the folder keys/devices, or make more devices with `fedcenters-coordinator provision`",
        )

    def read(index: int) -> ClientConfig:
        found = load_config(files[index], {})
        if found.certificate is not None:
            check_subject(found.certificate, name=found.device_id, federation=config.federation)
        return found

    return read


def _drawn(args: FleetArgs) -> Callable[[int], DeviceData]:
    """-> the samples of the device with this number: drawn by the seed and the number, with replacement."""
    whole = registry.load_data_set(args.data_set, args.data, seed=args.seed)
    tests = max(1, args.samples // 4)

    def local(index: int) -> DeviceData:
        rng = np.random.default_rng([args.seed, index, 1])
        drawn = whole.dataset(whole.train.rows(rng.choice(len(whole.train), size=args.samples + tests)))
        return DeviceData(
            train=Dataset(drawn.x[tests:], drawn.y[tests:]), test=Dataset(drawn.x[:tests], drawn.y[:tests])
        )

    return local


def _allow_files(needed: int) -> None:
    """Raise the limit of open files to what the system allows. Raises UsageError when that is too little."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{needed} open files are needed, this process may have {hard}",
            hint=f"raise the limit (ulimit -Hn {needed}), share the devices among --workers, or run fewer",
        )


# -- the command: as many processes as wanted, watched by one


def run_fleet(args: FleetArgs, *, workers: int, until_done: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the fleet in child processes until a signal, or until the coordinator is done; -> the counts in total."""
    config, began_s = read_config(args.config), time.monotonic()
    _identities(args, config)  # what is wrong with them is told before a process starts
    ram = RAM_DISK if RAM_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fedcenters-fleet-", dir=ram) as scratch, DeferredSignals() as signals:
        logs = Path(scratch) / "logs"
        logs.mkdir()
        state = args.state or Path(scratch) / "state"
        with _without_logs(), ChildProcesses(logs, signals) as children:
            shares = np.array_split(np.arange(args.devices), workers)
            said = []
            for number, share in enumerate(part for part in shares if len(part)):
                mine = replace(args, first=args.first + int(share[0]), devices=len(share), state=state)
                said.append(logs / f"counts-{number}")
                arguments = ("-m", "emulator.testbed.large_fleet", json.dumps(asdict(mine), default=str))
                children.python(f"fleet-{number}", *arguments, stdout=said[-1])
            say(
                f"{args.devices} devices in {len(said)} processes join {config.federation} "
                f"at {broker_url(config.broker)}"
            )
            _watch(children, said, lambda: until_done and _done(config), say)
            children.wait_for_exit(children.running)
        counts = [_last(path) for path in said]
    total = {name: sum(count.get(name, 0) for count in counts) for name in counts[0] if name != "reason"}
    return {**total, "processes": len(said), "seconds": round(time.monotonic() - began_s, 1)}


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """An error of a child names a folder of logs, which goes with this command; its last words are in the message."""
    try:
        yield
    except FedcentersError as wrong:
        raise type(wrong)(wrong.message, hint="all devices of this command have left; start it again") from wrong


def _watch(
    children: ChildProcesses, said: Sequence[Path], over: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Until `over` and each process has told its counts: one that still starts would end with an error."""
    before, told_s = "", time.monotonic()
    counts: list[dict[str, Any]] = []
    while not (counts and all(counts) and over()):
        children.check()
        time.sleep(CHILD_POLL_S)
        counts = [_last(path) for path in said]
        words = ", ".join(f"{sum(c.get(name, 0) for c in counts)} {name}" for name in COUNT_NAMES)
        if reason := next((c["reason"] for c in counts if c.get("reason")), ""):
            words += f"; the last connection failed: {reason}"
        if words != before and time.monotonic() >= told_s + REPORT_INTERVAL_S:
            before, told_s = words, time.monotonic()
            say(words)


def _done(config: CoordinatorConfig) -> bool:
    try:
        found = read_status(config.folder)
    except ConfigError:  # it has not started yet
        return False
    return bool(found["done"])


def _last(path: Path) -> dict[str, Any]:
    """The newest counts of a process, and why its last connection failed; empty before its first report."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - COUNTS_BYTES))
        whole = file.read().rpartition(b"\n")[0]
    return dict(json.loads(whole.rpartition(b"\n")[2])) if whole else {}


def main(arguments: Sequence[str]) -> int:
    """One process of the fleet: `python -m emulator.testbed.large_fleet ARGS`, the arguments as one JSON object."""
    raw = json.loads(arguments[0])
    paths = {name: raw[name] and Path(raw[name]) for name in ("config", "state", "data", "identities")}
    threading.Thread(target=stop_with_parent, args=(os.getppid(),), name="parent", daemon=True).start()
    args = FleetArgs(**raw | paths)
    return run_cli(lambda: _live(args, Path(raw["state"])))


def _live(args: FleetArgs, state: Path) -> int:
    came: list[int] = []  # signals; no Event, whose lock a second signal in its `set` would wait for
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: came.append(n))
    mine = ClientProcess(args, state)

    def tell(counts: Mapping[str, int]) -> None:
        print(json.dumps({**counts, "reason": mine.loop.reason}), flush=True)  # noqa: T201 - data for the parent

    try:
        mine.run(lambda: bool(came), tell)
    finally:
        mine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
