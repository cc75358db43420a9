"""Is a written program the model that it was made from? Each container runs beside torch, on the same inputs.

The inputs are those that find mistakes: w != anchor, velocity and linear not zero, q not constant, half of the samples
flat so that every window of every pool ties. Torch runs the model itself through autograd, sharing no formula with what
was traced, and in float64: its own float32 step is up to 5e-5 off where a gradient is a difference of large sums.
Differences are relative to the largest value of each output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array
from export.folder import Folder, files_of, read_folder
from export.functions import Source, example, ports, private_copy
from export.onnx import run_onnx
from export.program import LARGEST_DIFFERENCE, source_of
from export.pt2 import run_pt2
from export.tflite import open_tflite

TOLERANCE = LARGEST_DIFFERENCE  # what compiling itself allows; float32 differs by about 1e-6, a wrong graph by about 1
BATCHES = (8, 3)  # of engines that take any size
SEED = 2  # not the inputs that compiling measured with


def check_folder(
    path: Path, module: nn.Module, *, tolerance: float = TOLERANCE, seed: int = SEED
) -> list[dict[str, Any]]:
    """Check hashes, then compare. One row per file and function: file, engine, function, batches, difference, ok.

    Raises ConfigError or Malformed for a folder that is not whole, ProgramRefused for another model's program.
    """
    folder = read_folder(path)
    program = folder.program
    source = source_of(
        module, name=program.model, input=program.input, classes=program.classes, loss=program.loss, dtype=program.dtype
    )
    _refuse_other(program, source)
    rows = []
    for file in files_of(program):
        fixed = program.batch[file.engine]
        batches = BATCHES if fixed == "any" else (fixed,)
        for function in file.functions:
            found = [_difference(source, folder, file.name, function, batch=b, seed=seed) for b in batches]
            worst = max(found) if np.isfinite(found).all() else float("inf")
            row = {"file": file.name, "engine": file.engine, "function": function, "batches": list(batches)}
            rows.append({**row, "difference": worst, "ok": worst <= tolerance})
    return rows


def _refuse_other(program: Program, source: Source) -> None:
    mine, theirs = source.schema.tensors, program.schema.tensors
    if mine != theirs:
        differ = next((f"{t.name} {list(t.shape)}" for m, t in zip(mine, theirs, strict=False) if m != t), "fewer")
        raise ProgramRefused(
            f"the program was made from another model: {len(theirs)} tensors, and this one has {len(mine)}; "
            f"the first that differs there: {differ}",
            hint="give the --model and --model-args that it was compiled with",
        )
    if any(ports(source, name) != function for name, function in program.functions.items()):
        raise ProgramRefused(
            "program.json lists other inputs than this version writes", hint="compile the program again"
        )


def _difference(source: Source, folder: Folder, name: str, function: str, *, batch: int, seed: int) -> float:
    args = hard_inputs(source, function, batch=batch, seed=seed)
    names = ports(source, function)
    inputs = [p.name for p in names.inputs]
    answers = torch_step if function == "step" else torch_evaluate
    truth = answers(source, {n: a.double() for n, a in zip(inputs, args, strict=True)})
    expected = [truth[p.name].detach().numpy() for p in names.outputs]
    try:
        got = _run(name, folder.blobs[name], function, inputs, args)
    except ImportError:
        raise
    except Exception as wrong:  # each runtime raises its own kinds for a file that it cannot load
        text = (str(wrong).strip().splitlines() or [repr(wrong)])[0][:300]
        raise ProgramRefused(f"{name} cannot be run: {text}", hint="compile the program again") from wrong
    if len(got) != len(expected):
        raise ProgramRefused(
            f"{name} gives {len(got)} outputs, {len(expected)} expected", hint="compile the program again"
        )
    return max(_relative(g, e) for g, e in zip(got, expected, strict=True))


def torch_step(source: Source, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One proximal step by torch's autograd on the model itself, float64; by the names of the outputs."""
    net = _loaded(source, given).train()
    moving = {n: p for n, p in net.named_parameters() if f"w/{n}" in given}
    loss = (given["q"] * _loss(source, net(given["x"]), given["y"])).sum()
    grads = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
    out = {f"buffers/{n}": b for n, b in net.named_buffers()}
    for (n, p), grad in zip(moving.items(), grads, strict=True):
        pull = given[f"linear/{n}"] + given["mu"] * (p.detach() - given[f"anchor/{n}"])
        velocity = given["momentum"] * given[f"velocity/{n}"] + pull + (0 if grad is None else grad)
        out |= {f"velocity/{n}": velocity, f"w/{n}": p.detach() - given["lr"] * velocity}
    return {**out, "loss": loss}


def torch_evaluate(source: Source, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Logits, and the loss per sample where there are targets; batch norm in inference mode."""
    with torch.no_grad():
        logits = _loaded(source, given).eval()(given["x"])
        return {"logits": logits} | ({"loss": _loss(source, logits, given["y"])} if "y" in given else {})


def _loaded(source: Source, given: Mapping[str, Tensor]) -> nn.Module:
    """A float64 copy with the weights and buffers of `given`; what those do not name stays as it is."""
    net = private_copy(source.module, "float64")
    state = {f"w/{n}": p for n, p in net.named_parameters()} | {f"buffers/{n}": b for n, b in net.named_buffers()}
    with torch.no_grad():
        for name in state.keys() & given.keys():
            state[name].copy_(given[name])
    return net


def _loss(source: Source, out: Tensor, y: Tensor) -> Tensor:
    if source.loss == "cross-entropy":
        return nn.functional.cross_entropy(out, y, reduction="none")
    return (out - y).square().flatten(1).mean(1)


def hard_inputs(source: Source, function: str, *, batch: int, seed: int) -> list[Tensor]:
    """`example`, with the first half of the samples flat."""
    args = example(source, function, batch, seed=seed)
    at = [p.name for p in ports(source, function).inputs].index("x")
    args[at][: batch // 2] = 0
    return args


def _run(name: str, file: bytes, function: str, inputs: Sequence[str], args: Sequence[Tensor]) -> list[Array]:
    arrays = [a.numpy() for a in args]
    ending = name.rpartition(".")[2]
    if ending == "onnx":
        return run_onnx(file, dict(zip(inputs, arrays, strict=True)))
    if ending == "tflite":
        out: Mapping[str, Array] = open_tflite(file, function)({f"args_{i}": a for i, a in enumerate(arrays)})
        return [out[f"output_{i}"] for i in range(len(out))]
    if ending == "pt2":
        return [t.detach().numpy() for t in run_pt2(file, args)]
    raise ProgramRefused(f"{name} is for an engine that this version does not know", hint="update fedcenters")


def _relative(got: Array, expected: Array) -> float:
    if got.shape != expected.shape:
        return float("inf")
    return float(np.abs(got - expected).max() / max(1e-6, float(np.abs(expected).max())))
