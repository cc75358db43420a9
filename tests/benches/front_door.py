"""Bench: what `import fedcenters` costs, and the seconds from the import to the result of the digits fleet.

    python -m tests.benches.front_door [REPEATS]

Each figure is the least of REPEATS (5) fresh processes, for which .pyc files lie ready. The import is measured against
an interpreter that imports nothing; the run is the first line of the quick start, from the start of Python to its end.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

IMPORT = "import fedcenters"
RUN = """
import fedcenters as fc
result = fc.simulate(fc.FeSEM(clusters=3), fleet=fc.fleets.digits(devices=12), rounds=10)
"""


def least(code: str, repeats: int) -> tuple[float, float]:
    """-> the least wall seconds of a fresh interpreter that runs `code`, and the least seconds of CPU."""
    walls, cpus = [], []
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(repeats):
        began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, env=kept)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - began)
        cpus.append(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
    return min(walls), min(cpus)


def main() -> None:
    """Print one line per figure."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    nothing, imported, (wall, cpu) = least("", repeats), least(IMPORT, repeats), least(RUN, repeats)
    sys.stdout.write(f"import fedcenters   {1000 * (imported[0] - nothing[0]):6.1f} ms above an empty interpreter\n")
    sys.stdout.write(f"import to result    {wall:6.1f} s wall, {cpu:.1f} s of CPU\n")


if __name__ == "__main__":
    main()
