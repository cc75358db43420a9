"""`python -m tests.benches`: ours against peers and limits, both sides in one script; writes bench-results.json.

    python -m tests.benches                        all, to bench-results.json
    python -m tests.benches --only updates,probe   some; the file keeps the other benches' figures
    python -m tests.benches --write BENCHMARKS.md  also the section of that page, and docs/growth.svg beside it
    python -m tests.benches --only none --write BENCHMARKS.md     the page from the file alone

Progress goes to stderr. Nothing is asserted: time is measured here and never in the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from edge_client.errors import FedcentersError
from tests.benches.goals import GOALS
from tests.benches.render import PICTURE, notes, rewritten, section
from tests.benches.results import BenchFigure, BenchResults, missing_figures

ROWS = {"whole": "run-"} | {
    name: f"{name}-" for name in ("updates", "scaling", "floor", "probe", "clustering", "growth")
}  # how the names of a bench's rows begin
BENCHES = ("updates", "whole", "scaling", "floor", "probe", "clustering", "growth")


def main() -> None:
    """Measure what was asked for, write the file after each bench, write the page."""
    asked = arguments()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # before numpy and torch are loaded
    results = before = earlier(asked.json) if asked.only != BENCHES else None
    if asked.only:
        for results in measured(asked.only, asked.repeats, before):
            asked.json.write_text(json.dumps(results.to_json(), indent=1) + "\n", encoding="utf-8")
    if results is None:
        raise SystemExit(f"no results in {asked.json}; run python -m tests.benches first")
    if asked.write is not None:
        page = asked.write.read_text(encoding="utf-8")
        asked.write.write_text(rewritten(page, results), encoding="utf-8")
        if any(figure.points for figure in results.figures):
            from tests.benches.picture import drawn

            drawn(results, asked.write.parent / PICTURE)
    sys.stdout.write(f"{section(results)}\n\n{notes(results)}\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, default=BENCHES, help=f"some of {','.join(BENCHES)}, or none")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each contestant; whole runs take five")
    parser.add_argument("--json", type=Path, default=Path("bench-results.json"), help="the file of figures")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="rewrite the section between the marker comments")
    return parser.parse_args()


def names(text: str) -> tuple[str, ...]:
    """Benches, separated by commas."""
    asked = () if text == "none" else tuple(text.split(","))
    if unknown := set(asked) - set(BENCHES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; use {', '.join(BENCHES)}")
    return asked


def earlier(path: Path) -> BenchResults | None:
    """What a run before left in the file."""
    return BenchResults.from_json(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def measured(only: tuple[str, ...], repeats: int, before: BenchResults | None) -> Iterator[BenchResults]:
    """All figures so far, after each bench; those that an earlier run left of others are kept."""
    import torch

    from tests.benches.machine import described, load

    torch.set_num_threads(1)
    command = " ".join(["python -m tests.benches", *sys.argv[1:]])
    so_far = BenchResults(
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        machine=described(),
        load=(max(load(), before.load[0] if before else 0.0), before.load[1] if before else 0.0),
        repeats=min(repeats, before.repeats) if before else repeats,
        versions=before.versions if before else {},
        commands=(*(before.commands if before else ("make bench-peers",)), command),
        seconds=before.seconds if before else {},
        figures=before.figures if before else (),
    )
    for name in only:
        sys.stderr.write(f"{name} ...\n")
        began = time.perf_counter()
        figures, versions = bench(name, repeats)
        sys.stderr.writelines(f"  {f.row}: {f.unmeasured or f.score} {f.note}\n" for f in figures)
        kept = [f for f in so_far.figures if not f.row.startswith(ROWS[name])]
        so_far = replace(
            so_far,
            load=(so_far.load[0], max(so_far.load[1], load())),
            versions={**so_far.versions, **versions},
            seconds={**so_far.seconds, name: time.perf_counter() - began},
            figures=(*kept, *figures),
        )
        yield so_far


def bench(name: str, repeats: int) -> tuple[list[BenchFigure], dict[str, str]]:
    """One bench; -> its figures, and the versions of the peers that it met. What it lacks makes it unmeasured."""
    from importlib import import_module

    from tests.benches.peer import PeerMissing  # here, since it loads numpy

    try:
        found: tuple[list[BenchFigure], dict[str, str]] = import_module(f"tests.benches.{name}").run(repeats)
    except (ImportError, FedcentersError, PeerMissing) as lacking:
        return list(missing_figures(tuple(g.row for g in GOALS if g.row.startswith(ROWS[name])), str(lacking))), {}
    return found


if __name__ == "__main__":
    main()
