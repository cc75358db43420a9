"""The runs and the kept cells that the pictures of the papers are drawn from, and how a picture is written."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from coordinator.rounds.round import EvaluationPlan
from coordinator.strategies.registry import make_method, method_settings
from emulator.data import registry
from emulator.data.fleet_split import FleetData
from emulator.data.partition_schemes import parse_scheme
from emulator.experiments.command import ExperimentArgs
from emulator.experiments.kept_cells import finished_results
from emulator.experiments.plan import TableCell, read_plan, row_label
from emulator.reports import plots
from emulator.reports.pictures.recorder import DEFAULT_REPRESENTATION, RunRecorder
from emulator.run.execute import open_run
from emulator.run.live_run import LiveRun
from emulator.run.load import open_devices
from emulator.run.settings import RunSettings

KEPT = Path(__file__).parents[3] / "docs" / "results"
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Pictures by name, and what they show in numbers, by what was measured."""

    pictures: Mapping[str, Figure] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Drawn) -> Drawn:
        return Drawn(pictures={**self.pictures, **other.pictures}, facts={**self.facts, **other.facts})


def write_picture(figure: Figure, out: Path) -> None:
    """Write it as .svg, places in hundredths of a point; the same numbers give the same bytes."""
    text = io.StringIO()
    with rc_context(plots.STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    out.write_text(shorten_paths(text.getvalue()), encoding="utf-8")


def shorten_paths(svg: str) -> str:
    """The picture with two decimals in the outlines of its shapes; bars of 200 devices have half the bytes."""
    return re.sub(r' d="[^"]+"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)


def table_cell(table: str, column: str, row: str, **changed: Any) -> TableCell:  # noqa: ANN401 - a setting's own type
    """The cell of a paper's table, by the names of its column and row; `changed` are other settings of its method."""
    cell = next(c for c in read_plan(table).cells if (c.column.name, row_label(c)) == (column, row))
    return replace(cell, settings={**cell.settings, **changed})


def kept_curves(table: str, rounds: int, names: Sequence[tuple[str, str]], quantity: str) -> dict[str, list[float]]:
    """Shares by round of kept cells with seed 0, by row; `names` are their columns and rows. Raises KeyError."""
    results = finished_results(ExperimentArgs(name=table, out=KEPT).place, SEED + 1)
    cells = {(c.column.name, row_label(c)): c for c in read_plan(table, rounds=rounds).cells}
    return {row: results(cells[column, row])[0]["curves"][quantity] for column, row in names}


def cut(cell: TableCell, data: Path | None, *, devices: int = 0) -> FleetData:
    """The fleet of a cell, with as many devices as its table has or `devices`."""
    whole = registry.load_data_set(cell.column.data_set, data, seed=SEED)
    return parse_scheme(cell.column.partition).split(whole, devices=devices or cell.column.devices, seed=SEED)


@contextmanager
def opened(cell: TableCell, split: FleetData, *, rounds: int, moments: int) -> Iterator[tuple[LiveRun, RunSettings]]:
    """A run of the cell that keeps the models of `moments` of its rounds and is evaluated after the last."""
    strategy = make_method(cell.row.method, **cell.settings)
    batch = int(method_settings(strategy)["batch-size"])
    settings = RunSettings(
        rounds=rounds, seed=SEED, batch=batch, deadline_s=math.inf, evaluation=EvaluationPlan(every=rounds)
    )
    with open_devices(cell.column.model, split, seed=SEED, batch=batch) as (devices, start):
        live = open_run(strategy, start, devices, settings)
        kind = getattr(strategy, "representation", DEFAULT_REPRESENTATION)
        live.recorder = RunRecorder(live.fleet, devices.program.schema, rounds=rounds, kind=kind, moments=moments)
        yield live, settings
