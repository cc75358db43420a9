"""The federation's training program: compiled once for each engine, signed, and read from the store at every restart.

torch is imported only to compile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from coordinator.config import CoordinatorConfig
from coordinator.identity.signing_key import SigningKey
from coordinator.storage import state_codec
from coordinator.storage.store import Store
from edge_client.errors import ConfigError
from edge_client.protocol.blocks import Manifest, manifest_of
from edge_client.protocol.messages import canonical_json, parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program
from edge_client.protocol.task import Flat
from edge_client.rare_collection import rare_collection

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
        return self.program.containers[engine][function].manifest(function, self.block)

    def blobs(self) -> list[Manifest]:
        held = [row for files in self.program.containers.values() for row in files.items()]
        return [self.manifest, *{file.sha256: file.manifest(name, self.block) for name, file in held}.values()]


def prepare_program(  # noqa: PLR0913 - the parts of a compilation
    config: CoordinatorConfig,
    store: Store,
    key: SigningKey,
    engines: Collection[str],
    *,
    trained: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    compute: Callable[[Callable[[], str]], str] = lambda work: work(),
) -> CompiledProgram:
    """The stored program, compiled for those of `engines` that it has no containers for.

    `compute` calls the compiler, `progress` is told of each part, and after the training (`trained`) what it is for.
    Raises ConfigError when the model is another one than that of the stored program.
    """
    stored = known = store.facts.get(PROGRAM_FACT)
    missing = [engine for engine in config.compiled_engines if engine in engines]
    if stored is not None:
        missing = [engine for engine in missing if engine not in _read(store, json.loads(stored)["program"]).containers]
    if stored is None or missing:
        progress(f"model {config.model.name} for {', '.join(missing)}{_why(config, missing) if trained else ''}")
        stored = compute(lambda: _compile(config, store, missing, known, progress))
    facts = json.loads(stored)
    data, program = store.blobs.read(facts["program"]), _read(store, facts["program"])
    if len(names := config.bundle.class_names) > program.classes:
        wrong = f"class-names has {len(names)} names, the model {program.classes} classes"
        raise ConfigError(wrong, hint="name each class once, from 0")
    if stored != known:  # now: of a refused start nothing is kept, and the next one may name another model
        store.facts.put(PROGRAM_FACT, stored)

    def sign(manifest: Manifest) -> Manifest:
        return key.sign_manifest(manifest, config.federation)

    return CompiledProgram(
        program=program,
        manifest=sign(manifest_of(data, "program", block=config.transfer.block)),
        initial=state_codec.decode_array(store.blobs.read(facts["initial"])),
        block=config.transfer.block,
        sign=sign,
    )


def _read(store: Store, sha256: str) -> Program:
    return Program.from_json(parse_json(store.blobs.read(sha256), MAX_PROGRAM_BYTES))


def _why(config: CoordinatorConfig, engines: Collection[str]) -> str:
    """What the engines are needed for that no device of the training had, or none has had so far."""
    reasons = []
    if config.bundle.formats and "pt2" in engines:
        reasons.append("the bundle's files are made from pt2")
    if set(engines) & set(config.model.engines):
        reasons.append("devices that never trained may have any of `engines`")
    return "".join(f"; {reason}" for reason in reasons)


def _compile(
    config: CoordinatorConfig,
    store: Store,
    engines: Collection[str],
    before: str | None,
    progress: Callable[[str], None],
) -> str:
    """Build the model, trace it for each engine, store every file; -> the fact that names them beside `before`."""
    with rare_collection():  # imports torch
        from coordinator.models.compiled import compiled_model
        from coordinator.models.registry import build_model
        from export.compiler.program import vector_of

    model = build_model(config.model.name, seed=config.seed)
    compiled = compiled_model(model, batch=config.model.batch_size, engines=tuple(engines), progress=progress)
    program, initial = compiled.program, vector_of(model.module, compiled.program.schema)
    if before is not None:
        facts = json.loads(before)
        program = _merged(_read(store, facts["program"]), program)
        initial = state_codec.decode_array(store.blobs.read(facts["initial"]))
    return put_program(store, program, compiled.files.values(), initial)


def put_program(store: Store, program: Program, files: Iterable[bytes], initial: Flat) -> str:
    """Store a program, new containers and the initial model [schema.size]; -> the value of PROGRAM_FACT."""
    for data in files:
        store.blobs.put(data)
    kept = store.blobs.put(canonical_json(program.to_json()))
    return json.dumps({"program": kept, "initial": store.blobs.put(state_codec.encode_array(initial))})


def _merged(old: Program, new: Program) -> Program:
    """`old` with the engines of `new`."""
    if any(getattr(old, fact) != getattr(new, fact) for fact in ("schema", "frozen", "functions", "loss", "own_loss")):
        raise ConfigError(
            f"model {old.model} is not the one that this federation's program was compiled from",
            hint="restore the model's code, or choose another `folder`",
        )
    return replace(
        old,
        containers={**old.containers, **new.containers},
        batch={**old.batch, **new.batch},
        parity={**old.parity, **new.parity},
        golden={**old.golden, **new.golden},
    )
