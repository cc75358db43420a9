"""The server's clustering against scikit-learn: time, objective, recovered groups, and how the cost grows.

    python tests/benches/clustering_scaling.py                     200 x 29,034, k = 5, 20 restarts, and the growth
    python tests/benches/clustering_scaling.py --large             also 3,550 x 120,000 (1.7 GB of points; ours only)
    python tests/benches/clustering_scaling.py --n 500 --json FILE

Both sides take turns in one process on one thread; figures are medians. CPU time is what a busy machine leaves true.
Points are isotropic noise about k centers; `noise` is in units of the spread of the centers, per coordinate. A Markdown
table goes to stdout, progress to stderr. Nothing is asserted: time is measured here and never in the tests.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.backend import select_backend
from coordinator.clustering.gram import GramMatrix
from coordinator.clustering.kmeans import kmeans, objective
from coordinator.rounds.metrics import ari

RESTARTS = 20
CLEAR, WEAK = (1, 3, 6), (8, 10)  # noise
Points = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ClusteringRow:
    """One line: `ours` and `theirs` in the unit of the name's goal, their ratio or difference, what is wanted."""

    name: str
    ours: float
    theirs: float | None
    ratio: float
    goal: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Ours:
    """One run of the server's step: seconds of CPU and wall, in all and after the last arrival; what it found."""

    cpu: float
    wall: float
    after_cpu: float
    after_wall: float
    labels: Labels
    matrix: NDArray[np.float64]


def draw_points(n: int, d: int, k: int, noise: float, seed: int = 0) -> tuple[Iterator[Points], Labels]:
    """Points one by one, and their true groups."""
    rng, truth = np.random.default_rng(seed), np.arange(n) % k
    centers = rng.standard_normal((k, d), dtype=np.float32)
    return (centers[j] + np.float32(noise) * rng.standard_normal(d, dtype=np.float32) for j in truth), truth


def ours(points: Iterator[Points], n: int, d: int, k: int) -> Ours:
    """Everything that the server does to cluster n arrivals; making the points is not counted."""
    grown, cpu, wall = GramMatrix(np.zeros(d, np.float32), n, where=select_backend("cpu")), 0.0, 0.0
    places = np.random.default_rng(1).permutation(n).tolist()  # the server orders devices by name, not by arrival
    for point, place in zip(points, places, strict=True):
        cpu0, wall0 = time.process_time(), time.perf_counter()
        grown.add(point, at=place)
        last = time.process_time() - cpu0, time.perf_counter() - wall0
        cpu, wall = cpu + last[0], wall + last[1]
    cpu0, wall0 = time.process_time(), time.perf_counter()
    matrix = grown.submatrix(np.arange(n))
    found = kmeans(matrix, k, np.random.default_rng(0), restarts=RESTARTS, where=select_backend("cpu"))
    rest = time.process_time() - cpu0, time.perf_counter() - wall0
    return Ours(
        cpu=cpu + rest[0],
        wall=wall + rest[1],
        after_cpu=last[0] + rest[0],
        after_wall=last[1] + rest[1],
        labels=found.labels[places],
        matrix=matrix[np.ix_(places, places)],
    )


def theirs(points: Points, k: int) -> tuple[float, float, Labels]:
    """scikit-learn: CPU seconds, wall seconds, labels."""
    from sklearn.cluster import KMeans

    cpu, wall = time.process_time(), time.perf_counter()
    labels = KMeans(k, n_init=RESTARTS, random_state=0).fit(points).labels_
    return time.process_time() - cpu, time.perf_counter() - wall, labels.astype(np.int64)


def measure(
    *, n: int = 200, d: int = 29_034, k: int = 5, repeats: int = 5, large: bool = False, growth: bool = True
) -> list[ClusteringRow]:
    """All rows, on one thread."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

    with threadpool_limits(1):
        rows = [*_times(n, d, k, repeats), *_quality(n, d, k)]
        if large:
            _say("3550 x 120000")
            rows.append(_large())
        if growth:
            rows += _growth(repeats)
    return rows


def _times(n: int, d: int, k: int, repeats: int) -> list[ClusteringRow]:
    """Both sides in turn on clusters of noise 3."""
    points = np.stack(list(draw_points(n, d, k, 3)[0]))
    mine, yours = [], []
    ours(iter(points), n, d, k)
    for number in range(repeats):
        _say(f"{n} x {d}, turn {number + 1} of {repeats}")
        mine.append(ours(iter(points), n, d, k))
        yours.append(theirs(points, k))

    def median(of: Callable[[Ours], float]) -> float:
        return statistics.median(of(run) for run in mine)

    cpu, wall = 1e3 * statistics.median(run[0] for run in yours), 1e3 * statistics.median(run[1] for run in yours)
    total, after = 1e3 * median(lambda run: run.cpu), 1e3 * median(lambda run: run.after_cpu)
    walls = f"wall {1e3 * median(lambda r: r.wall):.1f} and {wall:.0f} ms"
    late = f"wall {1e3 * median(lambda r: r.after_wall):.1f} ms"
    return [
        ClusteringRow(
            name="clustering-time", ours=total, theirs=cpu, ratio=cpu / total, goal="25 x, aim 40 x", note=walls
        ),
        ClusteringRow(name="clustering-after", ours=after, theirs=cpu, ratio=cpu / after, goal="5 ms", note=late),
    ]


def _quality(n: int, d: int, k: int) -> list[ClusteringRow]:
    """The objectives of both sides' labels, and the adjusted Rand index with the true groups."""
    excess, gain = list[tuple[float, float]](), list[tuple[float, float]]()
    said: dict[bool, list[str]] = {True: [], False: []}
    for noise in (*CLEAR, *WEAK):
        _say(f"objective, noise {noise}")
        some, truth = draw_points(n, d, k, noise)
        points = np.stack(list(some))
        run, labels = ours(iter(points), n, d, k), theirs(points, k)[2]
        mine, yours = (objective(run.matrix, found, k, np.ones(n)) for found in (run.labels, labels))
        (excess if noise in CLEAR else gain).append((mine, yours))
        scores = [ari(truth.tolist(), found.tolist()) for found in (run.labels, labels)]
        said[noise in CLEAR].append(f"noise {noise}: ARI {scores[0]:.2f} and {scores[1]:.2f}, {mine / yours - 1:+.1e}")
    worst, best = max(excess, key=lambda v: v[0] / v[1]), min(gain, key=lambda v: v[1] / v[0])
    above = worst[0] / worst[1] - 1
    notes = ["; ".join(said[clear]) for clear in (True, False)]
    return [
        ClusteringRow(
            name="clustering-objective", ours=worst[0], theirs=worst[1], ratio=above, goal="1e-9", note=notes[0]
        ),
        ClusteringRow(
            name="clustering-weak", ours=best[0], theirs=best[1], ratio=best[1] / best[0], goal="1 x", note=notes[1]
        ),
    ]


def _large() -> ClusteringRow:
    """Seconds after the last arrival; scikit-learn would take minutes."""
    points, truth = draw_points(3_550, 120_000, 5, 3)
    run = ours(points, 3_550, 120_000, 5)
    score = ari(truth.tolist(), run.labels.tolist())
    note = f"wall {run.after_wall:.3f} s; {run.cpu:.1f} s CPU in all; ARI {score:.2f}; scikit-learn not run"
    return ClusteringRow(
        name="clustering-large", ours=run.after_cpu, theirs=None, ratio=run.after_cpu, goal="0.3 s", note=note
    )


def _growth(repeats: int) -> list[ClusteringRow]:
    """CPU seconds against n, k and d, and the exponent of a power that fits them."""
    ways: dict[str, list[tuple[int, int, int]]] = {
        "n": [(n, 10_000, 5) for n in (100, 200, 400, 800, 1_600, 3_200)],
        "k": [(200, 10_000, k) for k in (2, 4, 8, 16, 32)],
        "d": [(100, d, 5) for d in (10_000, 30_000, 100_000, 300_000, 1_000_000)],
    }
    rows = []
    for axis, cases in ways.items():
        totals, afters = [], []
        for n, d, k in cases:
            _say(f"growth: {n} x {d}, k = {k}")
            times = repeats if n * n * d < 10**10 else 1  # seconds a run, and steady
            runs = [ours(draw_points(n, d, k, 3)[0], n, d, k) for _ in range(times)]
            totals.append(statistics.median(run.cpu for run in runs))
            afters.append(statistics.median(run.after_cpu for run in runs))
        at = np.log([case["ndk".index(axis)] for case in cases])
        slopes = [float(np.polyfit(at, np.log(seen), 1)[0]) for seen in (totals, afters)]
        note = f"after the last arrival {slopes[1]:.2f}; ms in all: " + ", ".join(f"{1e3 * t:.1f}" for t in totals)
        note += "; after: " + ", ".join(f"{1e3 * t:.1f}" for t in afters)
        rows.append(
            ClusteringRow(
                name=f"clustering-growth-{axis}", ours=slopes[0], theirs=None, ratio=slopes[0], goal="", note=note
            )
        )
    return rows


def machine() -> str:
    """Processor, cores, load, and what counted."""
    import os

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores, one thread, load {os.getloadavg()[0]:.1f}, numpy {np.__version__}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def table(rows: list[ClusteringRow]) -> str:
    """Markdown."""
    lines = ["| row | ours | theirs | ratio | goal | |", "|---|---|---|---|---|---|"]
    for row in rows:
        yours = "" if row.theirs is None else f"{row.theirs:.4g}"
        lines.append(f"| {row.name} | {row.ours:.4g} | {yours} | {row.ratio:.4g} | {row.goal} | {row.note} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("n", 200), ("d", 29_034), ("k", 5), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--large", action="store_true", help="also 3,550 x 120,000")
    parser.add_argument("--no-growth", action="store_true", help="without the growth of the cost")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    asked = parser.parse_args()
    began, sizes = machine(), {"n": asked.n, "d": asked.d, "k": asked.k}
    rows = measure(**sizes, repeats=asked.repeats, large=asked.large, growth=not asked.no_growth)
    if asked.json is not None:
        found = {"machine": began, **sizes, "restarts": RESTARTS, "rows": [asdict(row) for row in rows]}
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{began}; load at the end {machine().partition('load ')[2].partition(',')[0]}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
