"""A whole federation in virtual time: the real coordinator and real devices over a broker in memory.

The coordinator can be killed at any of its waits, or, through `DoomedStore`, at any write: from that moment nothing of
it reaches the broker or the disk. A `Spy` receives every message, and can send in the name of any device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from coordinator.artifacts import signed_program
from coordinator.artifacts.signed_program import PROGRAM_FACT
from coordinator.config import CoordinatorConfig, config_from_keys
from coordinator.config_sections import ModelConfig, RunConfig
from coordinator.identity.signing_key import open_signing_key
from coordinator.runtime.exchange.current_exchange import Live
from coordinator.runtime.server import Server
from coordinator.storage import state_codec
from coordinator.storage.database import Database
from coordinator.storage.store import Store
from coordinator.strategies.base import State
from edge_client.config import ClientConfig
from edge_client.data.dataset import DeviceData
from edge_client.errors import Malformed
from edge_client.protocol import messages
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.program import Container, Program
from edge_client.protocol.task import Array, Flat, Schema, Tensors, TensorSpec
from edge_client.protocol.topics import Topics
from edge_client.runtime.client import Client
from edge_client.transport.base import Message, Transport, Will
from edge_client.transport.clock import Clock
from tests.support import softmax_program
from tests.support.memory_broker import MemoryBroker
from tests.support.virtual_time import Killed, Participant, VirtualTransport, VirtualWorld

Anything = Any  # what a test passes on by keyword
Outcome = tuple[dict[str, bytes], list[dict[str, Any]]]  # the final states, and the account of every round
FEDERATION = "test"
TOPICS = Topics(FEDERATION)
BALLAST = 4_096  # values that are not trained; they make an update too big to travel inline
BLOCK = 4_096


def stay_announced(transport: Transport, cid: str, payload: bytes) -> NoReturn:
    """Say that this device is here, and again to each new connection of the coordinator, as the protocol wants it."""
    transport.subscribe(TOPICS.coord())
    transport.publish(TOPICS.state(cid), payload, retain=True)
    link = None
    while True:
        event = transport.receive(60.0)
        if isinstance(event, Message):
            told = messages.read_message(event.payload, "coord")
            before, link = link, (told["boot"], told.get("link", 0))
            if told["online"] and not event.retained and link != before:
                transport.publish(TOPICS.state(cid), payload, retain=True)


class DoomedDatabase(Database):
    """Dies at its `fatal`-th transaction, `before` it is committed or right after. `writes` counts them."""

    def __init__(self, folder: Path, *, fatal: int, before: bool, die: Callable[[], None]) -> None:
        self.writes, self.fatal, self.before, self.die = 0, 0, before, die
        super().__init__(folder)
        self.execute("pragma synchronous = off")  # processes die here, machines do not
        self.writes, self.fatal = 0, fatal

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.writes += 1
        fatal = self.writes == self.fatal
        if fatal and self.before:
            self._die()
        with super().transaction():
            yield
        if fatal:
            self._die()

    def _die(self) -> None:
        self.die()
        self.close()
        raise Killed


class DoomedStore(Store):
    """A store in a database that dies at a given transaction."""

    database: DoomedDatabase

    def __init__(
        self, folder: Path, *, fatal: int = 0, before: bool = True, die: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(folder, DoomedDatabase(folder, fatal=fatal, before=before, die=die))


class WideEngine(softmax_program.SoftmaxEngine):
    """Softmax regression that carries ballast: parameters that no sample reads."""

    def step(self, feeds: Tensors) -> dict[str, Array]:
        out = super().step(feeds)
        return out | {"w/ballast": feeds["w/ballast"], "velocity/ballast": feeds["velocity/ballast"]}


CONTAINERS = {"step": b"steps", "evaluate": b"evaluates"}


def program(*, ballast: int = 0, buffered: bool = False, members: int = 1) -> Program:
    """The program of these worlds; its containers are a few bytes that only their hashes name."""
    plain = softmax_program.program(buffered=buffered, members=members)
    extra = (TensorSpec(name="ballast", role="p", shape=(ballast,)),) if ballast else ()
    files = {name: Container(sha256=_sha256(data), size=len(data)) for name, data in CONTAINERS.items()}
    tensors = sorted((*plain.schema.tensors, *extra), key=lambda tensor: tensor.role == "b")
    schema = Schema(tuple(tensors), plain.schema.classifier)
    return replace(plain, schema=schema, containers={"onnx": files}, batch={"onnx": "any"})


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config(folder: Path, *, rounds: int = 2, devices: int = 4, **changes: Anything) -> CoordinatorConfig:
    """Two centers for a fleet of two groups; `changes` are keys of the file, with _ for -."""
    settings = {"local-steps": 3, "clusters": 2, "restarts": 3, "batch-size": 8}
    defaults: dict[str, Any] = {
        "federation": FEDERATION,
        "broker": "memory",
        "folder": folder,
        "model": ModelConfig(name="softmax", batch_size=8, engines=("onnx",)),
        "runs": (RunConfig(method="fesem", rounds=rounds, name="fesem", settings=settings),),
        "min_devices": devices,
        "quorum": 1.0,
        "deadline_s": 300.0,
        "codec": "f32",  # loses nothing, so that runs can be compared with direct calls
        "formats": (),
        "block": BLOCK,
        "seed": 3,
    }
    given = defaults | changes
    model, runs = given.pop("model"), given.pop("runs")
    return config_from_keys({key.replace("_", "-"): given[key] for key in given}, model=model, runs=runs)


def put_program(store: Store, made: Program, files: Iterable[bytes], initial: Flat) -> None:
    """Store a program as if the coordinator had compiled it."""
    store.facts.get_or_make(PROGRAM_FACT, lambda: signed_program.put_program(store, made, files, initial))


def seed_program(store: Store, *, ballast: int = 0, buffered: bool = False, members: int = 1) -> None:
    """The program of these worlds, with its initial model."""
    made = program(ballast=ballast, buffered=buffered, members=members)
    start = np.zeros(made.schema.size, np.float32)
    plain = softmax_program.start_of(buffered=buffered, members=members)
    params = made.schema.n_params - ballast
    start[:params] = plain[:params]
    start[made.schema.n_params :] = plain[params:]
    put_program(store, made, CONTAINERS.values(), start)


@dataclass
class Federation:
    """A world with a coordinator and devices, and handles on both."""

    world: VirtualWorld
    config: CoordinatorConfig
    ballast: int = 0
    buffered: bool = False
    members: int = 1
    insist: str = "off"  # `secure` of the devices' client.toml
    server: Server | None = None
    store: DoomedStore | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    progress: list[dict[str, Any]] = field(default_factory=list)
    told: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # what each device says to its owner
    open_since_s: float | None = None
    clocks: dict[str, Clock] = field(default_factory=dict)  # of processes whose clocks are not the world's

    @classmethod
    def of(
        cls,
        folder: Path,
        *,
        broker: MemoryBroker | None = None,
        ballast: int = 0,
        buffered: bool = False,
        members: int = 1,
        **changes: Anything,
    ) -> Federation:
        return cls(VirtualWorld(folder, broker=broker), config(folder / "run", **changes), ballast, buffered, members)

    def start_coordinator(self, *, fatal: int = 0, before: bool = True, name: str = "coordinator.0") -> Participant:
        """One coordinator process; `fatal` counts the store's writes from this start."""
        self.server, self.open_since_s = None, None

        with closing(Store(self.config.folder / "store")) as fresh:
            seed_program(fresh, ballast=self.ballast, buffered=self.buffered, members=self.members)

        def life(me: Participant) -> None:
            store = DoomedStore(self.config.folder / "store", fatal=fatal, before=before, die=me.vanish)
            store.database.writes = 0
            self.store = store

            def dial(will: Will | None) -> Transport:
                return VirtualTransport(me, self.world.broker, f"{FEDERATION}.{name}", will)

            with closing(store):
                clock, watch = self.clocks.get(name, self.world.clock), self._watch
                heard = lambda event: self.progress.append(dict(event))  # noqa: E731 - used once
                self.server = Server(self.config, store, dial=dial, clock=clock, watch=watch, progress=heard)
                self.server.run()

        return self.world.begin(name, life)

    def start(self, devices: int | None = None, *, fatal: int = 0, before: bool = True) -> Participant:
        """The coordinator, which is returned, and `devices` of them; by default as many as it waits for."""
        coordinator = self.start_coordinator(fatal=fatal, before=before)
        self.start_devices(self.config.fleet.min_devices if devices is None else devices)
        return coordinator

    def _watch(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))

    def start_devices(self, count: int = 4, *, groups: int = 2) -> None:
        """Devices d00, d01, ... with data of alternating groups."""
        for cid, local in softmax_program.grouped_fleet(count, groups).items():
            self.start_device(cid, local)

    def start_device(self, cid: str, local: DeviceData) -> Participant:
        """One device process; starting it again continues with its state folder."""
        key = open_signing_key(self.config.folder).public
        folder = self.world.folder / cid
        settings = ClientConfig(
            federation=FEDERATION,
            device_id=cid,
            broker="memory",
            data=folder / "data",
            state=folder / "state",
            signing_keys=(key,),
            min_battery_percent=0,
            secure=self.insist,
        )

        def life(me: Participant) -> None:
            def dial(will: Callable[[], Will]) -> Transport:
                return VirtualTransport(me, self.world.broker, f"{FEDERATION}.{cid}", will)

            def open_engine(*_: object, **__: object) -> softmax_program.SoftmaxEngine:
                return WideEngine() if self.ballast else softmax_program.SoftmaxEngine()

            rng = np.random.default_rng(int(cid[1:]))
            told = self.told.setdefault(cid, [])
            more: dict[str, Any] = {"open_engine": open_engine, "tell": lambda event: told.append(dict(event))}
            clock = self.clocks.get(cid, self.world.clock)
            Client(settings, dial, local=local, clock=clock, rng=rng, **more).run()

        return self.world.begin(cid, life)

    def start_mute_device(self, cid: str, *, n: int = 40, **more: Any) -> Participant:  # noqa: ANN401 - of caps
        """A device that announces itself, again to each new connection of the coordinator, and sends nothing else.

        `more` are capabilities in its announcement.
        """

        def life(me: Participant) -> None:
            transport = VirtualTransport(me, self.world.broker, f"{FEDERATION}.{cid}", None)
            transport.connect()
            payload = messages.write_message(
                "st", ident="mute", t_ms=0, s="on", bd=1, caps={"engine": "onnx", "n": n, **more}
            )
            stay_announced(transport, cid, payload)

        return self.world.begin(cid, life)

    @property
    def live(self) -> Live | None:
        """The coordinator's open exchange."""
        session = None if self.server is None else self.server.session
        return None if session is None else session.dispatcher.exchange.live

    @property
    def catalog(self) -> Catalog | None:
        """What the coordinator has published."""
        session = None if self.server is None else self.server.session
        return None if session is None else session.dispatcher.catalog.catalog

    def live_since(self, seconds: float) -> bool:
        """Whether the open exchange was first seen this many seconds ago."""
        if self.open_since_s is None and self.live is not None:
            self.open_since_s = self.world.clock.time_s
        return self.open_since_s is not None and self.world.clock.time_s >= self.open_since_s + seconds

    def happened(self, event: str) -> bool:
        """Whether this process or an earlier one logged such an event."""
        return any(known["event"] == event for known in self.events)

    def final_states(self) -> dict[str, bytes]:
        """The last state of every run, as stored."""
        store = Store(self.config.folder / "store")
        try:
            states = {run.name: store.states.last(store.states.run_id(run.name, str)) for run in self.config.runs}
            return {name: state_codec.encode_state(found[1]) for name, found in states.items() if found is not None}
        finally:
            store.close()

    def final_state(self, run: str = "fesem") -> State:
        """The last state of one run."""
        return state_codec.decode_state(self.final_states()[run])

    def rounds(self) -> list[dict[str, Any]]:
        """What metrics.jsonl says about every round, without what depends on time and traffic."""
        lines = (self.config.folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [{k: v for k, v in r.items() if k not in ("bytes", "seconds")} for r in records if r["event"] == "round"]

    def outcome(self) -> Outcome:
        """What two trainings that are the same have in common, to the last bit."""
        return self.final_states(), self.rounds()

    def finish(self) -> None:
        """Run until the last center is published."""
        self.world.run(lambda: self.catalog is not None)

    def complete(self) -> Federation:
        """Run until the last center is published, and end every process."""
        self.finish()
        self.world.end()
        return self

    def play(self, devices: int | None = None) -> Federation:
        """The whole training, undisturbed."""
        self.start(devices)
        return self.complete()


class Spy:
    """Receives every message on the broker, and can send in the name of any device."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._transport = broker.client("spy")
        self._transport.connect()
        self._transport.subscribe("fc/v1/#")
        self._count = 0
        self._heard: list[Message] = []
        self._read = 0  # of what was heard
        self._told: list[tuple[str | None, dict[str, Any]]] = []  # the device of each control message that holds

    def heard(self) -> list[Message]:
        while (event := self._transport.receive(0.0)) is not None:
            if isinstance(event, Message):
                self._heard.append(event)
        return self._heard

    def said(self, kind: str, *, cid: str | None = None) -> list[dict[str, Any]]:
        """Messages of a kind to or from `cid`, oldest first."""
        new = self.heard()[self._read :]
        self._read += len(new)
        for event in new:
            with suppress(Malformed):  # some tests send messages that are no messages
                route = TOPICS.parse(event.topic)
                if event.payload and route.kind in ("rq", "t"):
                    self._told.append((route.cid, messages.read_message(event.payload, route.kind)))
        return [dict(told) for who, told in self._told if told["k"] == kind and cid in (None, who)]

    def records(self) -> list[dict[str, Any]]:
        """The records of coordinators, oldest first."""
        found = [event for event in self.heard() if event.topic == TOPICS.coord() and event.payload]
        return [messages.read_message(event.payload, "coord") for event in found]

    def say(self, cid: str, kind: str, **fields: Anything) -> str:
        """A request of `cid`; -> its id."""
        self._count += 1
        payload = messages.write_message(kind, ident=f"spy-{self._count}", t_ms=0, **fields)
        self.publish(TOPICS.request(cid), payload)
        return f"spy-{self._count}"

    def publish(self, topic: str, payload: bytes) -> None:
        """Any bytes on any topic."""
        self._transport.publish(topic, payload)
