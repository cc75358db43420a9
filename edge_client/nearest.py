"""Which center suits me: a device that never trained reads the catalog, tries every center, and takes one home.

It evaluates each center on its own labelled samples with the signed training program; the least mean loss wins, and
above the catalog's threshold none fits. Only the losses leave the device. Then the center's ready-to-run file is
fetched, run, and its accuracy reported. Trains nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_client.client import Dial, open_cache
from edge_client.config import ClientConfig
from edge_client.dataset import Dataset, Local
from edge_client.download import Downloads
from edge_client.engines.base import open_engine
from edge_client.errors import Malformed, NetworkError, ProtocolError
from edge_client.inference import run_file
from edge_client.learner import OverEngine
from edge_client.protocol import compress, messages
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.catalog import Catalog
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, Reply
from edge_client.protocol.topics import Topics
from edge_client.state import State
from edge_client.transport.base import Connected, Message, Will
from edge_client.transport.clock import Clock
from edge_client.voice import Voice, presence
from edge_client.work import OpenEngine, Workshop

log = logging.getLogger(__name__)

PATIENCE_S = 120.0  # for the whole visit
ASK_AGAIN_S = 8.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a visit found. `center` is None when none fits; `losses` are mean losses by center."""

    device: str
    center: int | None
    losses: Mapping[int, float]
    n: int  # samples behind the accuracy
    accuracy: float | None = None
    loss: float | None = None  # cross-entropy of the file's logits
    format: str | None = None
    file: str | None = None  # where the center's file is now
    sha256: str | None = None
    bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return vars(self) | {"losses": {str(k): v for k, v in self.losses.items()}}


def choose(losses: Mapping[int, float], abstain: float) -> int | None:
    """The center of least mean loss, the lower id on a tie; None when even that is above `abstain`."""
    best = min(losses, key=lambda ident: (losses[ident], ident), default=None)
    return best if best is not None and losses[best] <= abstain else None


@dataclass
class Visitor:
    """One visit of one device to the coordinator; `run` does it all."""

    config: ClientConfig
    dial: Dial
    local: Local
    clock: Clock
    rng: np.random.Generator
    file_format: str
    open_engine: OpenEngine = open_engine
    _pointer: Mapping[str, Any] | None = field(default=None, init=False)  # the `cat` message
    _answer: Mapping[str, Any] | None = field(default=None, init=False)  # the `near` answer

    def __post_init__(self) -> None:
        config = self.config
        self._state = State(config.state, federation=config.federation, device_id=config.device_id)
        self._topics = Topics(config.federation)
        self._transport = self.dial(self._will)
        self._voice = Voice(self._topics, config.device_id, self._transport, clock=self.clock, rng=self.rng)
        self._cache = open_cache(config)
        self._downloads = Downloads(self._cache, self._voice.get)
        self._workshop = Workshop(config, self._cache, self.local, self.open_engine)
        self._until_s = self.clock.now_s() + PATIENCE_S

    def run(self) -> Answer:
        """Raises NetworkError when nobody answers in time, ProtocolError when what comes is not right."""
        try:
            self._transport.connect()
            return self._visit()
        finally:
            self._downloads.pause()
            self._voice.presence("off", self._state.birth)
            self._transport.close()

    def _visit(self) -> Answer:
        self._wait(lambda: self._pointer is not None, "its catalog of centers")
        catalog = self._catalog()
        program = self._program(catalog)
        self._fetch([center.model for center in catalog.centers])
        losses = self._losses(catalog, program)
        chosen = choose(losses, catalog.abstain)
        if (theirs := self._ask_nearest(losses, program)) != chosen:
            log.warning("this device prefers center %s, the coordinator %s", chosen, theirs)
        if chosen is None:
            return Answer(device=self.config.device_id, center=None, losses=losses, n=len(self.local.train))
        return self._take_home(chosen, catalog.centers[chosen].files, losses)

    def _catalog(self) -> Catalog:
        manifest = Manifest.from_json(self._pointer["catalog"] if self._pointer else None)
        self._workshop.check_signature(manifest)
        self._fetch([manifest])
        return Catalog.from_bytes(self._cache.read(manifest.sha256))

    def _program(self, catalog: Catalog) -> Program:
        self._workshop.check_signature(catalog.program)
        self._fetch([catalog.program])
        program = self._workshop.program(catalog.program)
        if self.config.engine not in catalog.containers:
            raise Malformed("no_engine", f"the catalog has no program for {self.config.engine}")
        container = catalog.containers[self.config.engine]
        self._workshop.check_container(program, "evaluate", container)
        self._fetch([container])
        return program

    def _losses(self, catalog: Catalog, program: Program) -> dict[int, float]:
        """Mean loss of each center on this device's labelled samples, one model in memory at a time."""
        learner = OverEngine(self._workshop.engine(program, catalog.containers[self.config.engine]), program)
        batch = learner.fixed_batch or 32
        losses = {}
        for k, center in enumerate(catalog.centers):
            model = self._workshop.vector(center.model, program.schema)
            per_sample, _ = learner.evaluate([model], self.local.train, batch=batch)
            losses[k] = float(per_sample.mean())
        return losses

    def _ask_nearest(self, losses: Mapping[int, float], program: Program) -> int | None:
        """The coordinator's choice by our losses: what we chose, unless it knows better than its catalog."""
        order = sorted(losses)
        reply = Reply(n=len(self.local.train), losses=np.array([losses[ident] for ident in order]))
        stats = manifest_of(compress.encode_stats(reply, program.schema), "stats", inline=True)
        while self._answer is None:
            self._voice.say("near", how="loss", stats=stats, n=reply.n)
            self._wait(lambda: self._answer is not None, "which center is nearest", at_most_s=ASK_AGAIN_S)
        answer: int | None = self._answer["center"]
        return answer

    def _take_home(self, center: int, files: Mapping[str, Manifest], losses: Mapping[int, float]) -> Answer:
        """Fetch the center's file, run it on held-out samples where there are some, and report how it does."""
        if self.file_format not in files:
            raise Malformed("bad_field", f"center {center} has no {self.file_format} file")
        manifest = files[self.file_format]
        self._fetch([manifest])
        data = self.local.test or self.local.train
        logits = run_file(self.file_format, self._cache.read(manifest.sha256), data.x, threads=self.config.threads)
        accuracy, loss = score(logits, data)
        metrics = {name: value for name, value in (("accuracy", accuracy), ("loss", loss)) if value is not None}
        self._voice.say("served", center=center, sha256=manifest.sha256, n=len(data), metrics=metrics)
        return Answer(
            device=self.config.device_id,
            center=center,
            losses=losses,
            n=len(data),
            accuracy=accuracy,
            loss=loss,
            format=self.file_format,
            file=str(self._cache.path(manifest.sha256)),
            sha256=manifest.sha256,
            bytes=manifest.size,
        )

    # -- events

    def _fetch(self, manifests: list[Manifest]) -> None:
        self._downloads.start(manifests)
        while (wait_s := self._downloads.step(self.clock.now_s())) is not None:
            self._check_patience("the blobs of the catalog")
            self._pump(wait_s)

    def _wait(self, done: Callable[[], bool], what: str, *, at_most_s: float = PATIENCE_S) -> None:
        until_s = self.clock.now_s() + at_most_s
        while not done() and self.clock.now_s() < until_s:
            self._pump(until_s - self.clock.now_s())
        if not done():
            self._check_patience(what)

    def _check_patience(self, what: str) -> None:
        if self.clock.now_s() >= self._until_s:
            raise NetworkError(
                f"the coordinator did not send {what} within {PATIENCE_S:.0f} s",
                hint="it publishes its centers when training is done; ask again then",
            )

    def _pump(self, timeout_s: float) -> None:
        left_s = max(0.0, self._until_s - self.clock.now_s())
        event = self._transport.receive(min(timeout_s, left_s))
        if isinstance(event, Connected):
            self._transport.subscribe(*self._topics.device_filters(self.config.device_id))
            self._say_here()
        elif isinstance(event, Message) and event.payload:
            self._on_message(event)

    def _say_here(self) -> None:
        """Present, but with no samples to train on: nobody will send tasks."""
        self._voice.presence("on", self._state.birth, caps={"engine": self.config.engine, "n": 0})
        self._downloads.link_lost()

    def _on_message(self, event: Message) -> None:
        try:
            route = self._topics.parse(event.topic)
            if route.kind == "b" and route.label is not None and route.index is not None:
                self._downloads.on_block(route.label, route.index, event.payload)
                return
            message = messages.read(event.payload, route.kind)
        except Malformed as wrong:
            log.warning("cannot read a message on %s: %s", event.topic, wrong.message)
            return
        if self._state.see_epoch(message["epoch"]):
            self._take(message)

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["k"] == "cat":
            self._pointer = message
        elif message["k"] == "near":
            self._answer = message
        elif message["k"] == "rebirth":
            self._say_here()
        elif message["k"] == "err" and message["code"] == "not_member":
            raise ProtocolError("this device is not enrolled here", hint="ask for a new join file")
        elif message["k"] == "err":
            log.warning("the coordinator answers %s %s", message["code"], message.get("detail", ""))
            not_before_s = self.clock.now_s() + message.get("retry_ms", 0) / 1000
            self._downloads.on_error(message.get("re"), message["code"], not_before_s)

    def _will(self) -> Will:
        birth = self._state.next_birth()
        payload = presence("lost", birth, ident=f"lost-{birth}", t_ms=self.clock.unix_ms())
        return Will(self._topics.state(self.config.device_id), payload)


def score(logits: Array, data: Dataset) -> tuple[float | None, float]:
    """Logits [n, classes] and what is true -> (accuracy or None for targets that are no classes, mean loss)."""
    if not np.issubdtype(data.y.dtype, np.integer):
        return None, float(np.square(logits - data.y).mean())
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    hits = logits.argmax(axis=-1) == data.y
    return float(hits.mean()), float(-log_p[np.arange(len(data)), data.y].mean())
