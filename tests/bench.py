"""`make bench`: the figures of BENCHMARKS.md, measured on this machine and printed as markdown.

Both sides run in one process, interleaved, medians over repeats, CPU seconds of the process beside the wall clock.
Progress goes to stderr. Nothing is asserted: time is measured here and never in the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from coordinator.models.registry import build
from edge_client.dataset import Dataset
from edge_client.engines.base import open_engine
from edge_client.protocol.program import Program
from edge_client.protocol.task import Fit
from edge_client.training import fit
from export.program import Compiled, compile_program, vector_of

MODELS = ("digits-mlp", "wecfl-cnn", "gn-cnn")
ENGINES = ("onnx", "litert", "pt2")
BATCH = 32
STEPS = 20
TRAIN_ONE = """
import json, sys
from pathlib import Path
import numpy as np
from edge_client.dataset import Dataset
from edge_client.engines.base import open_engine
from edge_client.protocol.program import Program
from edge_client.protocol.task import Fit
from edge_client.training import fit
folder, engine = Path(sys.argv[1]), sys.argv[2]
program = Program.from_json(json.loads((folder / "program.json").read_text()))
rng = np.random.default_rng(0)
data = Dataset(rng.random((128, *program.input), dtype=np.float32), rng.integers(0, program.classes, 128))
start = rng.standard_normal(program.schema.size).astype(np.float32) * np.float32(0.01)
opened = open_engine(engine, program, {"step": folder / program.containers[engine]["step"].sha256})
fit(opened, program, Fit(start=start, steps=20, lr=0.01, batch=32, seed=0), data)
status = Path("/proc/self/status").read_text()
print(int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024)
"""


def say(text: str) -> None:
    """Progress for people."""
    print(text, file=sys.stderr, flush=True)


def write(compiled: Compiled, folder: Path) -> None:
    """The program as a device holds it: files named by hash, and its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    for sha256, blob in compiled.files.items():
        (folder / sha256).write_bytes(blob)
    (folder / "program.json").write_text(json.dumps(compiled.program.to_json()))


def eager(name: str, data: Dataset) -> Callable[[], object]:
    """The loop that everybody writes: module, autograd, torch.optim.SGD, the same batches."""
    model = build(name, seed=0)
    module = model.module.train()
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)

    def run() -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        for at in np.random.default_rng(0).permuted(np.arange(len(data)).repeat(STEPS)).reshape(-1, BATCH)[:STEPS]:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x[at]), y[at]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run


def contestants(name: str, program: Program, folder: Path) -> dict[str, Callable[[], object]]:
    """The same number of steps on the same data, once per engine and once in torch eager."""
    rng = np.random.default_rng(0)
    data = Dataset(rng.random((BATCH * 4, *program.input), dtype=np.float32), rng.integers(0, 10, BATCH * 4))
    start = vector_of(build(name, seed=0).module, program.schema)
    task = Fit(start=start, steps=STEPS, lr=0.01, momentum=0.9, batch=BATCH, seed=0)
    out: dict[str, Callable[[], object]] = {"torch eager": eager(name, data)}
    for engine in ENGINES:
        opened = open_engine(engine, program, {"step": folder / program.containers[engine]["step"].sha256})
        out[engine] = lambda opened=opened: fit(opened, program, task, data)  # type: ignore[misc]
    return out


def race(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """Name -> median milliseconds per step, CPU and wall; one warm-up each, then interleaved."""
    for run in runs.values():
        run()
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            seen[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    scale = 1000 / STEPS
    return {
        name: (scale * statistics.median(c for c, _ in rows), scale * statistics.median(w for _, w in rows))
        for name, rows in seen.items()
    }


def resident_mb(folder: Path, engine: str) -> float:
    """Peak resident memory of a fresh process that opens the program and trains."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_ONE, str(folder), engine], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def machine() -> str:
    """Processor, cores, Python and library versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((row.partition(":")[2].strip() for row in lines if row.startswith("model name")), platform.machine())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}, {versions}"


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    steps, sizes = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            model, seconds, folder = build(name, seed=0), {}, Path(scratch) / name
            for engine in ENGINES:
                say(f"{name}: compiling for {engine}")
                began = time.perf_counter()
                facts = {"name": name, "input": model.input, "classes": model.classes, "loss": model.loss}
                compile_program(model.module, batch=BATCH, engines=(engine,), **facts)  # type: ignore[arg-type]
                seconds[engine] = time.perf_counter() - began
            compiled = compile_program(model.module, batch=BATCH, **facts)  # type: ignore[arg-type]
            write(compiled, folder)
            say(f"{name}: {repeats} x {STEPS} steps, four ways")
            times = race(contestants(name, compiled.program, folder), repeats)
            steps += [f"| {name} | {who} | {cpu:.2f} | {wall:.2f} |" for who, (cpu, wall) in times.items()]
            for engine in ENGINES:
                say(f"{name}: memory of a process that trains with {engine}")
                files = compiled.program.containers[engine]
                size = files["step"].size / 1000
                memory, parity = resident_mb(folder, engine), compiled.program.parity[engine]
                sizes.append(
                    f"| {name} | {engine} | {seconds[engine]:.1f} | {size:.0f} | {memory:.0f} | {parity:.0e} |"
                )
    print(f"{machine()}; medians of {repeats} interleaved repeats of {STEPS} steps, batch {BATCH}, one thread.\n")
    print("| model | engine | CPU ms per step | wall ms per step |\n|---|---|--:|--:|")
    print("\n".join(steps))
    print("\n| model | engine | compile, s | step file, kB | peak MB while training | difference from torch |")
    print("|---|---|--:|--:|--:|--:|")
    print("\n".join(sizes))


if __name__ == "__main__":
    main()
