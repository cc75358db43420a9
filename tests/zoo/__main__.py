"""Put every row to the compiler: `make models`, or `python -m tests.zoo --only peft timm/test_vit --engines onnx`.

Each model's step is traced for any batch size and taken three times in float64, beside torch's autograd on the model
itself, with another batch size than the traced one. The first batch has zeros, as images have black borders. With
`--engines` it is also compiled in float32: the files are compared with torch in float64, and run a golden run of
several steps. A result is kept in `--results` as soon as it is there, and a row that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edge_client.errors import ProgramRefused
from edge_client.protocol.task import Array
from export.compiler.containers import EXAMPLE_BATCH
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import compile_program, make_source
from export.compiler.program_functions import TraceSource, example_inputs, function_ports
from export.compiler.program_parity import output_differences, tied_inputs, torch_outputs
from export.compiler.tracing import trace_function
from export.containers.flat_graph import FlatGraph
from tests.zoo.report import write_report
from tests.zoo.rows import ZooRow, rows, without_torchvisions_own_operators

TRACED, TRIED, STEPS = 4, 5, 3  # the fixed batch size, one for graphs of any batch size, and steps of SGD
LIMIT = 1e-6  # float64, but some libraries compute norms in float32; a wrong graph differs in the first digits
ROOM = 10  # times what torch moves when its inputs move by a rounding
LIMIT_S = 900  # of CPU time, for one row


def main() -> int:
    """Run the rows that have no result yet; 1 where one is wrong."""
    asked = _arguments()
    kept = json.loads(asked.results.read_text(encoding="utf-8")) if asked.results.exists() else {}
    without_torchvisions_own_operators()
    warnings.simplefilter("ignore")
    for row in rows():
        key = f"{row.library}/{row.name}"
        if asked.only and not any(key.startswith(word) for word in asked.only):
            continue
        if key in kept and not asked.again and set(asked.engines) <= set(kept[key].get("engines", {})):
            continue
        found = judge(row, asked.engines)
        kept[key] = found | {"engines": kept.get(key, {}).get("engines", {}) | found.get("engines", {})}
        sys.stdout.write(f"{key} {kept[key]}\n")
        sys.stdout.flush()
        asked.results.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if asked.write:
        write_report(asked.write, kept)
    return int(any(found["verdict"] == "wrong" for found in kept.values()))


def judge(row: ZooRow, engines: list[str]) -> dict[str, Any]:
    """verdict: "matches" | "fixed batch" | "refused" | "wrong" | "not made"."""
    began = time.process_time()
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        torch.manual_seed(0)
        try:
            module = row.make()
        except Exception as wrong:  # noqa: BLE001 - any library, any reason
            return {"verdict": "not made", "said": f"{type(wrong).__name__}: {wrong}"[:300]}
        found = _traced(row, module)
        if found["verdict"] in {"matches", "fixed batch"}:
            found["engines"] = _compiled(row, module, engines)
        return found | {"seconds": round(time.process_time() - began, 1)}
    except TooLong:
        return {"verdict": "refused", "said": f"not done after {LIMIT_S} s"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _traced(row: ZooRow, module: torch.nn.Module) -> dict[str, Any]:
    try:
        source = make_source(module, name=row.name, input=row.input, loss="squared-error", dtype="float64")
        passes, dynamic = ForwardPasses(source), True
        try:
            graph = trace_function(passes, "step", batch=EXAMPLE_BATCH, dynamic=True, closed=True)
        except ProgramRefused:
            graph, dynamic = trace_function(passes, "step", batch=TRACED, dynamic=False, closed=True), False
        off = _differs(source, graph, TRIED if dynamic else TRACED)
    except ProgramRefused as refused:
        return {"verdict": "refused", "said": str(refused)[:500]}
    verdict = ("matches" if dynamic else "fixed batch") if off <= LIMIT else "wrong"
    return {
        "verdict": verdict,
        "difference": off,
        "nodes": len(graph.graph.graph.nodes),
        "parameters": source.schema.n_params,
    }


def _differs(source: TraceSource, graph: FlatGraph, batch: int) -> float:
    """The largest difference of a tensor from torch's in any of three steps, relative to its largest value.

    Each step begins where torch's last one ended. A step counts as exact where torch moves as far when its inputs move
    by a rounding: a model may be so steep there that no two ways to add agree.
    """
    ports = function_ports(source, "step")
    names = [p.name for p in ports.outputs]
    given, worst = tied_inputs(source, "step", batch, 1), 0.0
    for seed in range(STEPS):
        theirs = torch_outputs(source, "step", given)
        off = _difference(names, [t.detach().numpy() for t in graph(*given)], theirs)
        if off > LIMIT:
            moved = torch_outputs(source, "step", [_rounded(value) for value in given])
            off = off if off > ROOM * _difference(names, moved, theirs) else 0.0
        worst = max(worst, off)
        after = dict(zip(names, map(torch.from_numpy, theirs), strict=True))
        following = example_inputs(source, "step", batch, seed=seed + 2)
        given = [after.get(p.name, new) for p, new in zip(ports.inputs, following, strict=True)]
    return worst


def _rounded(value: Tensor) -> Tensor:
    """Half of the values one float64 rounding larger; a number stays."""
    up = torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape) % 2 * 2.0**-52
    return value * (1 + up) if value.dim() else value


def _difference(names: list[str], ours: list[Array], theirs: list[Array]) -> float:
    rows = zip(names, output_differences(ours, theirs), strict=True)
    return max(found for name, found in rows if not name.startswith("velocity/"))


def _compiled(row: ZooRow, module: torch.nn.Module, engines: list[str]) -> dict[str, str]:
    """For each engine the largest difference of its files from torch in float64, as words; or why there are none.

    The engines are compiled for at once, which traces the model once; where that is refused, each alone.
    """
    if not engines:
        return {}
    facts: Any = {"name": row.name, "loss": "squared-error", "batch": TRACED}
    try:
        made = compile_program(module, row.input, engines=tuple(engines), **facts)
    except ProgramRefused as refused:
        if len(engines) == 1:
            return {engines[0]: str(refused)[:300]}
        return {name: said for engine in engines for name, said in _compiled(row, module, [engine]).items()}
    return {engine: f"{made.program.parity[engine]:.0e}" for engine in engines}


class TooLong(BaseException):
    """No `Exception`, which the compiler would take for the model's fault."""


def _too_long(*_: object) -> None:
    raise TooLong


def _arguments() -> argparse.Namespace:
    said = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    said.add_argument("--only", nargs="*", default=[], help="rows that begin with one of these: peft, timm/test_vit")
    said.add_argument("--engines", nargs="*", default=[], help="compile for these, too: onnx litert pt2")
    said.add_argument("--again", action="store_true", help="run rows that have a result again")
    said.add_argument("--results", type=Path, default=Path("docs/results/models.json"))
    said.add_argument("--write", type=Path, help="write the table into this page, between its marks")
    return said.parse_args()


if __name__ == "__main__":
    sys.exit(main())
