"""The table of the zoo's results, for docs/models.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST = 140  # of a cell
ENGINES = {"onnx": "ONNX", "litert": "TFLite", "pt2": "pt2"}
FIGURE = re.compile(r"\de[+-]\d\d")  # the largest difference; anything else is why there are no files
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"


def write_report(page: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the table between the marks of the page."""
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{report(found)}\n{END}{after}", encoding="utf-8")


def report(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Counts, a row for each architecture that compiles, and one for each that is refused."""
    made = {key: found[key] for key in sorted(found) if found[key]["verdict"] != "not made"}
    counts = Counter(one["verdict"] for one in made.values())
    passed = counts["matches"] + counts["fixed batch"]
    share = f"{passed} compile ({passed / max(1, len(made)):.0%})"
    titles = " | ".join(ENGINES.values())
    lines = [
        f"{len(made)} architectures: {share}, {counts['refused']} are refused, {counts['wrong']} are wrong.",
        f"With files: {', '.join(_written(title, engine, made) for engine, title in ENGINES.items())}.",
        "",
        f"| library | architecture | batch | trained parameters | nodes | step, float64 | {titles} |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for key, one in made.items():
        if one["verdict"] in {"matches", "fixed batch"}:
            lines.append(_row(key, one))
    lines += ["", "| library | architecture | why it is refused |", "|---|---|---|"]
    for key, one in made.items():
        if one["verdict"] == "refused":
            library, _, name = key.partition("/")
            lines.append(f"| {library} | {name} | {_cell(one['said'])} |")
    return "\n".join(lines)


def _written(title: str, engine: str, made: Mapping[str, Mapping[str, Any]]) -> str:
    """How many rows have files for an engine, and how many it was refused for."""
    said = [one["engines"][engine] for one in made.values() if engine in one.get("engines", {})]
    refused = [text for text in said if not FIGURE.fullmatch(text)]
    return f"{len(said) - len(refused)} for {title}" + (f" ({len(refused)} refused)" if refused else "")


def _row(key: str, one: Mapping[str, Any]) -> str:
    library, _, name = key.partition("/")
    engines = [_cell(one.get("engines", {}).get(engine, "")) for engine in ENGINES]
    batch = "any" if one["verdict"] == "matches" else "fixed"
    cells = [library, name, batch, f"{one['parameters']:,}", f"{one['nodes']:,}", f"{one['difference']:.0e}", *engines]
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """A figure, or what was said without the model's name and the hint, cut at a word."""
    said = " ".join(text.partition("hint:")[0].replace("|", "/").split())
    said = re.sub(r"^model '[^']*' ", "", said)
    return said if len(said) <= LONGEST else said[:LONGEST].rpartition(" ")[0] + " ..."
