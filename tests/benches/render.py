"""Results as Markdown, and where they stand in BENCHMARKS.md. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Mapping

from tests.benches.goals import GOALS, Goal
from tests.benches.results import BenchFigure, BenchResults

BEGIN, END = "<!-- benches: begin -->", "<!-- benches: end -->"
PICTURE = "docs/growth.svg"  # beside the page; picture.py draws it
IDLE = 0.5  # a load average below this, on any machine, means that no other process was at work


def rewritten(page: str, results: BenchResults) -> str:
    """The page with what stands between its two marker comments replaced. Raises ValueError without exactly two."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs {BEGIN} and, after it, {END}, once each")
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{section(results)}\n{END}{rest.partition(END)[2]}"


def section(results: BenchResults) -> str:
    """Date, machine and commands, the table of every goal, and why a figure is missing."""
    by_row = {f.row: f for f in results.figures}
    table = [
        "| bench | against | ours | theirs | ratio | at least | aim | verdict |",
        "|---|---|--:|--:|--:|--:|--:|---|",
        *(row(goal, by_row.get(goal.row)) for goal in GOALS),
    ]
    grown = f"![How cost grows]({PICTURE})" if any(f.points for f in results.figures) else ""
    return "\n\n".join(part for part in (preface(results), "\n".join(table), missing(results), grown) if part)


def preface(results: BenchResults) -> str:
    """When, where, with what, and how busy it was."""
    before, after = results.load
    state = "idle at the start" if before < IDLE else f"busy, load {before:.1f} at the start"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results.versions.items()))
    commands = ", ".join(f"`{command}`" for command in results.commands)
    took = sum(results.seconds.values())
    return (
        f"Generated from the results of {results.date}: {commands}. {results.machine}; {state}, {after:.1f} later. "
        f"Medians of {results.repeats} interleaved repeats, of at most five where one takes seconds, one thread each "
        f"unless said; {took / 60:.0f} minutes in all. Peers: {versions or 'none'}."
    )


def row(goal: Goal, figure: BenchFigure | None) -> str:
    """One line of the table. A row without a figure is unmeasured, not won."""
    found = figure or BenchFigure(row=goal.row, unmeasured="not run")
    cells = [
        goal.bench,
        goal.against,
        number(found.ours),
        number(found.theirs),
        scored(goal, found.score),
        bound(goal, goal.at_least),
        bound(goal, goal.aim),
        verdict(goal, found),
    ]
    return "| " + " | ".join(cells) + " |"


def verdict(goal: Goal, figure: BenchFigure) -> str:
    """One of reached, missed, unmeasured; empty for a measured row that only informs."""
    if figure.unmeasured or figure.score is None:
        return "unmeasured"
    if goal.at_least is None:
        return ""
    return "reached" if goal.met(figure.score, goal.at_least) else "missed"


def missing(results: BenchResults) -> str:
    """A list of the figures that are missing, and why; all that the page needs under its table."""
    return _listed({f.row: f"unmeasured, {f.unmeasured}" for f in results.figures if f.unmeasured})


def notes(results: BenchResults) -> str:
    """A list of what stands behind each figure, for the command's output: the page would be twice as long."""
    return _listed({f.row: f.note for f in results.figures if f.note and not f.unmeasured})


def _listed(said: Mapping[str, str]) -> str:
    return "\n".join(f"* {title(goal)}: {said[goal.row]}." for goal in GOALS if goal.row in said)


def title(goal: Goal) -> str:
    """The bench and its peer."""
    return f"{goal.bench}, against {goal.against}" if goal.against else goal.bench


def number(value: float | None) -> str:
    """Three significant digits, without an exponent where a person would not write one."""
    if value is None:
        return ""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{value:.1e}"


def scored(goal: Goal, score: float | None) -> str:
    """A score with its unit."""
    return "" if score is None else _with_unit(goal, score)


def bound(goal: Goal, value: float | None) -> str:
    """A goal's bound; one that must not be exceeded says so."""
    if value is None:
        return ""
    return _with_unit(goal, value) if goal.better == "more" else f"at most {_with_unit(goal, value)}"


def _with_unit(goal: Goal, value: float) -> str:
    if goal.unit in ("x", "%"):
        return f"{value:.2f}x" if goal.unit == "x" else f"{value:.0f} %"
    return f"{number(value)} {goal.unit}".rstrip()
