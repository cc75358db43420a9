"""The share of the mutants that a test finds, by folder, with its interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

FOUND, SURVIVED, EQUIVALENT = "found", "survived", "equivalent"
Z = 1.96  # standard deviations on each side of 95 % of a normal distribution


def interval(found: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; without a mutant it is any share."""
    if not of:
        return 0.0, 1.0
    share, weight = found / of, Z**2 / of
    middle, half = share + weight / 2, Z * math.sqrt(share * (1 - share) / of + weight / (4 * of))
    return max(0.0, (middle - half) / (1 + weight)), min(1.0, (middle + half) / (1 + weight))


def table(verdicts: Sequence[tuple[str, str]]) -> str:
    """Of (module, verdict) of each mutant the score by folder, in Markdown: found of those that are not equivalent."""
    folders: dict[str, list[tuple[str, str]]] = {}
    for module, verdict in verdicts:
        folders.setdefault("/".join(module.split(".")[:-1]), []).append((module, verdict))
    rows = [
        "| folder | modules | mutants | equivalent | found | survived | score | 95 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *(_row(folder, some) for folder, some in [*sorted(folders.items()), ("all", verdicts)])])


def _row(folder: str, some: Iterable[tuple[str, str]]) -> str:
    some = list(some)
    count = Counter(verdict for _, verdict in some)
    of = count[FOUND] + count[SURVIVED]
    low, high = interval(count[FOUND], of)
    numbers = (len({module for module, _ in some}), len(some), count[EQUIVALENT], count[FOUND], count[SURVIVED])
    score = f"{count[FOUND] / of:.0%}" if of else "-"
    return f"| {folder} | {' | '.join(map(str, numbers))} | {score} | {low:.0%} to {high:.0%} |"
