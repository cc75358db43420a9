"""Computation of one task: check the program, train or evaluate, and encode the result for the upload.

All blobs are in the cache already. active_task.py fetches them and stores the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_client.config import ClientConfig
from edge_client.data.dataset import DeviceData
from edge_client.engines.base import Engine
from edge_client.errors import Malformed
from edge_client.protocol import codecs, signing, sum_codec, task_codec
from edge_client.protocol.blocks import Manifest
from edge_client.protocol.messages import parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program
from edge_client.protocol.summed_task import SummedFit, SummedProbe
from edge_client.protocol.task import Array, Fit, Flat, Probe, Reply, Schema
from edge_client.runtime.golden_results import GoldenResults, RefusedRuntime
from edge_client.runtime.state import SumProgress
from edge_client.training import fit_probe
from edge_client.training.learner import EngineLearner, Learner
from edge_client.training.summed_work import SummedAnswer, SummedMemory, add_words
from edge_client.transport.blobs import BlobFolder

OpenEngine = Callable[..., Engine]  # edge_client.engines.base.open_engine
OwnModelReader = Callable[[str, Schema], Flat | None]  # slot -> the device's own model [schema.size]
ResidualReader = Callable[[Schema], Flat | None]  # what compression has cost so far [schema.size]
PosteriorReader = Callable[[], Array | None]  # what the round's last probe left [M, n]


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The bytes to upload, and what the device keeps: vectors [schema.size], responsibilities [M, n]."""

    what: str  # "delta", "stats" or "masked"
    data: bytes
    n: int
    metrics: dict[str, float]
    schema: Schema
    own: tuple[str, Flat] | None = None  # (slot, model)
    residual: Flat | None = None
    posterior: Array | None = None
    progress: SumProgress | None = None


@dataclass
class TaskRunner:
    """Opens programs and runs tasks. `blobs` holds what was fetched; an opened engine is used again.

    `engine_name` is the configured engine, until `use` takes another one.
    """

    config: ClientConfig
    blobs: BlobFolder
    local: DeviceData
    open_engine: OpenEngine
    golden_results: GoldenResults

    def __post_init__(self) -> None:
        self.engine_name = self.config.engine
        self.refused: list[RefusedRuntime] = []  # engines that fail the golden run of the last task's program
        self._programs: dict[str, Program] = {}
        self._engines: dict[frozenset[str], Engine] = {}  # by the sha256 of the containers; of one program only

    def check_signature(self, *manifests: Manifest) -> None:
        """Before a byte is fetched: one of the pinned keys signed each of these. Malformed("bad_signature")."""
        for manifest in manifests:
            signing.verify_manifest(manifest, self.config.signing_keys, self.config.federation)

    def program(self, manifest: Manifest) -> Program:
        """The fetched program. Malformed("bad_program") and the codes of its parts."""
        if manifest.sha256 not in self._programs:
            try:
                raw = parse_json(self.blobs.read(manifest.sha256), MAX_PROGRAM_BYTES)
            except Malformed as wrong:
                raise Malformed("bad_program", f"program.json: {wrong.message}") from wrong
            if not isinstance(raw, dict):
                raise Malformed("bad_program", "program.json is no object")
            self._programs, self._engines = {manifest.sha256: Program.from_json(raw)}, {}
        return self._programs[manifest.sha256]

    def check_container(self, program: Program, function: str, manifest: Manifest) -> None:
        """Before anything is fetched: the signed program lists this file, and one for the configured engine."""
        listed = {engine: files[function] for engine, files in program.containers.items() if function in files}
        if self.config.engine not in listed:
            raise Malformed("no_engine", f"the program has no {function} for {self.config.engine}")
        if (manifest.sha256, manifest.size) not in {(c.sha256, c.size) for c in listed.values()}:
            raise Malformed("bad_program", f"container {manifest.sha256:.16} is not the one that the program lists")

    def containers(self, program: Program, engine: str, functions: Collection[str], block: int) -> list[Manifest]:
        """What an engine needs for these functions, and for its golden run if there is one."""
        files = program.files(engine, [*functions, *(["step"] if engine in program.golden else [])])
        return list({file.sha256: file.manifest(name, block) for name, file in files.items()}.values())

    def use(self, program: Program, engine: str, sha256: str) -> RefusedRuntime | None:
        """Compute with this engine from now on, unless it fails the golden run of `program`, whose hash is given.

        Its step is here already. Raises what opening an engine raises.
        """
        if engine in program.golden:
            refused = self.golden_results.refused(self._opened(program, engine, ["step"]), program, sha256)
            if refused is not None:
                return refused
        self.engine_name = engine
        return None

    def engine(self, program: Program, functions: Collection[str]) -> Engine:
        """The engine in use, over the fetched containers of these functions."""
        return self._opened(program, self.engine_name, functions)

    def _opened(self, program: Program, engine: str, functions: Collection[str]) -> Engine:
        named = frozenset(file.sha256 for file in program.files(engine, functions).values())
        if named not in self._engines:
            paths = {sha256: self.blobs.verified(sha256) for sha256 in named}  # a damaged one must not be loaded
            files = program.containers[engine]
            here = {name: paths[file.sha256] for name, file in files.items() if file.sha256 in named}
            self._engines[named] = self.open_engine(
                engine, program, here, threads=self.config.threads, device=self.config.device
            )
        return self._engines[named]

    def vector(self, manifest: Manifest, schema: Schema) -> Flat:
        """A fetched model or linear term [schema.size], float32; centroids float64."""
        if manifest.kind == "points":
            return sum_codec.decode_points(self.blobs.read(manifest.sha256))
        return codecs.decode_vector(self.blobs.read(manifest.sha256), schema, kind=manifest.kind)

    def run(
        self,
        message: Mapping[str, Any],
        *,
        own: OwnModelReader,
        residual: ResidualReader,
        posterior: PosteriorReader,
        between: Callable[[], None],
    ) -> TaskResult:
        """Carry out a `task` message whose blobs are here; `between` is called before each batch.

        Raises Malformed with the code of the nack.
        """
        learner, schema = self._learner(message, between)
        task = task_codec.read_task(message, lambda manifest: self.vector(manifest, schema))
        if isinstance(task, Probe):
            outcome = self._probe(learner, task, own)
        else:
            kept, shares = own(task.slot, schema), posterior()
            data = self.local.train
            result = fit_probe.run_fit(learner, task, data, own=kept, posterior=shares)
            if task.upload:
                outcome = _update_result(result, task, message, schema, len(data), residual)
            else:
                outcome = _own_model_result(result, task, schema, len(data))
        if len(outcome.data) > message["reply"]["max_size"]:
            raise Malformed(
                "too_big", f"an update of {len(outcome.data)} bytes, {message['reply']['max_size']} allowed"
            )
        return outcome

    def _learner(self, message: Mapping[str, Any], between: Callable[[], None]) -> tuple[Learner, Schema]:
        program = self.program(Manifest.from_json(message["program"]))
        if program.schema.sha256 != message["schema"]:
            raise Malformed(
                "bad_schema", f"the program's schema is {program.schema.sha256}, the task's {message['schema']}"
            )
        functions = list(task_codec.container_functions(message).values())
        return EngineLearner(self.engine(program, functions), program, between), program.schema

    def add_words(
        self, message: Mapping[str, Any], memory: Callable[[str], SummedMemory], between: Callable[[], None]
    ) -> tuple[Fit | Probe, SummedAnswer]:
        """Carry out the work of a task of job "sum"; `memory` of a slot. -> the work and its words.

        A fit of which nothing is told has no words.
        """
        learner, schema = self._learner(message, between)
        work = sum_codec.read_work(message, lambda manifest: self.vector(manifest, schema))
        slot = work.slot if isinstance(work, Fit) else "main"
        mine = memory(slot)
        if isinstance(work, SummedFit | SummedProbe):
            return work, add_words(learner, work, self.local, mine)
        if isinstance(work, Probe):
            raise Malformed("bad_task", "a probe leaves nothing on the device")
        result = fit_probe.run_fit(learner, work, self.local.train, own=mine.own(slot))
        return work, SummedAnswer(words=np.zeros(0, np.uint32), own=(slot, result.vector.astype(np.float32)))

    def _probe(self, learner: Learner, task: Probe, own: OwnModelReader) -> TaskResult:
        schema, shares = learner.program.schema, list[Array]()
        reply = fit_probe.run_probe(learner, task, self.local, own=lambda slot: own(slot, schema), keep=shares.append)
        data = codecs.encode_stats(reply, schema)
        posterior = shares[0] if shares else None
        return TaskResult(what="stats", data=data, n=reply.n, metrics={}, schema=schema, posterior=posterior)


def _own_model_result(result: fit_probe.FitResult, task: Fit, schema: Schema, n: int) -> TaskResult:
    """The model stays in its slot; only its mean training loss is uploaded."""
    data = codecs.encode_stats(Reply(n=n, losses=np.array([result.loss])), schema)
    own = (task.slot, result.vector.astype(np.float32))
    return TaskResult(what="stats", data=data, n=n, metrics={"loss": result.loss}, schema=schema, own=own)


def _update_result(
    result: fit_probe.FitResult, task: Fit, message: Mapping[str, Any], schema: Schema, n: int, residual: ResidualReader
) -> TaskResult:
    """The difference to the base that the task names, in float32 so that both sides subtract the same numbers."""
    vector = result.vector.astype(np.float32)
    name, base = _delta_base(task, message)
    delta = vector if base is None else vector - base.astype(np.float32)
    codec, rest = message["reply"]["codec"], None
    if codec == "i8":
        data, rest = codecs.encode_with_feedback(delta, residual(schema), schema, codec=codec, base=name)
    else:
        data = codecs.encode_vector(delta, schema, codec=codec, kind="delta", base=name)
    metrics = {"loss": result.loss}
    return TaskResult(
        what="delta", data=data, n=n, metrics=metrics, schema=schema, own=(task.slot, vector), residual=rest
    )


def _delta_base(task: Fit, message: Mapping[str, Any]) -> tuple[str, Flat | None]:
    """-> (the base's sha256 or "zero", its values [schema.size]); the message was checked to hold what it names."""
    named = message["reply"]["base"]
    if named == "anchor" and message["anchor"] == "start":
        named = "start"
    if named == "zero":
        return named, None
    vector = task.start if named == "start" else task.anchor
    if not isinstance(vector, np.ndarray):
        raise Malformed("bad_task", f"the reply's base is {named}, but no such model was sent")
    return message[named]["sha256"], vector
