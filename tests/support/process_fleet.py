"""A small fleet of real processes in a folder: one coordinator, and devices in worker processes that train with ONNX.

Waiting for real processes means looking again and again; that happens here, in `until`, and in no test.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from coordinator.identity.signing_key import open_signing_key
from coordinator.models.registry import build_model
from coordinator.storage.store import Store
from edge_client.protocol.task import Array
from emulator.data.fleet_split import digits_fleet
from emulator.stop_signals import DeferredSignals
from emulator.testbed import testbed_files as stage
from emulator.testbed.monitor import FileTail
from emulator.testbed.processes import ChildProcess, ChildProcesses
from export.compiler.program import vector_of
from tests.support.patience import patience
from tests.support.programs import compiled
from tests.support.virtual_federation import put_program

PATIENCE_S = patience(200.0)
SEED, DEVICES, ROUNDS = 7, 6, 10
SETTINGS: Mapping[str, Any] = {"clusters": 3, "local-steps": 10}
RUN: Mapping[str, Any] = {**SETTINGS, "method": "fesem", "num-rounds": ROUNDS}


def until(found: Callable[[], bool], children: ChildProcesses, what: str, *, patience_s: float | None = None) -> None:
    """Return once `found`. Raises when a child fails, or when it takes longer than `patience_s` (PATIENCE_S)."""
    deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
    while not found():
        children.check()
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


@dataclass
class FleetScene:
    """`folder` is the coordinator's; its events so far are in `events`."""

    folder: Path
    broker: str
    children: ChildProcesses
    runs: Sequence[Mapping[str, Any]] = (RUN,)
    options: Sequence[str] = ()  # of `serve`
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work = self.folder.with_name(self.folder.name + "-work")
        self.work.mkdir(parents=True, exist_ok=True)
        self._tail = FileTail(self.folder / "metrics.jsonl")

    def start_coordinator(self, *, engines: tuple[str, ...] = ("onnx",), **more: Any) -> ChildProcess:  # noqa: ANN401 - TOML values
        """Start it, or start it again. It finds its program compiled; `more` are keys of its file, or replace them."""
        config = self.work / "coordinator.toml"
        if not config.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            facts: dict[str, Any] = {"broker": self.broker, "devices": DEVICES, "runs": self.runs, "seed": SEED}
            stage.write_coordinator(config, self.folder, engines=engines, **(facts | more))
            made = compiled(stage.DEMO_MODEL, engines=engines)
            initial = vector_of(build_model(stage.DEMO_MODEL, seed=SEED).module, made.program.schema)
            with closing(Store(self.folder / "store")) as store:
                put_program(store, made.program, made.files.values(), initial)
        return self.children.python("coordinator", "-m", "coordinator", "serve", str(config), *self.options)

    def start_devices(self, workers: int) -> list[ChildProcess]:
        """All devices, dealt to `workers` processes."""
        split = digits_fleet(DEVICES, groups=3, seed=SEED)
        stage.write_reference(self.work, split.reference)
        key = open_signing_key(self.folder).public.hex()
        configs = [
            str(stage.write_device(self.work, cid, local, engine="onnx", broker=self.broker, key=key).config)
            for cid, local in sorted(split.devices.items())
        ]
        return [
            self.children.python(f"worker-{i}", "-m", "emulator.testbed.threaded_fleet", *configs[i::workers])
            for i in range(workers)
        ]

    def wait_for(self, kind: str, count: int = 1, *, patience_s: float | None = None) -> list[dict[str, Any]]:
        """The events of a kind, once there are `count` of them; `patience_s` as for `until`."""

        def enough() -> bool:
            self.events += self._tail.read_new()
            return len(self.of(kind)) >= count

        until(enough, self.children, f"{count} events {kind!r} in {self.folder}", patience_s=patience_s)
        return self.of(kind)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind so far."""
        return [event for event in self.events if event["event"] == kind]

    def replies_of_the_open_exchange(self) -> int:
        """How many replies are stored of the exchange that is not closed yet; -1 when none is open."""
        query = (
            "select count(r.cid) from exchanges e left join replies r using (run, round, exchange)"
            " where e.closed = 0 group by e.run, e.round, e.exchange"
        )
        store = sqlite3.connect(f"file:{self.folder / 'store' / 'coordinator.sqlite'}?mode=ro", uri=True)
        try:
            rows = store.execute(query).fetchall()
        finally:
            store.close()
        return int(rows[0][0]) if rows else -1

    def assignments(self) -> list[dict[str, int]]:
        """The center of each device, round by round."""
        return [event["assignment"] for event in self.of("round")]


def centers_in(folder: Path, run: str = "fesem") -> list[dict[str, Array]]:
    """The centers that a run left."""
    files = sorted((folder / "centers" / run).glob("center-*.safetensors"))
    return [load_file(file) for file in files]


def play_undisturbed(
    folder: Path,
    broker: str,
    *,
    act: Callable[[FleetScene], None] = lambda _: None,
    workers: int = 1,
    runs: Sequence[Mapping[str, Any]] = (RUN,),
) -> FleetScene:
    """An undisturbed run; `act` is called once the centers are published, before everyone leaves."""
    with DeferredSignals() as signals, ChildProcesses(folder.with_name("logs"), signals) as children:
        testbed = FleetScene(folder, broker, children, runs)
        testbed.start_coordinator()
        testbed.start_devices(workers)
        testbed.wait_for("bundle")
        act(testbed)
        children.wait_for_exit(children.running)
    return testbed


def jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
