"""`make runtimes`: every Python and runtime that we name, in an environment of its own, and one table of what they did.

    python -m tests.runtimes                          all rows, the demo on the server's Pythons, resolutions
    python -m tests.runtimes --only 3.10-newest ...   these device rows and the resolutions

Leaves with 1 when a row fails. A Python without an interpreter on this machine is a skip with its reason, and in CI a
failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.runtimes import write
from tests.runtimes.environments import HOME, ROOT, Missing, interpreter, made, resolves, versions
from tests.runtimes.federation import ENGINES, federate
from tests.runtimes.rows import PYTHONS, ROWS, SERVERS, Row
from tests.support.requirements import IN_CI

UPDATES = HOME / "updates"
HEAD = ("row", "ran with", "what ran", "result")
# What uv resolves for every Python, from wheels: what `make install` asks for, and the lowest of every extra.
EVERY = [f"--extra={extra}" for extra in ("dev", "onnx", "litert", "images")]
RESOLUTIONS = {
    "constraints.txt with everything": [*EVERY, "--constraints", "constraints.txt"],
    "newest of everything": EVERY,
    "lowest of everything": [*EVERY, "--resolution", "lowest-direct"],
}
Line = tuple[str, str, str, str]


def main(only: list[str]) -> int:
    """-> the exit code."""
    lines = [*resolutions(), *devices([row for row in ROWS if not only or row.name in only])]
    if not only:
        lines += [line for python in SERVERS for line in demo(python)]
    print("\n" + table(lines))  # noqa: T201 - its data
    return 1 if any(line[3].startswith("FAIL") for line in lines) else 0


def resolutions() -> Iterator[Line]:
    """Each Python that we name, whether its interpreter is here or not."""
    for what, options in RESOLUTIONS.items():
        for python in PYTHONS:
            wrong = resolves(python, *options)
            yield _seen((f"{python}, resolved", what, "wheels found", f"FAIL: {wrong[:300]}" if wrong else "ok"))


def devices(rows: Iterable[Row]) -> Iterator[Line]:
    """The engines' suite in each environment, one after the other; then one federation of all of them."""
    pythons: dict[str, Path] = {}
    seen: dict[str, str] = {}
    for row in rows:
        try:
            pythons[row.name] = made(row)
        except (Missing, RuntimeError) as wrong:
            word = "FAIL" if IN_CI or isinstance(wrong, RuntimeError) else "skipped"
            yield _seen((row.name, "", "", f"{word}: {' '.join(str(wrong).split())[-300:]}"))
    if not pythons:
        return
    if not UPDATES.exists():
        fresh = UPDATES.with_name("updates.part")
        shutil.rmtree(fresh, ignore_errors=True)
        write.main(fresh)
        fresh.rename(UPDATES)
    for name, python in pythons.items():
        seen[name] = suite(python)
    with tempfile.TemporaryDirectory() as folder:
        told = federate(pythons, Path(folder) / "federation")
    for name, python in pythons.items():
        had = ", ".join(f"{package} {version}" for package, version in versions(python).items())
        both = [told[name, engine] for engine in ENGINES]
        wrong = [f"{engine} {w}" for engine, t in zip(ENGINES, both, strict=True) for w in t.wrong]
        good = "; ".join(
            f"{e}: alone {t.alone:.0%}, nearest {t.nearest:.0%}" for e, t in zip(ENGINES, both, strict=True)
        )
        failed = wrong if seen[name].endswith(" passed") else [f"suite: {seen[name]}", *wrong]
        ran = f"suite ({seen[name]}), doctor, join, nearest"
        yield _seen((name, had, ran, f"FAIL: {'; '.join(failed)}" if failed else f"ok; {good}"))


def suite(python: Path) -> str:
    """pytest's last line, without the time."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"FEDCENTERS_UPDATES": str(UPDATES)}
    alone = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider"]
    command = [python, "-m", "pytest", *alone, str(ROOT / "tests" / "runtimes" / "suite.py")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)  # noqa: T201 - talk
    return (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1].partition(" in ")[0]


def demo(python: str) -> Iterator[Line]:
    """What a user types: `make demo` on this Python, in an environment that the Makefile makes with constraints.txt."""
    venv = HOME / f"server-{python}"
    what = "make install, make demo"
    try:
        command = [
            "make",
            "--no-print-directory",
            "demo",
            f"VENV={venv.relative_to(ROOT)}",
            f"PYTHON={interpreter(python)}",
        ]
    except Missing as wrong:
        yield _seen((f"{python}, server", "", what, f"skipped: {wrong}"))
        return
    began_s = time.monotonic()
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    with tempfile.TemporaryDirectory() as folder:
        env |= {"TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    took = f"{time.monotonic() - began_s:.0f} s"
    found = versions(venv / "bin" / "python") if venv.exists() else {}
    had = ", ".join(f"{package} {version}" for package, version in found.items())
    said = " ".join((done.stderr.strip().splitlines() or [""])[-1].split())
    yield _seen(
        (f"{python}, server", had, what, f"ok; {took}: {said}" if done.returncode == 0 else f"FAIL: {said[:300]}")
    )


def table(lines: Iterable[Line]) -> str:
    """In markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _seen(line: Line) -> Line:
    print(" · ".join(cell for cell in line if cell), file=sys.stderr, flush=True)  # noqa: T201 - talk
    return line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], choices=[row.name for row in ROWS], help="rows of devices")
    sys.exit(main(parser.parse_args().only))
