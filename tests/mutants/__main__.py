"""The share of small faults that a test finds: `make mutants`, or `python -m tests.mutants coordinator/rounds`.

Of each module `--each` mutants are drawn by each seed. Each is put into a copy of the tree, and the tests that execute
its line run there, file by file, the nearest file first and the quickest test first, until one fails: with few of
hypothesis' examples, and at last with all. Which lines a test executes is seen when its file runs once without a
fault. A mutant that the tests pass is printed with its line: it is a gap in the tests, or it changes nothing that
anyone can see. Those that were found to change nothing are in `equivalent.toml`: they are drawn, but do not run, and do
not count in the score. The last lines are a table by folder, with Wilson's interval. Tests that need a browser or are
marked slow do not run.

The journal has a line for each mutant. The same command again goes on where it was cut off; after a change it looks
again at the mutants of modules that changed, and at survivors of which a file of tests changed.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.mutants.draw import drawn, modules_in
from tests.mutants.equivalents import is_equivalent, listed
from tests.mutants.journal import Journal
from tests.mutants.mutants import Mutant
from tests.mutants.nearest_tests import ROOT, name_of, nearest_tests
from tests.mutants.score import EQUIVALENT, FOUND, SURVIVED, table
from tests.mutants.tree_copy import TreeCopy, tree_copy

GOAL = (
    *("edge_client/protocol", "edge_client/update", "coordinator/rounds", "coordinator/aggregation"),
    *("coordinator/identity", "coordinator/runtime/exchange"),
)
FILE_S = 150.0  # for a file of tests without a fault; one that takes longer does not run
MUTANT_S = 30.0  # of tests for one mutant
PASSED = (0, 5)  # pytest's statuses; 5: no test of those named has examples


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "places", nargs="*", type=Path, default=[Path(place) for place in GOAL], help="modules or folders"
    )
    made.add_argument("--each", type=int, default=5, help="mutants of a module (default 5)")
    made.add_argument("--tests", type=int, default=12, help="test files for a module, the nearest (default 12)")
    made.add_argument("--seed", type=int, nargs="+", default=[0], help="what several draw is one sample")
    made.add_argument("--only", default="", help="mutants whose printed change has this text, and all of them")
    made.add_argument(
        "--journal", type=Path, default=ROOT / "build" / "mutants.jsonl", help="what is known is kept there"
    )
    made.add_argument("--patience", type=float, default=1.0, help="times every limit of time; the load of the machine")
    return made


def covering(module: str, one: Mutant, known: Mapping[str, Any]) -> list[str]:
    """The tests that execute the mutant's line, the quickest first."""
    lines = range(one.line, one.last_line + 1)
    found = [test for test, seen in known.items() if any(line in lines for line in seen["lines"].get(module, []))]
    return sorted(found, key=lambda test: float(known[test]["seconds"]))


def within(tests: Sequence[str], known: Mapping[str, Any], left_s: float) -> list[str]:
    """As many of the first tests as take `left_s` seconds."""
    ends, end = [], 0.0
    for test in tests:
        end += float(known[test]["seconds"])
        ends.append(end)
    return [test for test, end in zip(tests, ends, strict=True) if end <= left_s]


class Judge:
    def __init__(self, copy: TreeCopy, modules: list[Path], journal: Journal, patience: float) -> None:
        self._copy, self._modules, self._journal, self._patience = copy, modules, journal, patience

    def verdict(self, module: Path, one: Mutant, files: list[Path]) -> str:
        taken: dict[str, Any] = {}
        left_s = MUTANT_S * self._patience
        for known, tests in self._batches(module, one, files):
            run = within([test for test in tests if test not in taken], known, left_s)
            taken |= {test: known[test] for test in run}
            left_s -= sum(known[test]["seconds"] for test in run)
            if run and self._fails(module, one, {test: known[test] for test in run}, "few"):
                return FOUND
        return FOUND if taken and self._fails(module, one, taken, "ci", " and hypothesis") else SURVIVED

    def _batches(self, module: Path, one: Mutant, files: list[Path]) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """By file the tests that execute the line; at last the others of the nearest file, which may start it in
        another process."""
        for file in files:
            known = self._known(file)
            yield known, covering(name_of(module), one, known)
        if files:
            known = self._known(files[0])
            yield known, sorted(known, key=lambda test: float(known[test]["seconds"]))

    def _known(self, file: Path) -> dict[str, Any]:
        known = self._journal.tests(file)
        if known is None:
            known = self._copy.traced(file, self._modules, FILE_S * self._patience)
            self._journal.add_tests(file, known)
        return known

    def _fails(self, module: Path, one: Mutant, known: Mapping[str, Any], profile: str, marked: str = "") -> bool:
        limit_s = 60 * self._patience + 5 * sum(float(seen["seconds"]) for seen in known.values())
        with self._copy.changed(module, one.of(module.read_text(encoding="utf-8"))):
            return self._copy.run(known, limit_s, profile, marked) not in PASSED


def main() -> int:
    options = parser().parse_args()
    modules = modules_in(options.places)
    journal = Journal(options.journal, modules)
    verdicts: list[tuple[str, str]] = []
    began = time.monotonic()
    entries = listed()
    with tree_copy(options.patience) as copy:
        judge = Judge(copy, modules, journal, options.patience)
        for module in modules:
            name, files = name_of(module), nearest_tests(name_of(module), options.tests)
            survived = []
            for one in drawn(module, options.each, options.seed, options.only):
                verdict = EQUIVALENT if is_equivalent(name, one, entries) else journal.verdict(module, one, files)
                if verdict is None:
                    verdict = judge.verdict(module, one, files)
                    journal.add_verdict(module, one, files, verdict)
                verdicts.append((name, verdict))
                survived += [one] if verdict == SURVIVED else []
            for one in survived:
                print(f"{name} {one}", flush=True)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_min = (spent.ru_utime + spent.ru_stime) / 60
    print(f"\n{table(verdicts)}\n\n{time.monotonic() - began:.0f} s, {cpu_min:.0f} CPU minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
