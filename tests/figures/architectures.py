"""Compile random small architectures by the hundred: `make architectures`, or `python -m tests.figures.architectures`.

Each one must match torch, in float64 where ONNX Runtime has the operators and within 1e-5 in float32 elsewhere, or be
refused with the operator's or the layer's name. Anything else is a failure: the exit status is 1 and its line says why.
It is 1 as well where no architecture matches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from edge_client.errors import ProgramRefused
from edge_client.protocol.program import FUNCTIONS
from export.compiler.program import compile_program, make_source
from export.compiler.program_parity import max_difference
from tests.support.random_architectures import Architecture, architectures

# Of LiteRT; the others are tried with a smaller one too. Of two samples a batch norm leaves nothing but signs:
# gradients before it are cancelled sums, which no float32 can judge to 1e-5.
BATCH = 5
LIMITS = {"float64": 1e-9, "float32": 1e-5}
# ONNX Runtime has no float64 kernel for these: no use to compile them twice.
SINGLE = {"conv", "depthwise", "conv-1d", "transposed", "residual", "avg-pool", "avg-pool-1d", "gelu"}
SINGLE |= {"hard-sigmoid"}  # torch's own gradient of it is a float32 1/6 in float64 too (torch 2.13): 3e-8 off
GOOD = ("matches", "refused")


def draw(count: int, seed: int) -> list[Architecture]:
    """That many different ones."""
    found: dict[Architecture, None] = {}

    alone = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))

    @seeded(seed)
    @settings(alone, max_examples=2 * count)
    @given(one=architectures())
    def collect(one: Architecture) -> None:
        found[one] = None

    collect()
    return list(found)[:count]


def judge(one: Architecture, engine: str) -> tuple[str, str]:
    """-> ("matches" | "refused" | "wrong" | "unexplained", what to print)."""
    dtype = "float64" if engine == "onnx" and not SINGLE & {word for word, _ in one.layers} else "float32"
    worst, said = _differs(one, engine, dtype)
    if dtype == "float64" and "NOT_IMPLEMENTED" in said:
        dtype = "float32"  # ONNX Runtime has no float64 kernel for some operator of it
        worst, said = _differs(one, engine, dtype)
    if not said:
        return ("matches" if worst <= LIMITS[dtype] else "wrong"), f"{dtype} {worst:.1e}"
    if "differs from torch" in said:
        return "wrong", said
    named = "aten." in said or "layer " in said
    return ("refused" if named and (one.refused or engine != "onnx") else "unexplained"), said


def _differs(one: Architecture, engine: str, dtype: str) -> tuple[float, str]:
    """The largest difference, or the refusal's sentence."""
    torch.set_num_threads(1)
    module = one.make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = compile_program(module, one.input, name="drawn", dtype=dtype, batch=BATCH, engines=(engine,))
    except ProgramRefused as refusal:
        return float("inf"), str(refusal).splitlines()[0]
    source = make_source(module, name="drawn", input=one.input, dtype=dtype)
    files = {f: made.files[made.program.containers[engine][f].sha256] for f in FUNCTIONS}
    return max(
        max_difference(source, engine, f, file, batch=b, seed=one.seed, limit=LIMITS[dtype])
        for f, file in files.items()
        for b in ((BATCH,) if engine == "litert" else (BATCH, 2 if dtype == "float64" else 3))
    ), ""


def judged(drawn: list[Architecture], engine: str, jobs: int) -> Iterator[tuple[Architecture, tuple[str, str]]]:
    """In the order of `drawn`."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from zip(drawn, pool.map(judge, drawn, [engine] * len(drawn)), strict=True)


def main() -> int:
    """Print a line for each failure, progress now and then, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--engine", default="onnx", choices=("onnx", "litert", "pt2"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    layers: Counter[str] = Counter()
    began = time.monotonic()
    for one, (verdict, said) in judged(draw(asked.count, asked.seed), asked.engine, asked.jobs):
        counts[verdict] += 1
        if verdict == "matches":
            layers.update({word for word, _ in one.layers})
        if verdict not in GOOD:
            print(f"{verdict}: {one}: {said}", flush=True)
        if counts.total() % 25 == 0:
            print(f"{counts.total()} of {asked.count}, {time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
    print(f"{asked.engine}: {counts.total()} architectures, {dict(counts)}")
    print("layers in those that match:", ", ".join(f"{word} {n}" for word, n in layers.most_common()))
    return int(not counts["matches"] or any(counts[verdict] for verdict in counts if verdict not in GOOD))


if __name__ == "__main__":
    sys.exit(main())
