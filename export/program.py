"""A torch model becomes a training program: containers for the engines and the manifest that describes them.

    compiled = compile_program(module, name="my-cnn", input=(1, 28, 28), classes=10)
    compiled.program     what devices read (program.json)
    compiled.files       sha256 -> bytes of each container

Files carry no trained weights: these are inputs, so one program serves every center, round and method. Frozen ones are
constants of the files: a device fetches them once, and no round sends them. What cannot be expressed is refused here,
naming the operator and the layer; a device never finds out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import numpy as np
import torch
from torch import nn

from edge_client.errors import ProgramRefused, UsageError
from edge_client.protocol.program import FUNCTIONS, Batch, Container, Program
from edge_client.protocol.task import Flat, Schema, TensorSpec
from export.functions import GRAPHS, Loss, Source, call, example, places, ports, private_copy, tensors_of
from export.onnx import OPSET, run_onnx, to_onnx
from export.pt2 import run_pt2, to_pt2
from export.tflite import open_tflite, to_tflite
from export.tracing import exported, trace

ENGINES = ("onnx", "litert", "pt2")
EXAMPLE_BATCH = 6  # where the batch is dynamic; not a size that layers like to have
LARGEST_DIFFERENCE = 1e-4  # relative; float32 steps differ by about 1e-6, a wrong graph by about 1
DRAWS = 4  # inputs that a file may be measured with, see `_parity`


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The manifest and the containers by hash."""

    program: Program
    files: Mapping[str, bytes] = field(repr=False)


def compile_program(  # noqa: PLR0913 - the facts of a model
    module: nn.Module,
    *,
    name: str,
    input: tuple[int, ...],  # noqa: A002 - the manifest's word
    classes: int,
    loss: Loss = "cross-entropy",
    dtype: str = "float32",
    batch: int = 32,
    engines: Sequence[str] = ENGINES,
) -> Compiled:
    """Trace, convert and measure. `batch` is the batch size of engines that need a fixed one (LiteRT).

    The module is left as it was. Raises ProgramRefused when the model cannot be expressed for one of `engines`.
    """
    source = source_of(module, name=name, input=input, classes=classes, loss=loss, dtype=dtype)
    _check_engines(source, engines)
    blobs = _containers(source, engines, batch)
    files = {hashlib.sha256(blob).hexdigest(): blob for functions in blobs.values() for blob in functions.values()}
    program = Program(
        model=name,
        loss=loss,
        optimizer="sgd",
        schema=source.schema,
        input=tuple(input),
        classes=classes,
        dtype=dtype,
        functions={f: ports(source, f) for f in FUNCTIONS},
        containers={
            engine: {f: Container(sha256=hashlib.sha256(b).hexdigest(), size=len(b)) for f, b in functions.items()}
            for engine, functions in blobs.items()
        },
        batch={engine: _batch(engine, batch) for engine in engines},
        opset=OPSET,
        versions={"torch": torch.__version__, **{p: version(p) for p in ("onnxscript", "litert-torch")}},
    )
    parity = {engine: _parity(source, engine, blobs[engine], batch) for engine in engines}
    return Compiled(program=replace(program, parity=parity), files=files)


def source_of(
    module: nn.Module,
    *,
    name: str,
    input: tuple[int, ...],  # noqa: A002 - the manifest's word
    classes: int,
    loss: Loss = "cross-entropy",
    dtype: str = "float32",
) -> Source:
    """What the tracer works on: a private copy of the module and the facts about it, checked against each other."""
    mine = private_copy(module, dtype)
    source = Source(
        name=name, module=mine, schema=schema_of(mine), input=tuple(input), classes=classes, loss=loss, dtype=dtype
    )
    _check_answers(source)
    _check_constants(source)
    return source


def _check_answers(source: Source) -> None:
    """One row per sample, which does not depend on the other samples: devices pad batches when they evaluate."""
    samples = example(source, "infer", 3)[-1]
    network = source.module.eval()
    try:
        with torch.no_grad():
            out, others = network(samples[:2]), network(samples[1:])
    except (RuntimeError, ValueError, TypeError, IndexError) as wrong:
        raise ProgramRefused(
            f"model {source.name!r} does not take samples of shape {source.input}: {wrong}",
            hint="check the model's input shape",
        ) from wrong
    if tuple(out.shape) != (2, source.classes):
        raise ProgramRefused(
            f"model {source.name!r} gives {tuple(out.shape)} for 2 samples, expected (2, {source.classes})",
            hint="a training program needs one row of logits or targets per sample",
        )
    if not float((out[1] - others[0]).abs().max()) <= LARGEST_DIFFERENCE * max(1.0, float(out.abs().max())):
        raise ProgramRefused(
            f"model {source.name!r} answers a sample differently in other company, even in inference mode",
            hint="let batch norm keep running statistics (track_running_stats=True)",
        )


def _check_constants(source: Source) -> None:
    """What a training pass writes must be a float buffer that torch saves: only those come back from a step."""
    state = {name: value.clone() for name, value in tensors_of(source.module).items()}
    versions = {name: value._version for name, value in state.items()}  # noqa: SLF001 - no other way to see a write
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        _, held = call(source.module.train(), state, example(source, "infer", 2)[-1])
    shared = Counter(places(source.module).values())
    written = [
        name
        for place, name in places(source.module).items()
        if (name in source.constants and (held[place] is not state[name] or state[name]._version != versions[name]))  # noqa: SLF001
        or (shared[name] > 1 and held[place] is not state[name])
    ]
    if written:
        raise ProgramRefused(
            f"model {source.name!r} writes {', '.join(written)} when it trains, which no step can give back",
            hint="use a buffer of floating point numbers with persistent=True, in one place",
        )


def schema_of(module: nn.Module, classifier: Sequence[str] | None = None) -> Schema:
    """What travels, in torch's order: trainable parameters, then the float buffers that torch saves.

    Frozen parameters and other buffers stay in the program. A shared parameter counts once, under its first name.
    `classifier`: parameter names; by default those of the last linear or convolution layer with something to train.
    """
    params = [
        TensorSpec(name=n, role="p", shape=tuple(p.shape)) for n, p in module.named_parameters() if p.requires_grad
    ]
    saved = module.state_dict()
    buffers = [
        TensorSpec(name=n, role="b", shape=tuple(b.shape))
        for n, b in module.named_buffers()
        if b.is_floating_point() and n in saved
    ]
    if not params:
        frozen = any(True for _ in module.parameters())
        raise ProgramRefused(
            f"this model cannot be trained: {'every parameter is frozen' if frozen else 'it has no parameters'}",
            hint="give some parameter requires_grad=True",
        )
    return Schema((*params, *buffers), tuple(_last_layer(module) if classifier is None else classifier))


def _last_layer(module: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}  # a shared one by its first name
    for layer in reversed([layer for layer in module.modules() if isinstance(layer, kinds)]):
        own = [names[id(p)] for p in layer.parameters(recurse=False) if id(p) in names]
        if own:
            return own
    return []


def vector_of(module: nn.Module, schema: Schema) -> Flat:
    """The module's weights and buffers as one vector [schema.size], float32 unless the module is float64."""
    state = tensors_of(module)
    return schema.join({t.name: state[t.name].cpu().numpy().copy() for t in schema.tensors})


def load_vector(module: nn.Module, schema: Schema, flat: Flat) -> None:
    """Write a vector [schema.size] into the module, in place."""
    state = tensors_of(module)
    with torch.no_grad():
        for name, value in schema.split(flat).items():
            state[name].copy_(torch.from_numpy(np.array(value)))


def _check_engines(source: Source, engines: Sequence[str]) -> None:
    unknown = sorted(set(engines) - set(ENGINES))
    if unknown or not engines:
        raise UsageError(f"unknown engine {', '.join(unknown) or '(none)'}", hint=f"use some of {', '.join(ENGINES)}")
    if source.dtype == "float64" and "litert" in engines:
        raise ProgramRefused("LiteRT has no float64", hint="compile float64 programs for onnx and pt2 only")


def _batch(engine: str, batch: int) -> Batch:
    return batch if engine == "litert" else "any"


def _containers(source: Source, engines: Sequence[str], batch: int) -> dict[str, dict[str, bytes]]:
    """Engine -> function -> file."""
    out: dict[str, dict[str, bytes]] = {}
    if {"onnx", "pt2"} & set(engines):
        for function in FUNCTIONS:
            graph = trace(source, function, batch=EXAMPLE_BATCH, dynamic=True)
            made = exported(source, function, graph, batch=EXAMPLE_BATCH)
            if "pt2" in engines:
                out.setdefault("pt2", {})[function] = to_pt2(made)
            if "onnx" in engines:
                names = ports(source, function)
                with _naming(source, "onnx"):
                    file = to_onnx(made, [p.name for p in names.inputs], [p.name for p in names.outputs])
                out.setdefault("onnx", {})[function] = file
    if "litert" in engines:
        signatures = {f: (trace(source, f, batch=batch, dynamic=False), example(source, f, batch)) for f in FUNCTIONS}
        with _naming(source, "litert"):
            file = to_tflite(signatures)
        out["litert"] = dict.fromkeys(FUNCTIONS, file)
    return {engine: out[engine] for engine in engines}


class _naming:  # noqa: N801 - reads as a word in a with statement
    """What an exporter cannot convert is a refusal that names the model and the engine."""

    def __init__(self, source: Source, engine: str) -> None:
        self.source, self.engine = source, engine

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, wrong: BaseException | None, _trace: object) -> None:
        if isinstance(wrong, Exception):
            text = str(wrong).strip().splitlines()
            raise ProgramRefused(
                f"model {self.source.name!r} cannot be written for {self.engine}: {text[0] if text else wrong!r}",
                hint=f"leave {self.engine} out of the engines, or replace the layer that uses this operator",
            ) from wrong


def _parity(source: Source, engine: str, files: Mapping[str, bytes], batch: int) -> float:
    """The largest difference of any function from torch, relative to each output's largest value.

    A wrong graph differs at every draw. A right one may too at one of them: where a large network has a value next to
    the kink of a ReLU, rounding alone decides the side, and with it a gradient.
    """
    if batch == EXAMPLE_BATCH and _batch(engine, batch) == "any":
        batch += 1  # a graph that is right for the size it was traced with only must not pass
    for draw in range(1, DRAWS + 1):
        with _naming(source, engine):
            worst = max(_difference(source, engine, function, files[function], batch, draw) for function in FUNCTIONS)
        if worst < LARGEST_DIFFERENCE:
            break
    else:
        raise ProgramRefused(
            f"model {source.name!r} on {engine} differs from torch by {worst:.1e}, limit {LARGEST_DIFFERENCE:.0e}",
            hint=f"leave {engine} out of the engines and report the model",
        )
    return worst


def _difference(source: Source, engine: str, function: str, file: bytes, batch: int, draw: int) -> float:
    args = example(source, function, batch, seed=draw)
    # Torch in float64: in float32 it is itself 5e-5 off where a gradient is a difference, as before a batch norm.
    truth = replace(source, module=private_copy(source.module, "float64"), dtype="float64")
    expected = [
        t.detach().numpy() for t in GRAPHS[function](truth)(*[a.double() for a in args], *truth.constants.values())
    ]
    arrays = [a.numpy() for a in args]
    if engine == "onnx":
        got = run_onnx(file, dict(zip((p.name for p in ports(source, function).inputs), arrays, strict=True)))
    elif engine == "litert":
        out = open_tflite(file, function)({f"args_{i}": a for i, a in enumerate(arrays)})
        got = [out[f"output_{i}"] for i in range(len(out))]
    else:
        got = [t.detach().numpy() for t in run_pt2(file, args)]
    return max(
        float(np.abs(g - e).max() / max(1e-6, float(np.abs(e).max()))) for g, e in zip(got, expected, strict=True)
    )
