"""The share of small faults that a test finds: `make mutants`, or `python -m tests.mutants coordinator/rounds`.

The modules' nearest tests run once without a fault, which shows the lines that each executes. Of each module `--each`
mutants are drawn by each seed. Each is put into a copy of the tree, and the tests that execute its line run there, the
quickest first, until one fails: with few of hypothesis' examples, then with all. A mutant that they pass is printed
with its line: it is a gap in the tests, or it changes nothing that anyone can see. Those that were found to change
nothing are in `equivalent.toml`: they are drawn, but do not run, and do not count in the score. The last lines are a
table by folder. Tests that need a browser or are marked slow do not run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mutants.equivalents import is_equivalent, listed
from tests.mutants.mutants import Mutant, mutants_of
from tests.mutants.nearest_tests import ROOMS, ROOT, name_of, nearest_tests

GOAL = (
    *("edge_client/protocol", "edge_client/update", "coordinator/rounds", "coordinator/aggregation"),
    *("coordinator/identity", "coordinator/runtime/exchange"),
)
FILE_S = 150.0  # for a file of tests without a fault; one that takes longer does not run
MUTANT_S = 30.0  # of tests for one mutant, the quickest first
OPTIONS = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not browser and not gpu and not board"]
PASSED = 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "places", nargs="*", type=Path, default=[Path(place) for place in GOAL], help="modules or folders"
    )
    made.add_argument("--each", type=int, default=5, help="mutants of a module (default 5)")
    made.add_argument("--tests", type=int, default=12, help="test files for a module, the nearest (default 12)")
    made.add_argument("--seed", type=int, nargs="+", default=[0], help="what several draw is one sample")
    made.add_argument("--only", default="", help="mutants whose printed change has this text, and all of them")
    made.add_argument("--out", type=Path, help="a file of lines of JSON, one for each mutant")
    return made


def modules_in(places: list[Path]) -> list[Path]:
    files = {file for place in places for file in ([ROOT / place] if place.suffix else (ROOT / place).rglob("*.py"))}
    return sorted(file for file in files if file.name != "__init__.py")


def drawn(module: Path, each: int, seeds: Sequence[int], only: str = "") -> list[Mutant]:
    """`each` mutants by each seed, in the order of the lines; what several draw, once. Or all with the text `only`."""
    every = mutants_of(module.read_text(encoding="utf-8"))
    if only:
        return [one for one in every if only in str(one)]
    draws = [random.Random(f"{seed} {name_of(module)}") for seed in seeds]  # noqa: S311 - it draws tests
    taken = {i for draw in draws for i in draw.sample(range(len(every)), min(each, len(every)))}
    return [every[i] for i in sorted(taken)]


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "copy"
        for room in ROOMS:
            shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy(file, copy)
        (copy / "docs").symlink_to(ROOT / "docs")
        if (ROOT / ".web").exists():
            (copy / ".web").symlink_to(ROOT / ".web")
        yield copy


class Tests:
    """pytest in a copy of the tree, in forks of one process (forks.py)."""

    def __init__(self, copy: Path) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        self.copy = copy
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forks"],
            cwd=copy,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, tests: list[str], limit_s: float, profile: str, *options: str, traced: dict[str, str] | None = None
    ) -> Any:  # noqa: ANN401 - JSON
        assert self._server.stdin
        assert self._server.stdout
        arguments = [*OPTIONS, *options, *tests]
        asked = {"arguments": arguments, "limit_s": limit_s, "profile": profile, "traced": traced or {}}
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate()


def baseline(tests: Tests, modules: list[Path], most: int) -> dict[str, Any]:
    """Of each test that passes without a fault: its seconds, and the lines of the modules that it executes."""
    files = sorted({str(path.relative_to(ROOT)) for module in modules for path in nearest_tests(name_of(module), most)})
    traced = {str(tests.copy / module.relative_to(ROOT)): name_of(module) for module in modules}
    known: dict[str, Any] = {}
    for file in files:
        known |= tests.run([file], FILE_S, "few", traced=traced)["tests"]
    return known


def chosen(module: Path, one: Mutant, known: dict[str, Any]) -> list[str]:
    """The tests that execute the mutant's line, then the others of the module's nearest file, which may start it in
    another process; the quickest first."""
    name = name_of(module)
    lines = range(one.line, one.last_line + 1)
    own = {str(path.relative_to(ROOT)) for path in nearest_tests(name, 1)}
    covers = {test: any(line in lines for line in seen["lines"].get(name, [])) for test, seen in known.items()}
    found = [test for test in known if covers[test] or test.partition("::")[0] in own]
    taken: list[str] = []
    spent = 0.0
    for test in sorted(found, key=lambda test: (not covers[test], float(known[test]["seconds"]))):
        spent += known[test]["seconds"]
        if taken and spent > MUTANT_S:
            break
        taken.append(test)
    return taken


FOUND, SURVIVED, EQUIVALENT = "found", "survived", "equivalent"


def judge(module: Path, tests: Tests, known: dict[str, Any], options: argparse.Namespace) -> list[tuple[Mutant, str]]:
    """-> of each drawn mutant of a module what became of it: FOUND, SURVIVED or EQUIVALENT."""
    place, verdicts, entries = tests.copy / module.relative_to(ROOT), [], listed()
    try:
        for one in drawn(module, options.each, options.seed, options.only):
            if is_equivalent(name_of(module), one, entries):
                verdicts.append((one, EQUIVALENT))
                continue
            place.write_text(one.of(module.read_text(encoding="utf-8")), encoding="utf-8")
            run = chosen(module, one, known)
            limit_s = 60 + 5 * sum(float(known[test]["seconds"]) for test in run)
            found = any(tests.run(run, limit_s, profile, "-x")["status"] != PASSED for profile in ("few", "ci") if run)
            verdicts.append((one, FOUND if found else SURVIVED))
    finally:
        shutil.copy(module, place)
    return verdicts


def table(lines: Sequence[Mapping[str, object]]) -> str:
    """The score by folder, in Markdown: found of those that are not equivalent."""
    folders: dict[str, list[Mapping[str, object]]] = {}
    for line in lines:
        folders.setdefault("/".join(str(line["module"]).split(".")[:-1]), []).append(line)
    rows = ["| folder | modules | mutants | found | equivalent | survived | score |", "|---|---|---|---|---|---|---|"]
    for folder, some in [*sorted(folders.items()), ("all", list(lines))]:
        count = Counter(str(line["verdict"]) for line in some)
        score = f"{count[FOUND] / max(count[FOUND] + count[SURVIVED], 1):.0%}"
        numbers = (len({line["module"] for line in some}), len(some), count[FOUND], count[EQUIVALENT], count[SURVIVED])
        rows.append(f"| {folder} | {' | '.join(map(str, numbers))} | {score} |")
    return "\n".join(rows)


def main() -> int:
    options = parser().parse_args()
    modules = modules_in(options.places)
    lines: list[dict[str, object]] = []
    began = time.monotonic()
    with copy_of_the_tree() as copy:
        tests = Tests(copy)
        known = baseline(tests, modules, options.tests)
        print(f"{len(known)} tests in {time.monotonic() - began:.0f} s", flush=True)
        for module in modules:
            name, verdicts = name_of(module), judge(module, tests, known, options)
            found = sum(verdict == FOUND for _, verdict in verdicts)
            print(f"{name:55} {found:3} of {sum(verdict != EQUIVALENT for _, verdict in verdicts):3}", flush=True)
            for one, verdict in verdicts:
                lines.append({"module": name, "line": one.line, "what": one.what, "verdict": verdict})
                if verdict == SURVIVED:
                    print(f"    {one}", flush=True)
        tests.close()
    print(f"{table(lines)}\nseeds {options.seed}, {time.monotonic() - began:.0f} s")
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
