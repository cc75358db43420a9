"""The nearest center over MQTT: a device that never trained reads the catalog, chooses, and fetches one center.

choose_center.py decides on the device, from its own samples. If the run has learned no rule, the device also sends
its losses to the coordinator and compares the choices. Then it fetches and runs the center's self-contained file, and
reports its accuracy. A model trained by `personalise` or by a local round stays on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.config import ClientConfig
from edge_client.data.dataset import DeviceData, require_fit
from edge_client.engines.base import open_engine
from edge_client.engines.onnx_files import replace_constants
from edge_client.errors import FedcentersError, Malformed, NetworkError, ProgramRefused
from edge_client.nearest import result as answers
from edge_client.nearest.catalog_centers import CatalogCenterSource
from edge_client.nearest.choose_center import AUTO, CenterSource, Selection, choose_center
from edge_client.nearest.personalise import evaluate_model, personalise
from edge_client.nearest.result import NearestAnswer
from edge_client.protocol import codecs
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.program import Program
from edge_client.protocol.task import MAX_MODELS, Flat, Reply
from edge_client.runtime.downloader import NoBlocks
from edge_client.runtime.golden_results import FILE, GoldenResults
from edge_client.runtime.session import Session
from edge_client.runtime.task_runner import OpenEngine, TaskRunner
from edge_client.transport.base import Dial, Message
from edge_client.transport.blobs import write_atomically
from edge_client.transport.clock import Clock

log = logging.getLogger(__name__)

VISIT_TIMEOUT_S = 120.0  # without a block or an answer
REQUEST_RETRY_S = 8.0
SILENCE_S = 5.0  # an answer takes less


@dataclass(frozen=True, kw_only=True)
class NearestOptions:
    """How to choose, and what to fetch. `labels`: whether y is known; `steps`: local SGD steps after the choice."""

    file_format: str
    labels: bool = True
    by: str = AUTO
    steps: int = 0


@dataclass
class NearestClient:
    """One session of one device, from the catalog to the fetched center; call `run` once."""

    config: ClientConfig
    dial: Dial
    local: DeviceData
    clock: Clock
    rng: np.random.Generator
    choice: NearestOptions
    open_engine: OpenEngine = open_engine
    tell: Callable[[str], None] = lambda _: None  # called with a line of text after SILENCE_S without a message
    _pointer: Mapping[str, Any] | None = field(default=None, init=False)  # the `cat` message
    _asked: set[str] = field(default_factory=set, init=False)  # the ids of the `near` requests
    _answer: Mapping[str, Any] | None = field(default=None, init=False)  # to one of them
    _online: bool = field(default=True, init=False)  # whether the coordinator is, by its record
    _bytes: int = field(default=0, init=False)  # of the blobs that this session fetched

    def __post_init__(self) -> None:
        config = self.config
        self._session = session = Session(
            config,
            self.dial,
            handlers={"cat": self._on_catalog, "near": self._on_answer, "coord": self._on_coordinator},
            presence=lambda: {"caps": {"engine": config.engine, "n": 0}},  # without samples it gets no tasks
            clock=self.clock,
            rng=self.rng,
        )
        self._runner = TaskRunner(
            config, session.cache, self.local, self.open_engine, GoldenResults(config.state / FILE)
        )
        self._until_s = self._tell_at_s = 0.0  # when to give up, and to tell that nothing comes

    def run(self) -> NearestAnswer:
        """Raises NetworkError when no answer comes in time, ProtocolError when what comes is not right.

        Raises ConfigError for samples that the centers cannot read.
        """
        try:
            self._session.transport.connect()
            return self._visit()
        finally:
            self._session.close()

    def _visit(self) -> NearestAnswer:
        self._expect()
        self._wait(lambda: self._pointer is not None, "its catalog of centers")
        source = CatalogCenterSource(self._catalog(), self._runner, self._fetch)
        options, name = self.choice, self.config.device_id
        require_fit(source.program, self.local, labels=options.labels)
        chosen = choose_center(source, self.local.train, labels=options.labels, by=options.by)
        if (source.router is None or not source.router.ways) and chosen.distances.get("loss"):
            self._compare(chosen, source)
        if chosen.center is None:
            return answers.no_center_answer(name, chosen, fetched=self._bytes, signed_by=self.config.federation)
        answer = self._fetch_center(chosen, source.catalog.centers[chosen.center].files, source.program)
        answer = replace(answer, class_names=self.local.class_names or source.catalog.class_names)
        if options.steps and options.labels:
            kept = personalise_and_score(source, chosen.center, answer.file, self.local, options.steps, self.config)
            answer = replace(answer, personal=kept, fetched=self._bytes)
        return answer

    def _catalog(self) -> Catalog:
        manifest = Manifest.from_json(self._pointer["catalog"] if self._pointer else None)
        self._runner.check_signature(manifest)
        self._fetch([manifest])
        return Catalog.from_bytes(self._session.cache.read(manifest.sha256))

    def _compare(self, chosen: Selection, source: CenterSource) -> None:
        """Ask the coordinator for its choice by this device's losses; log a difference."""
        losses = chosen.distances["loss"]
        asked = sorted(sorted(losses, key=lambda k: (losses[k], k))[:MAX_MODELS])
        reply = Reply(n=chosen.samples, losses=np.array([losses[k] for k in asked]))
        stats = manifest_of(codecs.encode_stats(reply, source.program.schema), "stats", inline=True)
        which = {} if len(asked) == source.centers else {"centers": asked}
        self._expect()
        while self._answer is None:
            self._asked.add(self._session.sender.send("near", how="loss", stats=stats, n=reply.n, **which))
            self._wait(lambda: self._answer is not None, "which center is nearest", at_most_s=REQUEST_RETRY_S)
        if (theirs := self._answer["center"]) != chosen.center:
            log.warning("this device prefers center %s, the coordinator %s", chosen.center, theirs)

    def _fetch_center(self, chosen: Selection, files: Mapping[str, Manifest], program: Program) -> NearestAnswer:
        """Fetch the center's file, run it, and report accuracy and loss where there are labels."""
        form, options = self.choice.file_format, self.choice
        if form not in files:
            raise Malformed("bad_field", f"center {chosen.center} has no {form} file")
        manifest = files[form]
        self._fetch([manifest])
        self._session.cache.read(manifest.sha256)  # hashed again before it runs
        answer = answers.evaluate_center(
            self.config.device_id,
            chosen,
            self._session.cache.path(manifest.sha256),
            self.local,
            program=program,
            state=self.config.state,
            file_format=form,
            sha256=manifest.sha256,
            labels=options.labels,
            threads=self.config.threads,
            fetched=self._bytes,
            signed_by=self.config.federation,
        )
        told = {name: getattr(answer, name) for name in ("accuracy", "loss")}
        metrics = {name: v for name, v in told.items() if v is not None and v < inf}
        self._session.sender.send("served", center=chosen.center, sha256=manifest.sha256, n=answer.n, metrics=metrics)
        return answer

    # -- events

    def _fetch(self, manifests: list[Manifest]) -> None:
        has = self._session.cache.has
        self._expect()
        self._bytes += sum(m.size for m in {m.sha256: m for m in manifests}.values() if not has(m.sha256))
        while not self._fetched(manifests):
            log.info("the coordinator sends no blocks; asking again")

    def _fetched(self, manifests: list[Manifest]) -> bool:
        """Whether all came. A coordinator that is away may come back while this visit lasts."""
        try:
            for wait_s in self._session.fetch(manifests):
                self._check_patience("the blobs of the catalog")
                came = self._session.downloads.arrived
                self._pump(wait_s)
                if self._session.downloads.arrived > came:
                    self._expect()
        except NoBlocks:
            return False
        return True

    def _wait(self, done: Callable[[], bool], what: str, *, at_most_s: float = VISIT_TIMEOUT_S) -> None:
        until_s = self.clock.now_s() + at_most_s
        while not done() and self.clock.now_s() < until_s:
            self._pump(until_s - self.clock.now_s())
        if not done():
            self._check_patience(what)

    def _expect(self) -> None:
        """From now on a message may come: what the device computed before is no silence of the coordinator."""
        now_s = self.clock.now_s()
        self._until_s, self._tell_at_s = now_s + VISIT_TIMEOUT_S, max(self._tell_at_s, now_s + SILENCE_S)

    def _check_patience(self, what: str) -> None:
        if self.clock.now_s() < self._until_s:
            return
        if not self._online or (self._pointer is not None and self._tell_at_s == inf):
            raise NetworkError(
                f"the coordinator of {self.config.federation} does not answer",
                hint="start it with `fedcenters-coordinator serve`, and ask again while it runs",
            )
        raise NetworkError(
            f"the coordinator did not send {what} within {VISIT_TIMEOUT_S:.0f} s",
            hint="it publishes its centers when training is done; ask again then. In a cluster of "
            "brokers that keeps retained messages by node (RabbitMQ), dial the coordinator's node",
        )

    def _pump(self, timeout_s: float) -> None:
        now_s = self.clock.now_s()
        wait_s = min(timeout_s, self._until_s - now_s, self._tell_at_s - now_s)
        event = self._session.transport.receive(max(0.0, wait_s))
        now_s = self.clock.now_s()
        if isinstance(event, Message):
            self._tell_at_s = now_s + SILENCE_S
        elif now_s >= self._tell_at_s:
            self._tell_at_s = inf  # told once, until something comes
            left_s = max(0.0, self._until_s - now_s)
            away = "" if self._online else ", which is away"
            self.tell(f"waiting for the coordinator of {self.config.federation}{away}, at most {left_s:.0f} s more")
        self._session.handle(event)
        self._session.raise_failure()

    def _on_catalog(self, message: Mapping[str, Any]) -> None:
        self._pointer = message

    def _on_coordinator(self, message: Mapping[str, Any]) -> None:
        came_back = message["online"] and not self._online
        self._online = message["online"]
        if came_back:
            self._session.downloads.link_lost()  # what was asked meanwhile is lost

    def _on_answer(self, message: Mapping[str, Any]) -> None:
        if message["re"] in self._asked:
            self._answer = message


def personalise_and_score(
    source: CenterSource, center: int, file: str | None, local: DeviceData, steps: int, config: ClientConfig
) -> dict[str, Any] | None:
    """Train a few local steps from the center -> the model's files, and accuracy and loss before and after them.

    `file`: the center's; the model gets one like it where that is of ONNX, beside its weights alone. The numbers are of
    held-out samples, and None without these: training samples would favour the local model. Steps that fail write
    nothing, and are told in the log.
    """
    try:
        (model,), schema = source.models([center]), source.program.schema
        mine = personalise(source, model, local.train, steps)
    except FedcentersError as wrong:
        log.warning("no personal model: %s; %s", wrong.message, wrong.hint)
        return None
    path = config.state / f"personal-{center}.safetensors"
    write_atomically(path, codecs.encode_vector(mine, schema, codec="f32", kind="model"), private=True)
    names = "before", "loss_before", "accuracy", "loss"
    made = _personal_onnx(file, source.program, mine, path.with_suffix(".onnx"))
    kept: dict[str, Any] = {"steps": steps, "file": str(path), "model": made, **dict.fromkeys(names)}
    if local.test is None:
        return kept
    learner = source.learner(training=False)
    found = *evaluate_model(learner, model, local.test), *evaluate_model(learner, mine, local.test)
    return kept | dict(zip(names, found, strict=True))


def _personal_onnx(file: str | None, program: Program, model: Flat, path: Path) -> str | None:
    """Write the center's file with the weights of `model`; None, and no file, where the center's is not of ONNX."""
    path.unlink(missing_ok=True)  # of an earlier visit, with other weights
    if file is None or not file.endswith(".onnx") or "onnx" not in program.containers:
        return None
    try:
        made = replace_constants(Path(file).read_bytes(), _constants(program, model))
    except ProgramRefused as wrong:
        log.warning("no personal ONNX file: %s; %s", wrong.message, wrong.hint)
        return None
    write_atomically(path, made, private=True)
    return str(path)


def _constants(program: Program, model: Flat) -> dict[str, bytes]:
    """A model's tensors under their names in the program's graph."""
    values, prefix = program.schema.split(model.astype(program.dtype)), {"p": "w", "b": "buffers"}
    return {f"{prefix[t.role]}/{t.name}": values[t.name].tobytes() for t in program.schema.tensors}
