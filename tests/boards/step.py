"""Runs on the board: one step and one evaluation of a program, numbers in, numbers out. numpy and edge_client only.

python3 step.py FOLDER ENGINE     reads program.json, the containers, feeds.npz; writes ENGINE.npz and seconds
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from edge_client.engines.base import open_engine, run_step
from edge_client.protocol.messages import parse_json
from edge_client.protocol.program import MAX_PROGRAM_BYTES, Program


def main(folder: Path, engine: str) -> None:
    program = Program.from_json(parse_json((folder / "program.json").read_bytes(), MAX_PROGRAM_BYTES))
    files = {f: folder / c.sha256 for f, c in program.containers[engine].items() if f in ("step", "evaluate")}
    with np.load(folder / "feeds.npz") as arrays:
        feeds = {name.replace("|", "/"): arrays[name] for name in arrays.files}
    opened = open_engine(engine, program, files)
    given = run_step(opened, feeds)
    began_s = time.perf_counter()
    run_step(opened, feeds)
    seconds = time.perf_counter() - began_s
    evaluated = opened.evaluate({p.name: feeds[p.name] for p in program.functions["evaluate"].inputs})
    results = given | {f"evaluate/{name}": value for name, value in evaluated.items()}
    out = {name.replace("/", "|"): value for name, value in results.items()}
    np.savez(folder / f"{engine}.npz", **out)  # type: ignore[arg-type]  # numpy's stub takes no **dict
    sys.stdout.write(f"{seconds:.3f}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
