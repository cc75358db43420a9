"""`make runtimes`: every Python and runtime that we name, in an environment of its own, and one table of what they did.

    python -m tests.runtimes                          all rows, the demo on the server's Pythons, resolutions
    python -m tests.runtimes --only 3.10-newest ...   these device rows, and whether constraints.txt holds
    python -m tests.runtimes --install ...            only make the environments of the device rows

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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.runtimes import write
from tests.runtimes.environments import HOME, ROOT, Missing, interpreter, lowest_server, made, resolves, versions
from tests.runtimes.federation import ENGINES, federate
from tests.runtimes.rows import LOWEST_SERVER, PYTHONS, ROWS, SERVERS, Row
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


def main(only: list[str], *, install: bool = False) -> int:
    """-> the exit code. `install`: make the environments of the devices, and run nothing."""
    rows = [row for row in ROWS if not only or row.name in only]
    if install:
        return 0 if len(environments(rows)[0]) == len(rows) or not IN_CI else 1
    lines = [*resolutions("constraints.txt with everything" if only else ""), *devices(rows)]
    if not only:
        lines += demos()
    print("\n" + table(lines))  # noqa: T201 - its data
    return 1 if any(line[3].startswith("FAIL") for line in lines) else 0


def resolutions(only: str = "") -> Iterator[Line]:
    """Each Python that we name, whether its interpreter is here or not."""
    for what, options in RESOLUTIONS.items():
        if only not in ("", what):
            continue
        for python in PYTHONS:
            wrong = resolves(python, *options)
            yield _seen((f"{python}, resolved", what, "wheels found", f"FAIL: {wrong[:300]}" if wrong else "ok"))


def environments(rows: Iterable[Row]) -> tuple[dict[str, Path], list[Line]]:
    """The interpreter of each row that could be made, and a line about each that could not."""
    pythons, failed = dict[str, Path](), list[Line]()
    for row in rows:
        try:
            pythons[row.name] = made(row)
        except (Missing, RuntimeError) as wrong:  # noqa: PERF203 - a dozen of them
            word = "FAIL" if IN_CI or isinstance(wrong, RuntimeError) else "skipped"
            failed.append(_seen((row.name, "", "", f"{word}: {' '.join(str(wrong).split())[-300:]}")))
    return pythons, failed


def devices(rows: Iterable[Row]) -> Iterator[Line]:
    """The engines' suite in each environment, one after the other; then one federation of all of them."""
    seen: dict[str, str] = {}
    pythons, failed = environments(rows)
    yield from failed
    if not pythons:
        return
    shutil.rmtree(UPDATES, ignore_errors=True)
    write.main(UPDATES)
    for name, python in pythons.items():
        seen[name] = suite(python)
    with tempfile.TemporaryDirectory() as folder:
        told = federate(pythons, Path(folder) / "federation")
    for name, python in pythons.items():
        had = ", ".join(f"{package} {version}" for package, version in versions(python).items())
        both = [told[name, engine] for engine in ENGINES]
        said = [f"{engine} {w}" for engine, t in zip(ENGINES, both, strict=True) for w in t.wrong]
        good = "; ".join(
            f"{e}: alone {t.alone:.0%}, nearest {t.nearest:.0%}" for e, t in zip(ENGINES, both, strict=True)
        )
        faults = said if seen[name].endswith(" passed") else [f"suite: {seen[name]}", *said]
        ran = f"suite ({seen[name]}), doctor, join, nearest"
        yield _seen((name, had, ran, f"FAIL: {'; '.join(faults)}" if faults else f"ok; {good}"))


def suite(python: Path) -> str:
    """pytest's last line, without the time."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"FEDCENTERS_UPDATES": str(UPDATES)}
    alone = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider"]
    command = [str(python), "-m", "pytest", *alone, str(ROOT / "tests" / "runtimes" / "suite.py")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)  # noqa: T201 - talk
    return (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1].partition(" in ")[0]


def demos() -> Iterator[Line]:
    """What a user types on each of the server's Pythons, and the demo with the lowest of everything."""
    for python in SERVERS:
        venv = HOME / f"server-{python}"
        try:
            options = (f"VENV={venv.relative_to(ROOT)}", f"PYTHON={interpreter(python)}")
        except Missing as wrong:
            yield _seen((f"{python}, server", "", "", f"skipped: {wrong}"))
            continue
        command = ("make", "--no-print-directory", "demo", *options)
        yield demo(f"{python}, server", "make install, make demo", command, venv)
    python_of_all = lowest_server()
    program = str(python_of_all.with_name("fedcenters-emulator"))
    yield demo(f"{LOWEST_SERVER}, server, lowest", "demo", (program, "demo"), python_of_all.parents[1])


def demo(name: str, what: str, command: Sequence[str], venv: Path) -> Line:
    """The whole chain: every engine trains, the files are verified, new devices choose."""
    began_s = time.monotonic()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FEDCENTERS_", "MAKE", "MFLAGS", "PYTHONPATH"))}
    with tempfile.TemporaryDirectory() as folder:
        env |= {"TMPDIR": folder}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    had = ", ".join(f"{p} {v}" for p, v in versions(venv / "bin" / "python").items()) if venv.exists() else ""
    said = " ".join(line.strip() for line in done.stderr.strip().splitlines()[-3:])[-300:]
    took = f"{time.monotonic() - began_s:.0f} s"
    return _seen((name, had, what, f"ok; {took}" if done.returncode == 0 else f"FAIL: {said}"))


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
    parser.add_argument("--install", action="store_true", help="make the environments of these rows, run nothing")
    sys.exit(main(**vars(parser.parse_args())))
