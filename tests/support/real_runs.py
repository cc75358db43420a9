"""A case of real_cases.py over a broker: the coordinator and a real client for each device, as threads of this process.

Everything is read from files, as `serve` and `join` read it. Waiting is for events; one that does not come within
PATIENCE_S fails.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from coordinator.config import read_config
from coordinator.identity.signing_key import open_signing_key
from coordinator.models.registry import Model
from coordinator.runtime.server import Server
from coordinator.service import open_store
from coordinator.storage.run_reader import last_state, read_program
from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import batch_size, method_settings, summed_members
from edge_client.config import ClientConfig, load_config
from edge_client.nearest.over_mqtt import NearestClient, NearestOptions
from edge_client.nearest.result import NearestAnswer
from edge_client.protocol.task import ClientId
from edge_client.runtime.client import Client
from edge_client.runtime.factory import make_client, make_dialer
from edge_client.transport.clock import SystemClock
from edge_client.transport.mqtt import MqttTransport
from emulator.api.models import own_model
from emulator.api.result import Result
from emulator.data.fleet import Fleet
from emulator.data.fleet_split import FleetData
from emulator.options import SimulateArgs
from emulator.run.execute import SimulationResult
from emulator.run.load import make_fleet
from emulator.testbed import testbed_files
from emulator.testbed.simulate_over_mqtt import UNBOUNDED, keep_asked, put_own_program
from tests.support.drawn_cases import DrawnCase
from tests.support.drawn_runs import ROUNDS
from tests.support.live_federation import PATIENCE_S, soon

RUN = "mine"
OF_COORDINATOR = (
    *("codec", "evaluate_every", "fraction_evaluate", "concurrency", "buffer", "max_staleness", "over_select"),
    *("credits", "task_window", "keep_rounds", "in_flight_mib", "fraction_connected", "teach_newcomers", "formats"),
)
_numbers = itertools.count()


@dataclass
class RealRun:
    """One federation in a folder of its own. `events` are the coordinator's, `told` is what each device says."""

    case: DrawnCase
    place: Path
    url: str
    method: Strategy
    args: SimulateArgs
    split: FleetData
    model: Model
    federation: str = field(default_factory=lambda: f"pair-{next(_numbers)}")
    events: list[Mapping[str, Any]] = field(default_factory=list)
    told: dict[ClientId, list[Mapping[str, Any]]] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    clients: dict[ClientId, tuple[Client, threading.Thread]] = field(default_factory=dict)
    server: tuple[Server, threading.Thread] | None = None

    @classmethod
    def of(
        cls, case: DrawnCase, place: Path, url: str, *, method: Strategy, fleet: Fleet, module: nn.Module
    ) -> RealRun:
        """Raises ConfigError, UsageError for a combination that is refused."""
        seed, engine = case.options.get("seed", 0), case.options.get("engine", "onnx")
        asked = SimulateArgs(method=case.method, settings=method_settings(method), rounds=ROUNDS, seed=seed)
        model = own_model(module, fleet.cut(seed), loss=None, seed=seed, members=summed_members(case.method))
        args, split = make_fleet(replace(asked, engine=engine, model=model.name), fleet)
        return cls(case, place, url, method, args, split, model)

    @property
    def folder(self) -> Path:
        return self.place / "run"

    @property
    def names(self) -> list[ClientId]:
        return sorted(self.split.devices)

    def play(self) -> NearestAnswer | None:
        """The whole run; -> what a new device with the first device's samples finds, where there is a bundle."""
        event, late = self.case.options.get("event", ""), self.case.options.get("event") == "late"
        self._write(len(self.names) - late)
        with self._leaving():
            self._serve()
            for cid in self.names[: len(self.names) - late]:
                self._join(cid)
            self._disturb(event)
            self._wait(lambda: self._happened("done"))
            return self._visit() if self.case.options.get("formats") else None

    def result(self) -> Result:
        """As `fc.federation` makes it of the coordinator's folder."""
        events = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        records = [event for event in events if event["event"] == "round"]
        keep_asked(self.folder, self.args, self.method, self.split)
        state, start = last_state(self.folder, RUN)
        state = replace(state, assignment=state.assignment or records[-1]["assignment"])
        seconds = [record["seconds"] for record in records]
        schema = read_program(self.folder).schema
        run = SimulationResult(
            records=records, real_seconds=seconds, state=state, schema=schema, virtual_seconds=sum(seconds)
        )
        facts: dict[str, Any] = {"method": self.method, "args": self.args, "split": self.split, "own_model": self.model}
        return Result(run=run, start=start, folder=self.folder, **facts)

    def _write(self, devices: int) -> None:
        """The coordinator's file, and its program in its store."""
        engines, batch = sorted({self.args.engine, "pt2"}), self.case.options.get("program_batch")
        batch = batch_size(self.method) if batch is None else batch
        facts: dict[str, Any] = {"formats": [], "deadline_s": PATIENCE_S, "max_samples_ratio": UNBOUNDED}
        facts |= {key: self.case.options[key] for key in OF_COORDINATOR if key in self.case.options}
        testbed_files.write_coordinator(
            self.place / "coordinator.toml",
            self.folder,
            broker=self.url,
            federation=self.federation,
            devices=devices,
            runs=[{**method_settings(self.method), "method": self.case.method, "num-rounds": ROUNDS, "name": RUN}],
            seed=self.args.seed,
            engines=engines,
            model={"name": self.model.name, "batch-size": batch, "engines": engines},
            **facts,
        )
        testbed_files.write_reference(self.place, self.split.devices[self.names[0]].train.x[:8])
        self.folder.mkdir()
        put_own_program(self.folder, self.model, engines, batch=batch, tell=lambda _: None)

    def _disturb(self, event: str) -> None:
        first = self.names[0]
        if event in ("restart", "early restart"):
            self._wait(lambda: self._happened("round") if event == "restart" else bool(self.told.get(first)))
            self._end_server()
            self._serve()
        if event == "away":
            self._wait(lambda: self._happened("round"))
            self._leave(first)
            self._join(first)
        if event == "replaced":  # a client of its name cuts each device off for a moment
            self._wait(lambda: self._happened("round"))
            for cid in self.names:
                other = MqttTransport(self.url, f"{self.federation}.{cid}", jitter=soon)
                other.connect()
                other.receive(PATIENCE_S)
                other.close()
        if event == "late":
            self._wait(lambda: self._happened("round"))
            self._join(self.names[-1])

    def _serve(self) -> None:
        config = read_config(self.place / "coordinator.toml", environ={})
        store, name = open_store(config), f"{self.federation}.coordinator.0"

        def life() -> None:
            try:
                server.run()
            finally:
                store.close()

        server = Server(
            config,
            store,
            dial=lambda will: MqttTransport(self.url, name, will=will, jitter=soon),
            clock=SystemClock(),
            watch=self._hear,
            beside=True,
        )
        self.server = server, self._begin(name, life)

    def _join(self, cid: ClientId) -> None:
        client = make_client(self._config("devices", cid), tell=lambda event: self._hear(event, cid))
        self.clients[cid] = client, self._begin(cid, client.run)

    def _config(self, folder: str, cid: ClientId) -> ClientConfig:
        """Of a device with the samples of `cid`, or of the first."""
        if not (self.place / folder / cid).exists():
            key, local = open_signing_key(self.folder).public.hex(), self.split.devices.get(cid)
            facts = {"engine": self.args.engine, "broker": self.url, "key": key, "federation": self.federation}
            mine = self.split.devices[self.names[0]] if local is None else local
            testbed_files.write_device(self.place / folder, cid, mine, **facts)
        return load_config(self.place / folder / cid / "config.toml", {})

    def _visit(self) -> NearestAnswer:
        """A device that never trained, with the samples of the first."""
        config = self._config("new", "new")
        parts: dict[str, Any] = {"dial": make_dialer(config), "local": self.split.devices[self.names[0]]}
        choice = NearestOptions(file_format="onnx")
        return NearestClient(
            config=config, clock=SystemClock(), rng=np.random.default_rng(0), choice=choice, **parts
        ).run()

    def _begin(self, name: str, life: Callable[[], object]) -> threading.Thread:
        def guarded() -> None:
            try:
                life()
            except BaseException as wrong:  # noqa: BLE001 - raised again by `_wait`
                with self.changed:
                    self.failures.append(wrong)
                    self.changed.notify_all()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _hear(self, event: Mapping[str, Any], cid: ClientId | None = None) -> None:
        with self.changed:
            (self.events if cid is None else self.told.setdefault(cid, [])).append(dict(event))
            self.changed.notify_all()

    def _happened(self, event: str) -> bool:
        return any(known["event"] == event for known in self.events)

    def _wait(self, found: Callable[[], bool]) -> None:
        with self.changed:
            came = self.changed.wait_for(lambda: bool(self.failures) or found(), PATIENCE_S)
        if self.failures:
            raise self.failures[0]
        if not came:
            raise TimeoutError(f"of the coordinator {self.events[-3:]}, of the devices {self.told}")

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """All leave in the end, the coordinator last. Raises what ended one of them."""
        try:
            yield
        finally:
            for cid in list(self.clients):
                self._leave(cid)
            self._end_server()
        if self.failures:
            raise self.failures[0]

    def _leave(self, cid: ClientId) -> None:
        client, thread = self.clients.pop(cid)
        client.stop()
        _join_thread(thread)

    def _end_server(self) -> None:
        if self.server is not None:
            server, thread = self.server
            self.server = None
            server.stop()
            _join_thread(thread)


def _join_thread(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    if thread.is_alive():
        raise TimeoutError(f"{thread.name} does not leave")
