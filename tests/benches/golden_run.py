"""The golden run of each model on each engine: how long it takes, and how far a right and a wrong runtime are.

    python -m tests.benches.golden_run [--models NAME...] [--engines NAME...]

"right" is this machine's runtime; the other columns are the same runtime with one term that reads zeros instead of what
it was given. Times are medians of CPU time with one thread. Prints a Markdown table; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from coordinator.models.registry import MODELS, build_model
from edge_client.engines.base import FIXED_ROLES, Engine, LocalUpdate, Rule, open_engine
from edge_client.engines.golden_run import run_golden
from edge_client.protocol.program import ENGINES
from edge_client.protocol.task import Array, Tensors
from export.compiler.program import compile_program

BATCH = 32  # of LiteRT, as a coordinator compiles by default
TIMES = 7


class Without:
    """An engine that reads zeros in every port of one group."""

    def __init__(self, engine: Engine, group: str) -> None:
        self.name, self.place, self.fixed_batch = engine.name, engine.place, engine.fixed_batch
        self._engine, self._group = engine, group

    def update(self, feeds: Tensors, rule: Rule | None = None) -> LocalUpdate:
        gone = {n: np.zeros_like(a) for n, a in feeds.items() if n.partition("/")[0] == self._group}
        return self._engine.update({**feeds, **gone}, rule)

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        return self._engine.evaluate(feeds)


def rows(name: str, engines: tuple[str, ...]) -> Iterator[list[str]]:
    """Compile, and measure each engine."""
    model = build_model(name, seed=0)
    print(f"{name}: compiling", file=sys.stderr, flush=True)
    made = compile_program(
        model.module, name=name, input=model.input, target=model.output, loss=model.loss, batch=BATCH, engines=engines
    )
    for engine in engines:
        golden = made.program.golden[engine]
        with tempfile.TemporaryDirectory() as scratch:
            step = Path(scratch) / "step"
            step.write_bytes(made.files[made.program.containers[engine]["step"].sha256])
            here = open_engine(engine, made.program, {"step": step}, threads=1, device="cpu")
            right = run_golden(here, made.program, golden)
            took = []
            for _ in range(TIMES):
                began = time.process_time()
                run_golden(here, made.program, golden)
                took.append(time.process_time() - began)
            wrong = [run_golden(Without(here, group), made.program, golden) for group in FIXED_ROLES]
        run = f"{len(golden.losses)} x {golden.batch}"
        yield [name, engine, run, f"{1000 * statistics.median(took):.0f}", *(f"{off:.0e}" for off in (right, *wrong))]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    given = options.parse_args()
    head = ["model", "engine", "steps x batch", "ms", "right", *(f"no {group}" for group in FIXED_ROLES)]
    print(f"| {' | '.join(head)} |\n|{'|'.join(['---', '---', *['--:'] * (len(head) - 2)])}|")
    for name in given.models:
        for row in rows(name, tuple(given.engines)):
            print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
