"""A device on a stage: the real client over a broker in memory, with a scripted coordinator and virtual time.

One thread. The client's loop runs until it waits for an event and there is none; then the script goes on. A script is a
generator: between two `yield`s it reads what the device sent and says something; `yield 30` lets thirty seconds pass.
When the script ends, the device is stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.config import ClientConfig
from edge_client.data.dataset import DataFolder, DeviceData
from edge_client.nearest.over_mqtt import NearestClient, NearestOptions
from edge_client.nearest.result import NearestAnswer
from edge_client.protocol import blocks, codecs, messages, signing, task_codec
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.program import Container, Program
from edge_client.protocol.task import Array, Fit, Flat, Probe, Schema, Tensors, TensorSpec
from edge_client.protocol.topics import Topics, routing_label
from edge_client.runtime.client import Client
from edge_client.runtime.golden_results import Check
from edge_client.runtime.systemd_watchdog import Watchdog
from edge_client.training import fit_probe
from edge_client.training.learner import EngineLearner
from edge_client.transport.base import Event, Message, Will
from edge_client.update.self_update import SelfUpdater
from tests.support import softmax_program
from tests.support.memory_broker import MemoryBroker, MemoryTransport
from tests.support.virtual_time import VirtualClock

FEDERATION, DEVICE = "test", "dev-1"
PRIVATE = bytes(range(32))
TRUSTED = signing.public_key(PRIVATE)
BLOCK = 4_096
SIGNED = ("program", "model", "linear", "catalog", "release")
BALLAST = 4_096  # values that nothing trains; they make models and updates of five blocks

Script = Iterator[Any]  # yields nothing, or seconds


class BallastEngine(softmax_program.SoftmaxEngine):
    """Softmax regression that carries its ballast along; `before_step` may make things happen while it trains."""

    def __init__(self, before_step: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._before_step = before_step

    def step(self, feeds: Tensors) -> dict[str, Array]:
        self._before_step()
        kept = {name: feeds[name] for name in ("w/ballast", "velocity/ballast") if name in feeds}
        return super().step(feeds) | kept


def program(*, ballast: int = BALLAST) -> Program:
    plain = softmax_program.program()
    extra = (TensorSpec(name="ballast", role="p", shape=(ballast,)),) if ballast else ()
    files = {name: Container(sha256=_sha256(data), size=len(data)) for name, data in CONTAINERS.items()}
    schema = Schema((*plain.schema.tensors, *extra), plain.schema.classifier)
    return replace(plain, schema=schema, containers={"onnx": files}, batch={"onnx": "any"})


CONTAINERS = {"step": b"steps" * 2_000, "evaluate": b"evaluates"}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class StagedTransport(MemoryTransport):
    """Gives way to the script whenever the device would wait."""

    def __init__(self, broker: MemoryBroker, will: Callable[[], Will], stage: DeviceStage) -> None:
        super().__init__(broker, f"{FEDERATION}.{DEVICE}", will)
        self._stage = stage

    def receive(self, timeout_s: float) -> Event | None:
        event = super().receive(0)
        if event is not None or timeout_s <= 0:
            return event
        self._stage.pass_time(timeout_s)
        return super().receive(0)


@dataclass
class DeviceStage:
    """The world around one device, and the coordinator's hands in it."""

    folder: Path
    program: Program = field(default_factory=program)
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    clock: VirtualClock = field(default_factory=VirtualClock)
    epoch: int = 1
    serve: bool = True  # answer every `get` at once
    keys: tuple[bytes, ...] = (TRUSTED,)
    release_keys: tuple[bytes, ...] = ()
    secure: str = "off"  # of the device's client.toml
    before_step: Callable[[], None] = lambda: None
    environment: dict[str, str] = field(default_factory=dict)  # of the device's process
    updates: SelfUpdater | None = None  # of a device that a launcher started
    check: Check | None = None
    samples: DataFolder | None = None  # a folder that is looked at again; else what `local` holds

    def __post_init__(self) -> None:
        self.topics = Topics(FEDERATION)
        self.blobs: dict[str, bytes] = {}
        self.heard: list[dict[str, Any]] = []  # every control message of the device
        self.told: list[Mapping[str, Any]] = []  # every event that its owner is told
        self.arrived: dict[int, bytes] = {}  # upload blocks by index, as sent
        self.served_blocks = 0
        self.opened: list[str] = []  # containers that were opened
        self.left_s = 0.0
        self.playing: Client | None = None
        self.script: Script = iter(())
        self.ids = iter(f"c{i}" for i in range(10_000))
        rng = np.random.default_rng(7)
        self.local = DeviceData(train=softmax_program.samples(rng, 30), test=softmax_program.samples(rng, 10))
        self.desk = self.broker.client("coordinator.0")
        self.desk.connect()
        self.desk.subscribe(*self.topics.coordinator_filters())
        self.manifest = self.blob(canonical_json(self.program.to_json()), "program")
        self.containers = {name: self.blob(data, "container") for name, data in CONTAINERS.items()}

    @property
    def schema(self) -> Schema:
        return self.program.schema

    # -- the device

    def config(self) -> ClientConfig:
        return ClientConfig(
            federation=FEDERATION,
            device_id=DEVICE,
            broker="mqtt://nowhere",
            data=self.folder,
            state=self.folder / "state",
            signing_keys=self.keys,
            release_keys=self.release_keys,
            secure=self.secure,
            min_battery_percent=0,
        )

    def open_engine(self, _name: str, _program: Program, files: dict[str, Path], **_settings: object) -> BallastEngine:
        self.opened += sorted(files)
        return BallastEngine(self.before_step)

    def device(self) -> Client:
        """A fresh process of the device; its state folder is the same every time."""
        return Client(
            self.config(),
            lambda will: StagedTransport(self.broker, will, self),
            local=self.samples.load() if self.samples else self.local,
            samples=self.samples,
            updates=self.updates,
            clock=self.clock,
            rng=np.random.default_rng(1),
            open_engine=self.open_engine,
            check=self.check,
            watchdog=Watchdog(self.environment),
            tell=self.told.append,
        )

    def play(self, script: Script) -> Client:
        """Run one life of the device under a script; the coordinator's record is there already."""
        if self.topics.coord() not in self.broker.retained:
            self.lead(1)
        self.playing = device = self.device()
        self.script, self.left_s = script, 0.0
        device.run()
        self.listen()
        return device

    def play_turns(self, *turns: Callable[[], object] | Script | float) -> Client:
        """`play` calls one after another, each when the device waits; a number lets so many seconds pass."""

        def script() -> Script:
            yield
            for turn in turns:
                if isinstance(turn, int | float):
                    yield turn
                elif callable(turn):
                    turn()
                    yield
                else:
                    yield from turn

        return self.play(script())

    def visit(self, script: Script, *, tell: Callable[[str], None] = lambda _: None, **wish: Any) -> NearestAnswer:  # noqa: ANN401 - of NearestOptions
        """One visit of a device that only asks which center is nearest."""
        self.playing, self.script, self.left_s = None, script, 0.0
        self.lead(1)
        try:
            return NearestClient(
                config=self.config(),
                dial=lambda will: StagedTransport(self.broker, will, self),
                local=self.local,
                clock=self.clock,
                rng=np.random.default_rng(1),
                choice=NearestOptions(**{"file_format": "onnx", **wish}),
                tell=tell,
                open_engine=self.open_engine,
            ).run()
        finally:
            self.listen()

    def pass_time(self, timeout_s: float) -> None:
        """The device waits: first the requests that it made, then the time that the script gave, then the script."""
        if self.listen():
            return
        if self.left_s > 0:
            step = min(self.left_s, timeout_s)
            self.clock.time_s += step
            self.left_s -= step
            return
        try:
            self.left_s = next(self.script) or 0.0
        except StopIteration:
            self.at_end(timeout_s)

    def at_end(self, timeout_s: float) -> None:
        """The script is over: a client is stopped; for a visitor time goes on."""
        if self.playing is not None:
            self.playing.stop()
        else:
            self.clock.time_s += timeout_s

    # -- the coordinator

    def listen(self) -> bool:
        """Take in what the device sent; -> whether something was answered."""
        answered = False
        while (event := self.desk.receive(0)) is not None:
            if not isinstance(event, Message):
                continue
            route = self.topics.parse(event.topic)
            if route.kind == "in" and route.index is not None:
                self.arrived[route.index] = event.payload
                continue
            if not event.payload:
                continue
            message = messages.read_message(event.payload, route.kind)
            self.heard.append(message)
            if message["k"] == "get" and self.serve:
                self.send_blocks(message)
                answered = True
        return answered

    def said(self, kind: str) -> list[dict[str, Any]]:
        """All messages of a kind that the device sent, oldest first."""
        return [m for m in self.heard if m["k"] == kind]

    def last(self, kind: str) -> dict[str, Any]:
        return self.said(kind)[-1]

    def blob(self, data: bytes, kind: str) -> Manifest:
        """What devices can fetch from now on; its manifest is signed where a device asks for that."""
        self.blobs[_sha256(data)] = data
        manifest = manifest_of(data, kind, block=BLOCK)
        return signing.sign_manifest(manifest, PRIVATE, FEDERATION) if kind in SIGNED else manifest

    def model(self, seed: int) -> Flat:
        values = 0.1 * np.random.default_rng(seed).standard_normal(self.schema.size)
        return np.asarray(values, dtype=np.float32)

    def put(self, flat: Flat, kind: str) -> Manifest:
        return self.blob(codecs.encode_vector(flat, self.schema, codec="f32", kind=kind), kind)

    def send_blocks(self, get: dict[str, Any], *, damage: Callable[[bytes], bytes] = lambda b: b) -> None:
        """Answer one `get`."""
        data = self.blobs[get["sha256"]]
        total = -(-len(data) // BLOCK)
        for first, count in get["at"]:
            for index in range(first, first + count):
                body = data[index * BLOCK : (index + 1) * BLOCK]
                topic = self.topics.down_block(DEVICE, routing_label(get["sha256"]), index)
                self.served_blocks += 1
                self.desk.publish(topic, damage(blocks.pack_block(body, index, total)))

    def tell(self, kind: str, **fields: Any) -> str:  # noqa: ANN401
        ident = next(self.ids)
        payload = messages.write_message(kind, ident=ident, t_ms=0, **{"epoch": self.epoch, **fields})
        self.desk.publish(self.topics.down(DEVICE), payload)
        return ident

    def lead(self, boot: int, *, spread_ms: int = 0, **more: Any) -> None:  # noqa: ANN401
        """Publish the coordinator's record."""
        about = {
            "online": True,
            "proto": [1],
            "spread_ms": spread_ms,
            "block": BLOCK,
            "window": 4,
            "src": ["mqtt"],
            **more,
        }
        signature = signing.sign_record(f"{boot:016x}", self.epoch, PRIVATE, FEDERATION)
        fields = about | {"boot": f"{boot:016x}", "epoch": self.epoch} | signature
        self.desk.publish(
            self.topics.coord(), messages.write_message("coord", ident="c", t_ms=0, **fields), retain=True
        )

    def ask(
        self,
        task: Fit | Probe,
        *,
        round_: int = 1,
        run: str = "r1",
        left_ms: int = 600_000,
        **fields: Any,  # noqa: ANN401
    ) -> str:
        """Send one task; `fields` replaces what would be right."""
        job = task_codec.task_fields(task, self.put)
        codec = fields.pop("codec", "f32")
        base = fields.pop("base", "start" if isinstance(task, Fit) else "zero")
        message = {
            **job,
            "run": run,
            "round": round_,
            "exchange": 0,
            "left_ms": left_ms,
            "program": self.manifest,
            "container": self.containers["step" if isinstance(task, Fit) else "evaluate"],
            "schema": self.schema.sha256,
            "reply": {"codec": codec, "base": base, "max_size": 1 << 20},
        }
        return self.tell("task", **(message | fields))

    def ack(self, status: str, **more: Any) -> None:  # noqa: ANN401
        """Answer the last `rdy`."""
        rdy = self.last("rdy")
        key = {name: rdy[name] for name in ("run", "round", "exchange", "attempt")}
        self.tell("ack", **key, sha256=rdy["update"]["sha256"], status=status, **more)

    def go(self, *, window: int = 4, have: str | None = None) -> None:
        """Grant the last `rdy` a credit."""
        rdy = self.last("rdy")
        self.tell("go", re=rdy["id"], sha256=rdy["update"]["sha256"], shard=0, window=window, have=have)

    def uploaded(self) -> bytes:
        """The last announced update, from its blocks or from the announcement itself."""
        manifest = Manifest.from_json(self.last("rdy")["update"])
        if manifest.inline is not None:
            return manifest.inline
        assert sorted(self.arrived) == list(range(manifest.total))
        data = b"".join(blocks.unpack_block(self.arrived[i], manifest, i) for i in range(manifest.total))
        assert _sha256(data) == manifest.sha256
        return data

    def trained(self, task: Fit, own: Flat | None = None, posterior: Array | None = None) -> Flat:
        """What the task gives when it is run by hand, float32 [schema.size]."""
        learner = EngineLearner(BallastEngine(), self.program)
        result = fit_probe.run_fit(learner, task, self.local.train, own=own, posterior=posterior)
        return np.asarray(result.vector, dtype=np.float32)

    def fit(self, seed: int = 0, **changes: Any) -> Fit:  # noqa: ANN401
        fields: dict[str, Any] = {"start": self.model(seed), "steps": 3, "lr": 0.1, "batch": 8, "seed": 5}
        return Fit(**fields | changes)
