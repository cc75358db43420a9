"""Which center suits me: a device that never trained reads the catalog over MQTT, chooses, and takes one center home.

choose_center.py decides on this device, from its own samples. Where the run taught no newcomers, only the losses leave
it: the coordinator is asked, too. Then the center's ready-to-run file is fetched, run, and its accuracy reported.
Nothing is trained but what `personalise` or a local round asks for, and that stays here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edge_client.config import ClientConfig
from edge_client.data.dataset import DeviceData
from edge_client.engines.base import open_engine
from edge_client.errors import Malformed, NetworkError, ProtocolError
from edge_client.nearest import result as answers
from edge_client.nearest.catalog_source import CatalogCenterSource
from edge_client.nearest.choose_center import AUTO, CenterSource, Selection, choose_center
from edge_client.nearest.personalise import evaluate_model, personalise
from edge_client.nearest.result import NearestAnswer
from edge_client.protocol import codecs, messages
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.task import MAX_MODELS, Reply
from edge_client.protocol.topics import Topics
from edge_client.runtime.downloader import Downloader, open_cache
from edge_client.runtime.engine_selection import FILE, Vetting
from edge_client.runtime.sender import DeviceSender, presence_message
from edge_client.runtime.state import DeviceState
from edge_client.runtime.task_runner import OpenEngine, TaskRunner
from edge_client.transport.base import Connected, Dial, Message, Will
from edge_client.transport.blobs import write_atomically
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)

VISIT_TIMEOUT_S = 120.0  # for the whole visit
REQUEST_RETRY_S = 8.0


@dataclass(frozen=True, kw_only=True)
class NearestOptions:
    """How to choose and what to take home. `labels`: whether y is known; `steps`: local ones after the choice."""

    file_format: str
    labels: bool = True
    by: str = AUTO
    steps: int = 0


@dataclass
class NearestClient:
    """One visit of one device to the coordinator; `run` does it all."""

    config: ClientConfig
    dial: Dial
    local: DeviceData
    clock: Clock
    rng: np.random.Generator
    choice: NearestOptions
    open_engine: OpenEngine = open_engine
    _pointer: Mapping[str, Any] | None = field(default=None, init=False)  # the `cat` message
    _answer: Mapping[str, Any] | None = field(default=None, init=False)  # the `near` answer
    _bytes: int = field(default=0, init=False)  # of the blobs that this visit fetched

    def __post_init__(self) -> None:
        config = self.config
        self._state = DeviceState(config.state, federation=config.federation, device_id=config.device_id)
        self._topics = Topics(config.federation)
        self._transport = self.dial(self._will)
        self._sender = DeviceSender(self._topics, config.device_id, self._transport, clock=self.clock, rng=self.rng)
        self._cache = open_cache(config)
        self._downloads = Downloader(self._cache, self._sender.request_blocks)
        self._runner = TaskRunner(config, self._cache, self.local, self.open_engine, Vetting(config.state / FILE))
        self._until_s = self.clock.now_s() + VISIT_TIMEOUT_S

    def run(self) -> NearestAnswer:
        """Raises NetworkError when nobody answers in time, ProtocolError when what comes is not right."""
        try:
            self._transport.connect()
            return self._visit()
        finally:
            self._downloads.pause()
            self._sender.send_presence("off", self._state.birth)
            self._transport.close()

    def _visit(self) -> NearestAnswer:
        self._wait(lambda: self._pointer is not None, "its catalog of centers")
        offer = CatalogCenterSource(self._catalog(), self._runner, self._fetch)
        wish, name = self.choice, self.config.device_id
        chosen = choose_center(offer, self.local.train, labels=wish.labels, by=wish.by)
        if offer.router is None and "loss" in chosen.distances:  # with a guide a device decides by itself
            self._compare(chosen, offer)
        if chosen.center is None:
            return answers.no_center_answer(name, chosen, fetched=self._bytes, signed_by=self.config.federation)
        answer = self._fetch_center(chosen, offer.catalog.centers[chosen.center].files)
        if wish.steps and wish.labels:
            kept = personalise_and_score(offer, chosen.center, self.local, wish.steps, self.config)
            answer = replace(answer, personal=kept, fetched=self._bytes)
        return answer

    def _catalog(self) -> Catalog:
        manifest = Manifest.from_json(self._pointer["catalog"] if self._pointer else None)
        self._runner.check_signature(manifest)
        self._fetch([manifest])
        return Catalog.from_bytes(self._cache.read(manifest.sha256))

    def _compare(self, chosen: Selection, source: CenterSource) -> None:
        """The coordinator's choice by our losses is ours, unless it knows better than its catalog."""
        losses = chosen.distances["loss"]
        asked = sorted(sorted(losses, key=lambda k: (losses[k], k))[:MAX_MODELS])
        reply = Reply(n=chosen.samples, losses=np.array([losses[k] for k in asked]))
        stats = manifest_of(codecs.encode_stats(reply, source.program.schema), "stats", inline=True)
        which = {} if len(asked) == source.centers else {"centers": asked}
        while self._answer is None:
            self._sender.send("near", how="loss", stats=stats, n=reply.n, **which)
            self._wait(lambda: self._answer is not None, "which center is nearest", at_most_s=REQUEST_RETRY_S)
        if (theirs := self._answer["center"]) != chosen.center:
            log.warning("this device prefers center %s, the coordinator %s", chosen.center, theirs)

    def _fetch_center(self, chosen: Selection, files: Mapping[str, Manifest]) -> NearestAnswer:
        """Fetch the center's file, run it, and report how it does where labels say so."""
        form, wish = self.choice.file_format, self.choice
        if form not in files:
            raise Malformed("bad_field", f"center {chosen.center} has no {form} file")
        manifest = files[form]
        self._fetch([manifest])
        self._cache.read(manifest.sha256)  # hashed again before it runs
        answer = answers.evaluate_center(
            self.config.device_id,
            chosen,
            self._cache.path(manifest.sha256),
            self.local,
            file_format=form,
            sha256=manifest.sha256,
            labels=wish.labels,
            threads=self.config.threads,
            fetched=self._bytes,
            signed_by=self.config.federation,
        )
        metrics = {name: v for name, v in (("accuracy", answer.accuracy), ("loss", answer.loss)) if v is not None}
        self._sender.send("served", center=chosen.center, sha256=manifest.sha256, n=answer.n, metrics=metrics)
        return answer

    # -- events

    def _fetch(self, manifests: list[Manifest]) -> None:
        self._bytes += sum(m.size for m in {m.sha256: m for m in manifests}.values() if not self._cache.has(m.sha256))
        self._downloads.start(manifests)
        while (wait_s := self._downloads.step(self.clock.now_s())) is not None:
            self._check_patience("the blobs of the catalog")
            self._pump(wait_s)

    def _wait(self, done: Callable[[], bool], what: str, *, at_most_s: float = VISIT_TIMEOUT_S) -> None:
        until_s = self.clock.now_s() + at_most_s
        while not done() and self.clock.now_s() < until_s:
            self._pump(until_s - self.clock.now_s())
        if not done():
            self._check_patience(what)

    def _check_patience(self, what: str) -> None:
        if self.clock.now_s() >= self._until_s:
            raise NetworkError(
                f"the coordinator did not send {what} within {VISIT_TIMEOUT_S:.0f} s",
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
        self._sender.send_presence("on", self._state.birth, caps={"engine": self.config.engine, "n": 0})
        self._downloads.link_lost()

    def _on_message(self, event: Message) -> None:
        try:
            route = self._topics.parse(event.topic)
            if route.kind == "b" and route.label is not None and route.index is not None:
                self._downloads.on_block(route.label, route.index, event.payload)
                return
            message = messages.read_message(event.payload, route.kind)
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
        payload = presence_message("lost", birth, ident=f"lost-{birth}", t_ms=self.clock.unix_ms())
        return Will(self._topics.state(self.config.device_id), payload)


def personalise_and_score(
    source: CenterSource, center: int, local: DeviceData, steps: int, config: ClientConfig
) -> dict[str, Any]:
    """A few local steps from the center -> where the model is kept, and how it and the center do on held-out samples.

    Without held-out samples nobody can say how they do: on those that it has just seen, any model looks better.
    """
    (model,) = source.models([center])
    mine = personalise(source, model, local.train, steps)
    path = config.state / f"personal-{center}.safetensors"
    write_atomically(path, codecs.encode_vector(mine, source.program.schema, codec="f32", kind="model"))
    kept: dict[str, Any] = {"steps": steps, "file": str(path), "before": None, "accuracy": None, "loss": None}
    if local.test is None:
        return kept
    learner = source.learner(training=False)
    before, _ = evaluate_model(learner, model, local.test)
    accuracy, loss = evaluate_model(learner, mine, local.test)
    return kept | {"before": before, "accuracy": accuracy, "loss": loss}
