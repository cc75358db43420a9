"""Compiled programs for several test files, each made once in a test run, and the step in plain torch to compare with.

The comparison is always made in float64: torch's own float32 step is up to 5e-5 off (the bias before a batch norm,
whose gradient is a difference of large sums), more than the files that are compared with it.
"""

from __future__ import annotations

import copy
import fcntl
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coordinator.models.compiled import FOLDERS, packed, program_key, unpacked
from coordinator.models.registry import Model, build_model
from edge_client.engines.base import Engine, open_engine
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array
from export.compiler.container_cache import cached_file
from export.compiler.program import CompilerOutput, compile_program
from export.compiler.program_functions import vocabulary_size
from export.compiler.signatures.packed_inputs import pack_module
from tests.support.architectures import ENTRIES

BATCH = 8
SHARED = "COMPILED_PROGRAMS"  # the variable that names the folder of a test run; set in tests/conftest.py


@cache
def model(name: str) -> Model:
    """Of the registry, or of tests/support/architectures.py."""
    if name not in ENTRIES:
        return build_model(name, seed=0)
    entry = ENTRIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = pack_module(entry.make(), entry.parts) if entry.parts else entry.make()
        facts: dict[str, Any] = {"input": entry.input, "parts": entry.parts, "classes": entry.classes}
        return Model(name=name, module=module, loss=entry.loss, **facts)


@cache
def compiled(name: str, dtype: str = "float32", engines: tuple[str, ...] = ("onnx", "litert", "pt2")) -> CompilerOutput:
    """The program of a model by its name: of this process, of another one of the same test run, or a new one.

    One for more engines that is there already serves, without the others' containers.
    """
    shared = os.environ.get(SHARED)
    if not shared:
        return _compiled(name, dtype, engines)
    stem = f"program-{name}-{dtype}"
    with Path(shared, f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the other waits
        made = Path(shared).glob(f"{stem}-*.made")
        there = [path for path in made if set(engines) <= set(path.stem.removeprefix(f"{stem}-").split("-"))]
        path = there[0] if there else Path(shared, "-".join((stem, *engines)) + ".made")
        if not there:
            new = _compiled(name, dtype, engines)
            part = Path(f"{path}.part")
            part.write_bytes(packed(new))
            part.rename(path)
    return _for_engines(unpacked(path.read_bytes()), engines)


def _for_engines(made: CompilerOutput, engines: tuple[str, ...]) -> CompilerOutput:
    told = {key: getattr(made.program, key) for key in ("containers", "batch", "parity", "golden")}
    facts: dict[str, Any] = {key: {engine: found[engine] for engine in engines} for key, found in told.items()}
    used = {file.sha256 for functions in facts["containers"].values() for file in functions.values()}
    return CompilerOutput(
        program=replace(made.program, **facts), files={sha: made.files[sha] for sha in made.files if sha in used}
    )


def _compiled(name: str, dtype: str, engines: tuple[str, ...]) -> CompilerOutput:
    """Of an earlier test run, if nothing that it depends on has changed; tests of the compiler turn its cache off."""
    m = model(name)
    facts: dict[str, Any] = {"input": m.input, "parts": m.parts, "classes": m.classes, "loss": m.loss}
    key = program_key(m, BATCH, engines, dtype=dtype, folders=(*FOLDERS, "tests/support"))
    made = partial(compile_program, m.module, name=name, **facts, dtype=dtype, batch=BATCH, engines=engines)
    return unpacked(cached_file(key, lambda: packed(made())))


def opened(made: CompilerOutput, engine: str, folder: Path) -> Engine:
    files = {name: folder / file.sha256 for name, file in made.program.files(engine, ("step", "evaluate")).items()}
    for path in files.values():
        path.write_bytes(made.files[path.name])
    return open_engine(engine, made.program, files)


@cache
def running(
    name: str, engine: str, dtype: str = "float32", engines: tuple[str, ...] = ("onnx", "litert", "pt2")
) -> Engine:
    """The program of `compiled`, opened once in this process: torch takes seconds of CPU to open a .pt2.

    An engine has no state between its updates; tests/edge_client/engines/test_engines.py opens new ones.
    """
    folder = Path(os.environ[SHARED]) / f"opened-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return opened(compiled(name, dtype, engines), engine, folder)


def tied_samples(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Half of them are flat: every window of every pool ties, as on the background of a digit."""
    x = rng.standard_normal(shape)
    x[: shape[0] // 2] = 0.0
    return x


def feeds(program: Program, function: str, *, batch: int, seed: int = 0) -> dict[str, Array]:
    """Random weights, w != anchor, linear and velocity not zero, q not constant, y neither one-hot nor uniform."""
    rng = np.random.default_rng(seed)
    module = model(program.model).module
    start, tokens = {k: v.detach().numpy() for k, v in module.state_dict().items()}, vocabulary_size(module)

    def near(tensor: str, shape: tuple[int, ...]) -> Array:
        return np.asarray(start[tensor] + 0.1 * rng.standard_normal(shape))

    draw: dict[str, Callable[[str, tuple[int, ...]], Array]] = {
        "w": near,
        "anchor": near,
        "buffers": lambda tensor, shape: np.asarray(start[tensor] + rng.uniform(0.1, 0.5, shape)),
        "velocity": lambda _, shape: 0.1 * rng.standard_normal(shape),
        "linear": lambda _, shape: 0.1 * rng.standard_normal(shape),
        "x": lambda _, shape: rng.integers(tokens, size=shape) if tokens else tied_samples(shape, rng),
        "y": lambda _, shape: (
            rng.dirichlet(np.ones(shape[1]), shape[0])
            if program.loss == "cross-entropy"
            else rng.standard_normal(shape)
        ),
        "q": lambda _, shape: rng.dirichlet(np.ones(shape[0])),
        "noise": lambda _, shape: rng.random(shape, dtype=np.float32),
        "lr": lambda *_: np.array(0.1),
        "momentum": lambda *_: np.array(0.7),
        "mu": lambda *_: np.array(0.3),
    }
    out = {}
    for port in program.functions[function].inputs:
        kind, _, tensor = port.name.partition("/")
        shape = tuple(batch if d == "batch" else d for d in port.shape)
        out[port.name] = np.asarray(draw[kind](tensor, shape), dtype=port.dtype)
    return out


def torch_step(
    module: nn.Module, given: dict[str, Array], loss_name: str = "cross-entropy", dtype: torch.dtype = torch.float64
) -> dict[str, Array]:
    """One proximal step through torch.autograd on the model itself; shares no code with export/."""
    net = loaded(module, given).to(dtype).train()
    t = {name: torch.tensor(value, dtype=dtype) for name, value in given.items()}
    with Masks(t["noise"]) if "noise" in t else nullcontext():
        answer = net(t["x"])
    loss = (t["q"] * LOSSES[loss_name](answer, t["y"])).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    out: dict[str, Array] = {"loss": loss.detach().numpy()}
    for name, p in net.named_parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:
            raise ValueError(f"{name} took no part in the loss")
        pull = p.grad + t[f"linear/{name}"] + t["mu"] * (p.detach() - t[f"anchor/{name}"])
        velocity = t["momentum"] * t[f"velocity/{name}"] + pull
        out[f"velocity/{name}"] = velocity.numpy()
        out[f"w/{name}"] = (p.detach() - t["lr"] * velocity).numpy()
    return out | {f"buffers/{n}": b.numpy() for n, b in net.named_buffers() if f"buffers/{n}" in given}


class Masks(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """torch's masks from given numbers, as PROTOCOL.md puts it: those below 1 - (the probability of a one) give zeros.

    On the CPU every kind of dropout draws its mask by `bernoulli_` on an empty tensor.
    """

    def __init__(self, noise: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rest = noise

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **(kwargs or {}))
        mask, ones = args[0], (args[1] if len(args) > 1 else 0.5)
        width = mask.numel() // len(self.rest)
        mine, self.rest = self.rest[:, :width], self.rest[:, width:]
        return mask.copy_(torch.where(mine.reshape(mask.shape) < 1 - ones, 0.0, 1.0))


def torch_evaluate(module: nn.Module, given: dict[str, Array], loss_name: str = "cross-entropy") -> dict[str, Array]:
    """Loss and logits per sample, batch norm in inference mode."""
    net = loaded(module, given).eval()
    with torch.no_grad():
        x, y = (torch.tensor(given[name], dtype=torch.float64) for name in ("x", "y"))
        logits = net(x)
        return {"loss": LOSSES[loss_name](logits, y).numpy(), "logits": logits.numpy()}


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, y, reduction="none")


def squared_error(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, y, reduction="none").flatten(1).mean(1)


LOSSES = {"cross-entropy": cross_entropy, "squared-error": squared_error}


def loaded(module: nn.Module, given: dict[str, Array]) -> nn.Module:
    net = copy.deepcopy(module).double()
    values = dict(net.named_parameters()) | dict(net.named_buffers())
    with torch.no_grad():
        for name, value in given.items():
            kind, _, tensor = name.partition("/")
            if kind in ("w", "buffers"):
                values[tensor].copy_(torch.tensor(value))
    return net


def relative(got: dict[str, Array], expected: dict[str, Array]) -> float:
    """The largest difference over all tensors, each relative to its own largest value."""
    if set(got) != set(expected):
        raise ValueError(f"different outputs: {sorted(set(got) ^ set(expected))}")
    off = [np.abs(got[k] - expected[k]).max() / max(1e-6, np.abs(expected[k]).max()) for k in expected]
    return float(np.max(off))  # NaN stays NaN
