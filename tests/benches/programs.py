"""`make bench` and `make bench-programs`: a training step of each model on each engine against eager torch.

Eager is the usual training loop: module, autograd, torch.optim.SGD. All contestants of a model get the same
batch in one process, take turns, and use one thread; the figures are medians of CPU time per step. Markdown goes to
stdout, JSON to --json, progress to stderr. Nothing is asserted: time is measured here and never in the tests.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from coordinator.models.registry import MODELS, Model
from edge_client.engines.base import open_engine
from edge_client.errors import ProgramRefused
from edge_client.protocol.program import ENGINES, Program
from edge_client.protocol.task import Array
from export.compiler.program import CompilerOutput, compile_program, vector_of
from export.compiler.program_functions import vocabulary_size
from tests.support.architectures import ENTRIES
from tests.support.programs import model as model_named

LR, MOMENTUM = 1e-4, 0.9  # small: the same batch again and again must not drive gradients to nothing
TURN_S = 0.1  # CPU seconds of one contestant's turn
TRAIN_ONE = """
import json, sys
from pathlib import Path
import numpy as np
from edge_client.engines.base import open_engine
from edge_client.protocol.program import Program
folder, engine = Path(sys.argv[1]), sys.argv[2]
program = Program.from_json(json.loads((folder / "program.json").read_text()))
feeds = dict(np.load(folder / "feeds.npz"))
files = {name: folder / file.sha256 for name, file in program.files(engine, ["step"]).items()}
update = open_engine(engine, program, files).update(feeds)
for _ in range(20):
    update.step(feeds)
status = Path("/proc/self/status").read_text()
print(int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024)
"""


@dataclass(frozen=True, kw_only=True)
class ProgramRow:
    """One model on one engine; times per step, `ratio` to torch eager in CPU time. `refused`: why nothing was made."""

    model: str
    engine: str
    ratio: float | None = None
    cpu_ms: float | None = None
    wall_ms: float | None = None
    eager_cpu_ms: float | None = None
    compile_s: float | None = None
    step_kb: float | None = None
    difference: float | None = None
    peak_mib: float | None = None
    refused: str = ""


def say(text: str) -> None:
    """Progress for people."""
    print(text, file=sys.stderr, flush=True)


def measure(name: str, engines: list[str], *, batch: int, repeats: int, memory: bool) -> list[ProgramRow]:
    """Compile, let all take turns, and describe each engine."""
    model = model_named(name)
    done: dict[str, tuple[CompilerOutput, float]] = {}
    rows: list[ProgramRow] = []
    for engine in engines:
        say(f"{name}: compiling for {engine}")
        began = time.perf_counter()
        try:
            made = compile_program(
                model.module,
                name=name,
                input=model.input,
                classes=model.classes,
                loss=model.loss,
                batch=batch,
                engines=(engine,),
            )
        except ProgramRefused as refused:
            rows.append(ProgramRow(model=name, engine=engine, refused=str(refused).splitlines()[0]))
            continue
        done[engine] = made, time.perf_counter() - began
    if not done:
        return rows
    feeds = inputs(model, next(iter(done.values()))[0].program, batch)
    with tempfile.TemporaryDirectory() as scratch:
        starts: dict[str, Callable[[], Callable[[], object]]] = {"torch eager": lambda: eager(model, feeds)}
        for engine, (made, _) in done.items():
            starts[engine] = started(engine, made, feeds, Path(scratch) / engine)
        say(f"{name}: {repeats} turns each")
        times = race(starts, repeats)
        base = times["torch eager"][0]
        for engine, (made, seconds) in done.items():
            cpu, wall = times[engine]
            rows.append(
                ProgramRow(
                    model=name,
                    engine=engine,
                    ratio=cpu / base,
                    cpu_ms=cpu,
                    wall_ms=wall,
                    eager_cpu_ms=base,
                    compile_s=seconds,
                    step_kb=made.program.containers[engine]["step"].size / 1000,
                    difference=made.program.parity[engine],
                    peak_mib=resident_mib(Path(scratch) / engine, engine) if memory else None,
                )
            )
    return rows


def inputs(model: Model, program: Program, batch: int) -> dict[str, Array]:
    """All that a step reads: the model's own weights, one batch of random samples, the plain mean, no extra terms."""
    rng, tokens = np.random.default_rng(0), vocabulary_size(model.module)
    weights = program.schema.split(vector_of(model.module, program.schema))

    def value(kind: str, name: str, shape: tuple[int, ...]) -> Array:
        if kind in {"w", "anchor", "buffers"}:
            return weights[name]
        if kind == "x":
            return rng.integers(tokens, size=shape) if tokens else rng.standard_normal(shape)
        if kind == "y" and program.loss == "cross-entropy":
            return np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]
        if kind in {"y", "noise"}:
            return rng.random(shape)
        if kind == "q":
            return np.full(shape, 1 / batch)
        return np.full(shape, {"lr": LR, "momentum": MOMENTUM}.get(kind, 0.0))

    feeds = {}
    for port in program.functions["step"].inputs:
        kind, _, name = port.name.partition("/")
        shape = tuple(batch if d == "batch" else d for d in port.shape)
        feeds[port.name] = np.array(value(kind, name, shape), dtype=port.dtype)
    return feeds


def started(
    engine: str, made: CompilerOutput, feeds: Mapping[str, Array], folder: Path
) -> Callable[[], Callable[[], object]]:
    """The program as a device holds it, opened; each call begins a new local update and gives its next step."""
    folder.mkdir(parents=True)
    for sha256, blob in made.files.items():
        (folder / sha256).write_bytes(blob)
    (folder / "program.json").write_text(json.dumps(made.program.to_json()))
    np.savez(folder / "feeds.npz", **dict(feeds))  # type: ignore[arg-type]  # numpy's own stub wants names it knows
    files = {name: folder / file.sha256 for name, file in made.program.files(engine, ["step"]).items()}
    opened = open_engine(engine, made.program, files)

    def start() -> Callable[[], object]:
        update = opened.update(feeds)
        return lambda: update.step(feeds)

    return start


def eager(model: Model, feeds: Mapping[str, Array]) -> Callable[[], object]:
    """One step of the usual training loop, on the same batch, from the same weights."""
    module = copy.deepcopy(model.module).train()
    x, y = torch.from_numpy(feeds["x"].copy()), torch.from_numpy(feeds["y"].copy())
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR, momentum=MOMENTUM)
    loss_of = torch.nn.functional.cross_entropy if model.loss == "cross-entropy" else torch.nn.functional.mse_loss
    target = y.argmax(-1) if model.loss == "cross-entropy" else y

    def run() -> None:
        optimizer.zero_grad()
        loss_of(module(x), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return run


def race(starts: Mapping[str, Callable[[], Callable[[], object]]], repeats: int) -> dict[str, tuple[float, float]]:
    """Name -> median milliseconds per step, CPU and wall; a warm-up each, then all take turns of TURN_S."""
    steps: dict[str, int] = {}
    for name, start in starts.items():
        run = start()
        run()
        began = time.process_time()
        run()
        run()
        steps[name] = max(1, round(TURN_S * 2 / max(time.process_time() - began, 1e-6)))
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    for _ in range(repeats):
        for name, start in starts.items():
            run = start()
            run()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(steps[name]):
                run()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            seen[name].append((1000 * spent[0] / steps[name], 1000 * spent[1] / steps[name]))
    return {name: (statistics.median(c for c, _ in v), statistics.median(w for _, w in v)) for name, v in seen.items()}


def resident_mib(folder: Path, engine: str) -> float:
    """Peak resident memory, in MiB, of a fresh process that opens the program and trains."""
    command = [sys.executable, "-c", TRAIN_ONE, str(folder), engine]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def machine() -> str:
    """Processor, cores, Python and library versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((row.partition(":")[2].strip() for row in lines if row.startswith("model name")), platform.machine())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}, {versions}"


def markdown(rows: list[ProgramRow]) -> str:
    """The table of BENCHMARKS.md."""

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [
        "| model | engine | times eager | CPU ms | eager CPU ms | compile, s | step file, kB | difference | peak MiB |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        if r.refused:
            lines.append(f"| {r.model} | {r.engine} | refused: {r.refused} |  |  |  |  |  |  |")
            continue
        figures = [(r.ratio, ".2f"), (r.cpu_ms, ".2f"), (r.eager_cpu_ms, ".2f"), (r.compile_s, ".1f")]
        figures += [(r.step_kb, ".0f"), (r.difference, ".0e"), (r.peak_mib, ".0f")]
        lines.append(f"| {r.model} | {r.engine} | {' | '.join(cell(*figure) for figure in figures)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*MODELS, *ENTRIES]
    parser.add_argument("--models", nargs="+", choices=known, default=known, metavar="MODEL", help=", ".join(known))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--batch", type=int, default=32, help="samples per step")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--memory", action="store_true", help="also the peak memory of a process that trains")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[ProgramRow] = []
    for name in asked.models:
        rows += measure(name, asked.engines, batch=asked.batch, repeats=asked.repeats, memory=asked.memory)
        if asked.json:  # after each model: a long run that is stopped leaves what it has
            asked.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(r) for r in rows]}, indent=1))
    print(f"{machine()}; batch {asked.batch}, one thread, medians of {asked.repeats} interleaved turns.\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
