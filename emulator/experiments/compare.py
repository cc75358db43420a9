"""Differences between the rows of a table, paired by seed, with Student's 95 % interval. Pure.

Two rows are compared within one column over the seeds that both have. A difference of one seed has no interval, so
nothing says whether it is more than chance; no difference is called clear then. Each interval is that of its own pair:
of twenty pairs without any difference one is expected to look clear.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.errors import UsageError
from emulator.experiments.measures import MEASURES
from emulator.experiments.plan import TableCell, row_label, split_words
from emulator.experiments.table import CONFIDENCE, Results, paired_difference, seed_figures

BEST = "best"
WHERE_CELLS_ARE = "give the folder of finished cells as --out (as docs/results), or run them: --summary says which are"
Pair = tuple[TableCell, TableCell]
Figures = Mapping[str, Mapping[int, float]]  # a row's label -> seed -> figure, in one column


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """`first` less `second` in one measure and column. `half` of the interval is None with fewer than two seeds."""

    column: str
    measure: str
    first: str
    second: str
    by_seed: Mapping[int, float]
    mean: float
    half: float | None

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.half is not None and abs(self.mean) > self.half

    def to_json(self) -> dict[str, Any]:
        """As JSON types; `interval` is [low, high] or None, in the unit of the measure. What is not finite is None."""
        half = None if self.half is None else _finite(self.half)
        return {
            "data": self.column,
            "measure": self.measure,
            "title": MEASURES[self.measure].title,
            "first": self.first,
            "second": self.second,
            "difference": _finite(self.mean),
            "interval": None if half is None else [self.mean - half, self.mean + half],
            "confidence": CONFIDENCE,
            "n": len(self.by_seed),
            "by_seed": {str(seed): _finite(value) for seed, value in self.by_seed.items()},
            "clear": self.clear,
        }


def compare_rows(
    cells: Sequence[TableCell],
    results: Results,
    measures: Sequence[str],
    asked: Sequence[str],
    *,
    hint: str = WHERE_CELLS_ARE,
) -> list[PairedDifference]:
    """The differences of every pair that `asked` names, measure by measure, where both rows have figures.

    Two or more words: each pair of them. One word: every row less that one. "best": every row less the best one of its
    column, which is the one of best mean among those with the most seeds. A word is a row's name, with its number of
    centers ("WeCFL, K = 10") or without, or a method; several may stand in one, with commas. Rows with other numbers of
    centers are compared only where one of them has one, or the word says the number.
    Raises UsageError for an unknown word, and with `hint` where no two rows have a figure.
    """
    words = _words(cells, asked)
    found: list[PairedDifference] = []
    for column, measure in itertools.product(dict.fromkeys(cell.column.name for cell in cells), measures):
        every = {row_label(cell): cell for cell in cells if cell.column.name == column}
        figures = {label: told for label, cell in every.items() if (told := seed_figures(results(cell), measure))}
        here = [every[label] for label in figures]
        pairs = _against_best(here, figures, measure) if words == [BEST] else _pairs(here, words)
        found += [_difference(measure, pair, figures) for pair in pairs]
    if not found:
        raise UsageError(
            f"no two finished cells to compare for {', '.join(asked)}",
            hint=hint,
        )
    return found


def _words(cells: Sequence[TableCell], asked: Sequence[str]) -> list[str]:
    known = {name for cell in cells for name in (row_label(cell), cell.row.name, cell.row.method)}
    words = list(dict.fromkeys(word for text in asked for word in split_words(text, known)))
    if BEST in words and len(words) > 1:
        raise UsageError(f"{BEST} is compared with every row", hint=f"leave the other words out, or {BEST}")
    if unknown := [word for word in words if word != BEST and not _named(cells, word)[0]]:
        rows = "; ".join(dict.fromkeys(map(row_label, cells)))
        raise UsageError(f"no row or method is called {', '.join(unknown)}", hint=f"use some of {rows}; or {BEST}")
    return words


def _named(cells: Sequence[TableCell], word: str) -> tuple[list[TableCell], bool]:
    """The rows that a word names, and whether it says their number of centers."""
    for name in (row_label, lambda cell: cell.row.name, lambda cell: cell.row.method):
        if found := [cell for cell in cells if name(cell).casefold() == word.casefold()]:
            return found, name is row_label
    return [], False


def _pairs(cells: Sequence[TableCell], words: Sequence[str]) -> Iterator[Pair]:
    """Of the cells of one column."""
    if len(words) == 1:
        others, named = _named(cells, words[0])
        for pair in itertools.product([cell for cell in cells if cell not in others], others):
            if named or _comparable(*pair):
                yield pair
    for one, two in itertools.combinations(words, 2):
        (first, exact), (second, also) = _named(cells, one), _named(cells, two)
        for pair in itertools.product(first, second):
            if pair[0] != pair[1] and ((exact and also) or _comparable(*pair)):
                yield pair


def _comparable(one: TableCell, two: TableCell) -> bool:
    return one.row.k == two.row.k or 1 in (one.row.k, two.row.k)


def _against_best(cells: Sequence[TableCell], figures: Figures, measure: str) -> Iterator[Pair]:
    most = max(map(len, figures.values()), default=0)
    sign = -1 if MEASURES[measure].lower_is_better else 1
    whole = [cell for cell in cells if len(figures[row_label(cell)]) == most]
    if whole:
        sums = {row_label(cell): sign * sum(figures[row_label(cell)].values()) for cell in whole}
        best = max(whole, key=lambda cell: -math.inf if math.isnan(sums[row_label(cell)]) else sums[row_label(cell)])
        yield from ((cell, best) for cell in cells if cell != best)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _difference(measure: str, pair: Pair, figures: Figures) -> PairedDifference:
    labels = [row_label(cell) for cell in pair]
    first, second = (figures[label] for label in labels)
    mean, half, _ = paired_difference(first, second)
    return PairedDifference(
        column=pair[0].column.name,
        measure=measure,
        first=labels[0],
        second=labels[1],
        by_seed={seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())},
        mean=mean,
        half=half,
    )
