"""An experiment's TOML file: which cells a table has, what each is, and the figures that its paper prints.

A table is columns (data set, partition, model) by rows (method, settings); a cell is one of each.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from coordinator.models.members import MODEL_NAMES, PLUS
from edge_client.errors import ConfigError, UsageError
from edge_client.toml_files import parse_toml
from emulator.experiments.file_entries import read_entry
from export.plugins import find_by_name, nearest_name_hint

EXPERIMENTS_FOLDER = Path(__file__).parent
ENDING = ".toml"


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """Where a method is tried. `devices` 0: as many as the data name."""

    name: str
    data_set: str
    partition: str
    model: str
    devices: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """What is tried: a method with its settings; `k` centers, for the reader. `paper` has one text per column.

    `against` names the row of ours that this one is compared with, seed by seed; "": none.
    """

    name: str
    method: str
    k: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    paper: tuple[str, ...] = ()
    against: str = ""

    @property
    def label(self) -> str:
        """The name with the number of centers."""
        return self.name if self.k == 1 else f"{self.name}, K = {self.k}"


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """What a paper prints: a mean, and its deviation if there is one."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """One column and row with every setting resolved; `paper` maps a metric to the printed figure.

    `centers` is how many the method begins with, by its settings or its default; of one without this setting the row's.
    """

    column: TableColumn
    row: TableRow
    centers: int
    rounds: int
    settings: Mapping[str, Any]
    paper: Mapping[str, PaperFigure]

    @property
    def name(self) -> str:
        """For the reader: row, number of centers, and column."""
        return f"{self.row.name} (K={self.centers}), {self.column.name}"

    def key(self, seed: int) -> str:
        """A file name that changes with whatever the table states: column, method, rounds, settings and seed.

        Settings that a table leaves to a method are in the file (`read_finished` compares them). The defaults of
        partitions and models, and code, are in neither: after a change of those the cells have to be run again.
        """
        facts = {
            "column": {k: v for k, v in asdict(self.column).items() if k != "name"},
            "method": self.row.method,
            "rounds": self.rounds,
            "settings": dict(self.settings),
            "seed": seed,
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]
        names = re.sub(r"[^\w.-]", "-", f"{self.column.data_set}-{self.row.method}")  # of import paths and files
        return f"{names}-k{self.row.k}-r{self.rounds}-s{seed}-{digest}"


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """What the file of a table may say; the fields are those of `ExperimentPlan`, before cells are made of them."""

    title: str
    source: str
    metrics: tuple[str, ...]
    rounds: int
    seeds: int
    columns: tuple[Mapping[str, Any], ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()
    also: Mapping[str, Any] = field(default_factory=dict)
    judged: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def row_label(cell: TableCell) -> str:
    """A row's name with its number of centers."""
    return cell.row.label


@dataclass(frozen=True, kw_only=True)
class ExperimentPlan:
    """A whole table: its cells, row by row within each column.

    `also` are measures that a kept cell may lack; each names the metric whose printed figure it is beside.
    """

    name: str
    title: str
    source: str
    notes: tuple[str, ...]
    metrics: tuple[str, ...]
    also: Mapping[str, str]
    rounds: int
    seeds: int
    cells: tuple[TableCell, ...]
    judged: str = ""  # the row that is compared with the best other one, in a table with a column for each method

    def only(self, asked: Sequence[str]) -> tuple[TableCell, ...]:
        """The cells of the named methods and rows ("WeCFL, K = 10" or without K), columns, numbers of centers ("K=10").

        Of a kind that is not named all are taken. Several words may stand in one, with commas (`split_words`). Raises
        UsageError for a word that the table lacks, and for words that no cell has together, as "FedAvg" and "K=10".
        """
        kinds: list[Callable[[TableCell], set[str]]] = [
            lambda cell: {cell.row.method, cell.row.name, cell.row.label},
            lambda cell: {cell.column.name},
            lambda cell: {f"K={cell.centers}"},
        ]
        there = [set().union(*map(kind, self.cells)) for kind in kinds]
        every = set().union(*there)
        words = {word for one in asked for word in split_words(one, every)}
        if unknown := sorted(words - every):
            what = zip(("rows and methods", "columns", "numbers of centers"), there, strict=True)
            known = ". ".join(f"{kind}: {'; '.join(sorted(some))}" for kind, some in what)
            raise UsageError(f"{self.name} has no {'; '.join(unknown)}", hint=f"use some of its {known}")
        named = [words & known for known in there]
        chosen = tuple(
            cell
            for cell in self.cells
            if all(not some or kind(cell) & some for kind, some in zip(kinds, named, strict=True))
        )
        if not chosen:
            together = " and ".join(" or ".join(sorted(some)) for some in named if some)
            raise UsageError(f"{self.name} has no cell with {together}", hint="leave a word out: each kind narrows")
        return chosen


def split_words(text: str, known: Iterable[str]) -> list[str]:
    """Words with commas between them. A known name may hold commas itself; the longest that fits is taken.

    Names are compared without regard to case and to spaces behind commas; what no known name is stays one word.
    """
    names = {_plain(name): name for name in known}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    words: list[str] = []
    while parts:
        sizes = range(len(parts), 0, -1)
        size = next((n for n in sizes if ", ".join(parts[:n]).casefold() in names), 1)
        word = ", ".join(parts[:size])
        words.append(word if size == 1 else names[word.casefold()])
        parts = parts[size:]
    return words


def _plain(name: str) -> str:
    return ", ".join(part.strip() for part in name.split(",")).casefold()


def experiment_names() -> list[str]:
    """The experiments that there are."""
    return sorted(path.stem for path in EXPERIMENTS_FOLDER.glob(f"*{ENDING}"))


def table_name(asked: str) -> str:
    """What a table is called: `asked`, or the name of the user's file without its folder and ending.

    >>> table_name("wecfl-table2"), table_name("tables/mine.toml")
    ('wecfl-table2', 'mine')
    """
    return Path(asked).stem if asked.endswith(ENDING) else asked


def read_plan(asked: str, *, rounds: int | None = None) -> ExperimentPlan:
    """The experiment of this name, or of the user's TOML file, with another number of rounds if asked.

    Raises UsageError for an unknown name, ConfigError for a file that cannot be read or describes no table.
    """
    if asked.endswith(ENDING):
        try:
            text = Path(asked).read_text(encoding="utf-8-sig")  # Windows' editors write a mark first
        except (OSError, ValueError) as wrong:
            raise ConfigError(f"{asked} cannot be read: {wrong}", hint="give the path of a table's file") from wrong
        return parse_plan(table_name(asked), text, rounds=rounds)
    if asked not in experiment_names():
        hint = f"use one of {', '.join(experiment_names())}, or a file of your own, as mine{ENDING}"
        raise UsageError(f"unknown experiment {asked!r}", hint=hint)
    return parse_plan(asked, (EXPERIMENTS_FOLDER / f"{asked}{ENDING}").read_text(encoding="utf-8"), rounds=rounds)


def parse_plan(name: str, text: str, *, rounds: int | None = None) -> ExperimentPlan:
    """A plan from its TOML text. Raises ConfigError when the text does not describe a table."""
    try:
        raw = parse_toml(text)
        json.dumps(raw)  # no dates, which the names of cells cannot hold
        file = read_entry(TableFile, raw)
        rounds = rounds or file.rounds
        _check_numbers(file.metrics, file.also, rounds=rounds, seeds=file.seeds)
        columns = [read_entry(TableColumn, entry, f"columns, number {i}: ") for i, entry in enumerate(file.columns, 1)]
        rows = [read_entry(TableRow, entry, f"rows, number {i}: ") for i, entry in enumerate(file.rows, 1)]
        _check_names(file, columns, rows)
        return ExperimentPlan(
            name=name,
            title=file.title,
            source=file.source,
            notes=file.notes,
            metrics=file.metrics,
            also=file.also,
            rounds=rounds,
            seeds=file.seeds,
            cells=_cells(file, columns, rows, rounds),
            judged=file.judged,
        )
    except (AttributeError, LookupError, TypeError, ValueError) as wrong:
        hint = f"compare it with those in {EXPERIMENTS_FOLDER}"
        told = wrong if isinstance(wrong, ValueError) else repr(wrong)  # a KeyError is the key alone
        raise ConfigError(f"experiment {name}: {told}", hint=hint) from wrong


def _check_numbers(metrics: Sequence[str], also: Iterable[str], *, rounds: int, seeds: int) -> None:
    """Raise ValueError for a measure that there is not, of which else a run would tell at its end, and for no run."""
    from emulator.experiments.measures import MEASURES

    if unknown := [name for name in (*metrics, *also) if name not in MEASURES]:
        raise ValueError(f"no measure is called {unknown[0]!r}; there are {', '.join(sorted(MEASURES))}")
    if not metrics:
        raise ValueError("metrics names no measure")
    if rounds < 1 or seeds < 1:
        raise ValueError(f"{rounds} rounds, {seeds} seeds: at least 1 of each")


def _check_names(file: TableFile, columns: Sequence[TableColumn], rows: Sequence[TableRow]) -> None:
    """Raise ValueError for an unknown row or metric, and for two of one name, of which a table would show one."""
    if unknown := set(file.also.values()) - set(file.metrics):
        raise ValueError(f"also: no metric is called {', '.join(sorted(unknown))}")
    if file.judged and file.judged not in {row.name for row in rows}:
        raise ValueError(f"judged is {file.judged!r}, and no row is called so")
    if unknown := {row.against for row in rows} - {"", *(row.name for row in rows)}:
        wrong = min(unknown)
        raise ValueError(f"no row is called {wrong!r}: {nearest_name_hint(wrong, [row.name for row in rows])}")
    named = {
        "metrics": file.metrics,
        "columns": [column.name for column in columns],
        "rows": [row.name if file.judged else row.label for row in rows],
    }
    for what, names in named.items():
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"two {what} are called {twice[0]!r}")
        if divided := [name for name in names if "|" in name]:
            raise ValueError(f"{divided[0]!r}: a name that stands in a table has no |")


def _cells(
    file: TableFile, columns: Sequence[TableColumn], rows: Sequence[TableRow], rounds: int
) -> tuple[TableCell, ...]:
    """Common settings and those of a column count for the rows whose method has them; those of a row must exist."""
    from coordinator.strategies.registry import METHODS, setting_types

    known = [setting_types(find_by_name("methods", row.method, METHODS)) for row in rows]
    every = set().union(*known)
    for key in chain(file.settings, *(column.settings for column in columns)):
        if key not in every:
            raise ValueError(f"no row has the setting {key!r}: {nearest_name_hint(key, every)}")
    for row in rows:
        if row.paper and len(row.paper) != len(columns):
            raise ValueError(f"{row.name}: paper has {len(row.paper)} texts for {len(columns)} columns")
    if few := [column for column in columns if column.devices < 0]:
        raise ValueError(f"{few[0].name}: {few[0].devices} devices")
    for column in columns:
        _check_column(column)
    cells = list[TableCell]()
    for i, column in enumerate(columns):
        for row, types in zip(rows, known, strict=True):
            common = {k: v for k, v in {**file.settings, **column.settings}.items() if k in types}
            settings = common | dict(row.settings)
            cells.append(
                TableCell(
                    column=column,
                    row=row,
                    centers=_centers(row, settings),
                    rounds=rounds,
                    settings=settings,
                    paper=_printed(row, column, row.paper[i].split() if row.paper else [], file.metrics),
                )
            )
    return tuple(cells)


def _check_column(column: TableColumn) -> None:
    """Raise ValueError for an unknown data set or model or a wrong partition: these else are told after other columns.

    A model of the user's own is imported, and not made.
    """
    from emulator.data.partition_schemes import parse_scheme
    from emulator.data.registry import find_data_set

    try:
        find_data_set(column.data_set)
        parse_scheme(column.partition)
        for part in column.model.split(PLUS):
            find_by_name("models", part, dict.fromkeys(MODEL_NAMES))
    except (ConfigError, UsageError) as wrong:
        raise ValueError(f"{column.name}: {wrong.message}: {wrong.hint}") from wrong


def _centers(row: TableRow, settings: Mapping[str, Any]) -> int:
    """How many centers the row's method begins with.

    Raises ValueError for an unknown or wrong setting, which else would be told when the cell is due.
    """
    from coordinator.strategies.registry import make_method

    try:
        clusters = getattr(make_method(row.method, **settings), "clusters", row.k)
    except ConfigError as wrong:
        raise ValueError(f"{row.name}: {wrong.message}: {wrong.hint}") from wrong
    return clusters if isinstance(clusters, int) else row.k  # a user's method may mean something else by the name


def _printed(
    row: TableRow, column: TableColumn, printed: Sequence[str], metrics: Sequence[str]
) -> dict[str, PaperFigure]:
    if printed and len(printed) != len(metrics):
        raise ValueError(f"{row.name}, {column.name}: {len(printed)} figures for {len(metrics)} metrics")
    return {m: figure for m, text in zip(metrics, printed, strict=False) if (figure := _figure(text)) is not None}


def _figure(text: str) -> PaperFigure | None:
    """A printed figure: "86.08±0.70", "86.32", or "-"."""
    if text == "-":
        return None
    mean, _, deviation = text.partition("±")
    figure = PaperFigure(mean=float(mean), deviation=float(deviation) if deviation else None)
    if not math.isfinite(figure.mean):
        raise ValueError(text)
    return figure
