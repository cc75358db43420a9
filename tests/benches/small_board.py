"""`python -m tests.benches.small_board`: the WeCFL CNN trained with ONNX Runtime in little memory, on one core.

A memory cgroup bounds a process that opens the program and trains (batch 32, one thread); the kernel kills what needs
more. Needs root and a cgroup that may be made, v1 or v2; says so and ends otherwise. Swap is not bounded: have none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from export.compiler.program import compile_program
from tests.benches.programs import inputs, machine, started
from tests.support.programs import model as model_named

MODEL, BATCH, STEPS = "wecfl-cnn", 32, 50
ROOTS = {"v1": Path("/sys/fs/cgroup/memory"), "v2": Path("/sys/fs/cgroup")}
LIMIT_FILES = {"v1": "memory.limit_in_bytes", "v2": "memory.max"}
TRAIN = f"""
import json, sys, time
from pathlib import Path
import numpy as np
from edge_client.engines.base import open_engine
from edge_client.protocol.program import Program
folder = Path(sys.argv[1])
program = Program.from_json(json.loads((folder / "program.json").read_text()))
feeds = dict(np.load(folder / "feeds.npz"))
files = {{name: folder / file.sha256 for name, file in program.files("onnx", ["step"]).items()}}
update = open_engine("onnx", program, files).update(feeds)
update.step(feeds)
began = time.process_time()
for _ in range({STEPS}):
    update.step(feeds)
spent = (time.process_time() - began) / {STEPS}
status = Path("/proc/self/status").read_text()
peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
print(f"{{peak:.1f}} MiB | {{1000 * spent:.1f}} ms")
"""


@contextmanager
def bounded(mib: int) -> Iterator[Path]:
    """The file of a new memory cgroup that takes the ids of its processes. OSError where none can be made."""
    version = "v2" if (ROOTS["v2"] / "cgroup.controllers").exists() else "v1"
    group = ROOTS[version] / f"fedcenters-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / LIMIT_FILES[version]).write_text(str(mib * 2**20))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def trained(folder: Path, mib: int) -> str:
    """Peak memory and CPU time of a step under the limit, or how the process ended."""
    core = str(min(os.sched_getaffinity(0)))
    with bounded(mib) as processes:
        inside = 'echo $$ > "$0" && exec "$@"'
        command = ["taskset", "-c", core, sys.executable, "-c", TRAIN, str(folder)]
        done = subprocess.run(
            ["sh", "-c", inside, str(processes), *command], capture_output=True, text=True, check=False
        )
    return done.stdout.strip() or f"ended with {done.returncode} | "


def main() -> None:
    """A line of Markdown for each limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", nargs="+", type=int, default=[256], help="limits of memory")
    asked = parser.parse_args()
    if shutil.which("taskset") is None:
        raise SystemExit("taskset is not installed (apt install util-linux)")
    model = model_named(MODEL)
    made = compile_program(
        model.module, name=MODEL, input=model.input, classes=model.classes, batch=BATCH, engines=("onnx",)
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "onnx"
        started("onnx", made, inputs(model, made.program, BATCH), folder)
        try:
            rows = [f"| {mib} MiB | {trained(folder, mib)} |" for mib in asked.mib]
        except OSError as refused:
            raise SystemExit(f"no memory cgroup can be made here: {refused}; run as root") from refused
    sys.stdout.write(f"{machine()}; {MODEL}, batch {BATCH}, one thread on one core, mean of {STEPS} steps.\n\n")
    sys.stdout.write("| limit | peak | CPU time of a step |\n|---|--:|--:|\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
