"""The share of small faults that a test finds: `make mutants`, or `python -m tests.mutants coordinator/rounds`.

Of each module `--each` mutants are drawn by a seed. Each is put into a copy of the tree, and the module's nearest tests
run there until one fails. A mutant that they pass is printed with its line: it is a gap in the tests, or it changes
nothing that anyone can see. Those that were found to change nothing are in `equivalent.txt` and do not count.
Tests that need a browser or are marked slow do not run.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutants import Mutant, mutants_of
from tests.mutants.nearest_tests import ROOMS, ROOT, name_of, nearest_tests

GOAL = (
    *("edge_client/protocol", "edge_client/update", "coordinator/rounds", "coordinator/aggregation"),
    *("coordinator/identity", "coordinator/runtime/exchange"),
)
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
SLOWEST_S = 600.0  # of the tests of one module
PASSED, FAILED = 0, 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "places", nargs="*", type=Path, default=[Path(place) for place in GOAL], help="modules or folders"
    )
    made.add_argument("--each", type=int, default=5, help="mutants of a module (default 5)")
    made.add_argument("--tests", type=int, default=12, help="test files for a module, the nearest (default 12)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--workers", type=int, default=2, help="copies of the tree that run side by side (default 2)")
    made.add_argument("--out", type=Path, help="a file of lines of JSON, one for each mutant")
    return made


def modules_in(places: list[Path]) -> list[Path]:
    files = {file for place in places for file in ([ROOT / place] if place.suffix else (ROOT / place).rglob("*.py"))}
    return sorted(file for file in files if file.name != "__init__.py")


def drawn(module: Path, each: int, seed: int) -> list[Mutant]:
    """Without those that are known to change nothing."""
    known = {line for line in EQUIVALENT.read_text(encoding="utf-8").splitlines() if line[:1] not in ("", "#")}
    name = name_of(module)
    every = [one for one in mutants_of(module.read_text(encoding="utf-8")) if f"{name}: {one.what}" not in known]
    return random.Random(f"{seed} {name}").sample(every, min(each, len(every)))  # noqa: S311 - it draws tests


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of the tree, to be taken and given back."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for i in range(count):
            copy = Path(folder) / str(i)
            for room in ROOMS:
                shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
            for file in ROOT.iterdir():
                if file.is_file():
                    shutil.copy(file, copy)
            (copy / "docs").symlink_to(ROOT / "docs")
            if (ROOT / ".web").exists():
                (copy / ".web").symlink_to(ROOT / ".web")
            free.put(copy)
        yield free


def run_tests(copy: Path, tests: list[Path], limit_s: float) -> int:
    """pytest's exit status; a run that takes longer than `limit_s` counts as a failure of a test."""
    chosen = [str(path.relative_to(ROOT)) for path in tests]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not browser and not gpu and not board"]
    command = [sys.executable, "-B", "-m", "pytest", *options, *chosen]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    try:
        return subprocess.run(command, cwd=copy, env=env, timeout=limit_s, check=False, **quiet).returncode  # type: ignore[call-overload,no-any-return]
    except subprocess.TimeoutExpired:
        return FAILED


def judge(module: Path, free: SimpleQueue[Path], options: argparse.Namespace) -> tuple[str, list[tuple[Mutant, bool]]]:
    """-> the module, and of each mutant whether a test found it; nothing, where the tests fail without a fault."""
    name, place = name_of(module), module.relative_to(ROOT)
    tests = nearest_tests(name, options.tests)
    copy = free.get()
    try:
        began = time.monotonic()
        if not tests or run_tests(copy, tests, SLOWEST_S) != PASSED:
            return name, []
        limit_s = 20 + 3 * (time.monotonic() - began)
        verdicts = []
        for one in drawn(module, options.each, options.seed):
            (copy / place).write_text(one.of(module.read_text(encoding="utf-8")), encoding="utf-8")
            found = run_tests(copy, tests, limit_s) != PASSED
            verdicts.append((one, found))
        return name, verdicts
    finally:
        shutil.copy(module, copy / place)
        free.put(copy)


def main() -> int:
    options = parser().parse_args()
    modules = modules_in(options.places)
    lines: list[dict[str, object]] = []
    with copies(options.workers) as free, ThreadPoolExecutor(options.workers) as pool:
        for name, verdicts in pool.map(lambda module: judge(module, free, options), modules):
            score = (
                f"{sum(found for _, found in verdicts):3} of {len(verdicts):3}" if verdicts else "its tests do not pass"
            )
            print(f"{name:55} {score}", flush=True)
            for one, found in verdicts:
                lines.append({"module": name, "line": one.line, "what": one.what, "found": found})
                if not found:
                    print(f"    {one}", flush=True)
    share = sum(bool(line["found"]) for line in lines) / max(len(lines), 1)
    print(f"a test found {share:.0%} of {len(lines)} mutants (seed {options.seed})")
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
