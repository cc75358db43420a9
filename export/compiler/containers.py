"""The containers of a program: every function traced, then written for each engine, or read from the cache.

A container is cached when it is ready, so a run that is killed goes on where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch.export import ExportedProgram

from edge_client.errors import ProgramRefused
from edge_client.protocol.program import FROZEN, FUNCTIONS, BatchSize
from export.compiler.container_cache import cached_file, constants_hash, container_key
from export.compiler.decompositions.supported_ops import TORCH_ALONE
from export.compiler.forward_pass import ForwardPasses
from export.compiler.operator_watch import Untraceable, one_size_only
from export.compiler.program_functions import TraceSource, example_inputs, function_ports
from export.compiler.tracing import export_graph, groups_are_samples, holds, inference_graph, trace_function
from export.containers.flat_graph import FlatGraph
from export.containers.quick_conversion import quick_conversion
from export.containers.write_onnx import to_onnx
from export.containers.write_pt2 import to_pt2
from export.containers.write_tflite import to_tflite
from export.diagnostics import converter_missing, first_sentence, raise_for_machine

EXAMPLE_BATCH = 13  # where the batch is dynamic; a size that layers and sequences seldom have
Progress = Callable[[str], None]  # called with what is worked on, like "onnx step"
log = logging.getLogger(__name__)


def log_progress(what: str) -> None:
    """The progress of a compiler that has no other listener."""
    log.info("compiling %s", what)


@dataclass(frozen=True, kw_only=True)
class Containers:
    """`files`: engine -> function -> file; for onnx and pt2 FROZEN -> the frozen parameters, which a .tflite holds.

    `batch`: engine -> the batch size that its files take.
    """

    files: Mapping[str, Mapping[str, bytes]]
    batch: Mapping[str, BatchSize]


def make_containers(source: TraceSource, engines: Sequence[str], batch: int, progress: Progress) -> Containers:
    """Files for any batch size; for `batch` alone those of LiteRT, and of a model that torch traces for one size only.

    Raises ProgramRefused for what an exporter cannot convert.
    """
    out: dict[str, dict[str, bytes]] = {engine: {} for engine in engines}
    passes = ForwardPasses(source)
    fixed = None
    with quick_conversion():
        if {"onnx", "pt2"} & set(engines):
            try:
                found = _graph_files(passes, engines, None, progress)
            except Untraceable as refused:
                fixed = batch
                try:
                    found = _graph_files(passes, engines, fixed, progress)
                except ProgramRefused:
                    raise refused from None
                log.warning("%s: its files take batches of %s samples only", refused.message, batch)
            out |= found
        if "litert" in engines:
            out["litert"] = dict.fromkeys(FUNCTIONS, _litert_file(passes, batch, progress))
    if source.frozen is not None:
        for engine in {"onnx", "pt2"} & set(engines):
            out[engine][FROZEN] = source.frozen.file
    sizes: dict[str, BatchSize] = {e: batch if e == "litert" else "any" if fixed is None else fixed for e in engines}
    return Containers(files=out, batch=sizes)


def _graph_files(
    passes: ForwardPasses, engines: Sequence[str], fixed: int | None, progress: Progress
) -> dict[str, dict[str, bytes]]:
    """Of onnx and pt2: engine -> function -> file, for any batch size or a fixed one."""
    out: dict[str, dict[str, bytes]] = {engine: {} for engine in engines if engine != "litert"}

    @cache
    def traced(function: str, *, for_torch: bool) -> FlatGraph:
        if function == "infer":
            return inference_graph(passes.source, traced("evaluate", for_torch=for_torch))
        batch = fixed or EXAMPLE_BATCH
        return trace_function(passes, function, batch=batch, dynamic=fixed is None, for_torch=for_torch)

    for function in FUNCTIONS:
        made = _function_files(passes.source, function, partial(traced, function), engines, fixed, progress)
        for engine, file in made.items():
            out[engine][function] = file
    return out


def _function_files(
    source: TraceSource,
    function: str,
    traced: Callable[..., FlatGraph],
    engines: Sequence[str],
    fixed: int | None,
    progress: Progress,
) -> dict[str, bytes]:
    ports = function_ports(source, function)
    size: BatchSize = "any" if fixed is None else fixed

    @cache
    def exported(graph: FlatGraph) -> ExportedProgram:
        return export_graph(source, function, graph, batch=fixed or EXAMPLE_BATCH, dynamic=fixed is None)

    def onnx(graph: FlatGraph) -> bytes:
        program = exported(graph)
        with refusal_context(source, "onnx"):
            inputs = [*(p.name for p in ports.inputs), *(f"{FROZEN}/{name}" for name in source.frozen_names)]
            return to_onnx(program, inputs, [p.name for p in ports.outputs])

    made, own = {}, None
    if "pt2" in engines:
        progress(f"pt2 {function}")
        own = traced(for_torch=True)
        made["pt2"] = cached_file(_key("pt2", source, {function: own}, size), lambda: to_pt2(exported(own)))
    if "onnx" in engines:
        progress(f"onnx {function}")
        graph = own if own is not None and not holds(own, TORCH_ALONE) else traced(for_torch=False)
        if groups_are_samples(graph):
            raise one_size_only(source)
        made["onnx"] = cached_file(_key("onnx", source, {function: graph}, size), lambda: onnx(graph))
    return made


def _litert_file(passes: ForwardPasses, batch: int, progress: Progress) -> bytes:
    progress("litert")
    source = passes.source
    graphs = {f: trace_function(passes, f, batch=batch, dynamic=False, closed=True) for f in ("step", "evaluate")}
    graphs["infer"] = inference_graph(source, graphs["evaluate"])

    def make() -> bytes:
        with refusal_context(source, "litert"):
            return to_tflite({f: (graph, example_inputs(source, f, batch)) for f, graph in graphs.items()})

    return cached_file(_key("litert", source, graphs, batch), make)


def _key(engine: str, source: TraceSource, graphs: dict[str, FlatGraph], batch: BatchSize) -> str | None:
    def rows(function: str) -> list[Any]:
        ports = function_ports(source, function)
        held = [] if source.frozen is None else [[t.name, t.shape] for t in source.frozen.schema.tensors]
        return [[p.name, p.dtype, p.shape] for p in (*ports.inputs, *ports.outputs)] + held

    return container_key(
        engine,
        {f: graph.graph for f, graph in graphs.items()},
        ports={f: rows(f) for f in graphs},
        constants=constants_hash([value for graph in graphs.values() for value in graph.buffers()]),
        batch=batch,
    )


class refusal_context:  # noqa: N801 - reads as a word in a with statement
    """What an exporter cannot convert is a refusal that names the model and the engine; one that is missing says so."""

    def __init__(self, source: TraceSource, engine: str) -> None:
        self.source, self.engine = source, engine

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, wrong: BaseException | None, _trace: object) -> None:
        if isinstance(wrong, ImportError):
            raise converter_missing(wrong) from wrong
        if isinstance(wrong, Exception):
            raise_for_machine(wrong)
            raise ProgramRefused(
                f"model {self.source.name!r} cannot be written for {self.engine}: {first_sentence(wrong)}",
                hint=f"leave {self.engine} out of the engines, or replace the layer that uses this operator",
            ) from wrong
