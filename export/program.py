"""A torch model becomes a training program: containers for the engines and the manifest that describes them.

    compiled = compile_program(module, name="my-cnn", input=(1, 28, 28), classes=10)
    compiled.program     what devices read (program.json)
    compiled.files       sha256 -> bytes of each container

Files carry no weights: weights are inputs, so one program serves every center, round and method. What cannot be
expressed is refused here, naming the operator and the layer; a device never finds out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import numpy as np
import torch
from torch import nn

from edge_client.errors import ProgramRefused, UsageError
from edge_client.protocol.program import FUNCTIONS, Batch, Container, Program
from edge_client.protocol.task import Flat, Schema, TensorSpec
from export.functions import GRAPHS, Loss, Source, example, ports, private_copy
from export.onnx import OPSET, run_onnx, to_onnx
from export.pt2 import run_pt2, to_pt2
from export.tflite import open_tflite, to_tflite
from export.tracing import exported, trace

ENGINES = ("onnx", "litert", "pt2")
EXAMPLE_BATCH = 6  # where the batch is dynamic; not a size that layers like to have
LARGEST_DIFFERENCE = 1e-4  # relative; float32 steps differ by about 1e-6, a wrong graph by about 1


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
    try:
        with torch.no_grad():
            out = mine.eval()(torch.zeros(2, *input, dtype=getattr(torch, dtype)))
    except (RuntimeError, ValueError, TypeError) as wrong:
        raise ProgramRefused(
            f"model {name!r} does not take samples of shape {tuple(input)}: {wrong}",
            hint="check the model's input shape",
        ) from wrong
    if tuple(out.shape) != (2, classes):
        raise ProgramRefused(
            f"model {name!r} gives {tuple(out.shape)} for 2 samples, expected (2, {classes})",
            hint="a training program needs one row of logits or targets per sample",
        )
    return source


def schema_of(module: nn.Module, classifier: Sequence[str] | None = None) -> Schema:
    """Parameters then buffers in torch's order, integer buffers left out.

    `classifier`: parameter names; by default the weight and bias of the last linear or convolution layer.
    """
    params = [TensorSpec(name=n, role="p", shape=tuple(p.shape)) for n, p in module.named_parameters()]
    buffers = [
        TensorSpec(name=n, role="b", shape=tuple(b.shape)) for n, b in module.named_buffers() if b.is_floating_point()
    ]
    frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
    if not params or frozen:
        what = f"parameters {frozen} are frozen" if frozen else "it has no parameters"
        raise ProgramRefused(f"this model cannot be trained: {what}", hint="give every parameter requires_grad=True")
    return Schema((*params, *buffers), tuple(_last_layer(module) if classifier is None else classifier))


def _last_layer(module: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = [name for name, layer in module.named_modules() if isinstance(layer, kinds)]
    prefix = f"{layers[-1]}." if layers and layers[-1] else ""
    return (
        [n for n, _ in module.named_parameters() if n.startswith(prefix) and "." not in n[len(prefix) :]]
        if layers
        else []
    )


def vector_of(module: nn.Module, schema: Schema) -> Flat:
    """The module's weights and buffers as one vector [schema.size], float32 unless the module is float64."""
    state = module.state_dict()
    return schema.join({t.name: state[t.name].detach().cpu().numpy().copy() for t in schema.tensors})


def load_vector(module: nn.Module, schema: Schema, flat: Flat) -> None:
    """Write a vector [schema.size] into the module, in place."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
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
    """The largest difference of any function from torch, relative to each output's largest value."""
    worst = max(_difference(source, engine, function, files[function], batch) for function in FUNCTIONS)
    if not worst < LARGEST_DIFFERENCE:
        raise ProgramRefused(
            f"model {source.name!r} on {engine} differs from torch by {worst:.1e}, limit {LARGEST_DIFFERENCE:.0e}",
            hint=f"leave {engine} out of the engines and report the model",
        )
    return worst


def _difference(source: Source, engine: str, function: str, file: bytes, batch: int) -> float:
    args = example(source, function, batch, seed=1)
    # Torch in float64: in float32 it is itself 5e-5 off where a gradient is a difference, as before a batch norm.
    truth = replace(source, module=private_copy(source.module, "float64"), dtype="float64")
    expected = [t.detach().numpy() for t in GRAPHS[function](truth)(*[a.double() for a in args])]
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
