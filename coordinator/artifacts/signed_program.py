"""The federation's training program: compiled and signed once, then read from the store at every restart.

torch is imported only to compile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.config import CoordinatorConfig
from coordinator.identity.signing_key import SigningKey
from coordinator.storage import state_codec
from coordinator.storage.store import Store
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Container, Program
from edge_client.protocol.task import Flat

PROGRAM_FACT = "program"  # the key of the program's and the initial model's hashes in the store's facts


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A program, its signed manifest, and the initial model [schema.size] float32 of every run."""

    program: Program
    manifest: Manifest
    initial: Flat
    block: int
    sign: Callable[[Manifest], Manifest]  # for every other manifest that a device must trust

    def container(self, engine: str, function: str) -> Manifest:
        return _named(self.program.containers[engine][function], self.block)

    def blobs(self) -> list[Manifest]:
        files = {c.sha256: c for functions in self.program.containers.values() for c in functions.values()}
        return [self.manifest, *(_named(c, self.block) for c in files.values())]


def prepare_program(
    config: CoordinatorConfig,
    store: Store,
    key: SigningKey,
    *,
    progress: Callable[[str], None] = lambda _: None,
    compute: Callable[[Callable[[], str]], str] = lambda work: work(),
) -> CompiledProgram:
    """The stored program, or a newly compiled one: `compute` calls the compiler, `progress` is told of each part."""

    def make() -> str:
        return compute(lambda: _compile(config, store, progress))

    facts = json.loads(store.facts.get_or_make(PROGRAM_FACT, make))
    data = store.blobs.read(facts["program"])

    def sign(manifest: Manifest) -> Manifest:
        return key.sign_manifest(manifest, config.federation)

    return CompiledProgram(
        program=Program.from_json(parse_json(data, MAX_PROGRAM_BYTES)),
        manifest=sign(manifest_of(data, "program", block=config.transfer.block)),
        initial=state_codec.decode_array(store.blobs.read(facts["initial"])),
        block=config.transfer.block,
        sign=sign,
    )


def _compile(config: CoordinatorConfig, store: Store, progress: Callable[[str], None]) -> str:
    """Build the model, trace it for each engine, store every file; -> the fact that names them."""
    from coordinator.models.registry import build_model

    progress(f"model {config.model.name} for {', '.join(config.compiled_engines)}")
    from export.compiler.program import compile_program, vector_of

    model = build_model(config.model.name, seed=config.seed)
    compiled = compile_program(
        model.module,
        name=model.name,
        input=model.input,
        target=model.output,
        loss=model.loss,
        batch=config.model.batch_size,
        engines=config.compiled_engines,
        progress=progress,
    )
    for data in compiled.files.values():
        store.blobs.put(data)
    program = store.blobs.put(canonical_json(compiled.program.to_json()))
    initial = store.blobs.put(state_codec.encode_array(vector_of(model.module, compiled.program.schema)))
    return json.dumps({"program": program, "initial": initial})


def _named(container: Container, block: int) -> Manifest:
    return Manifest(sha256=container.sha256, size=container.size, block=block, kind="container")
