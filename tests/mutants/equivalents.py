"""Mutants that were looked at and found to change nothing that a caller can see, each with the reason.

`equivalent.toml` beside this file lists them: `module`, `line` (the line's text), `what` (the change as `make mutants`
prints it) and `reason`. They do not count in the score.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from edge_client.toml_files import parse_toml
from tests.mutants.mutants import Mutant

LISTED = Path(__file__).with_name("equivalent.toml")


def listed() -> list[dict[str, str]]:
    """The file's entries."""
    return list(parse_toml(LISTED.read_text(encoding="utf-8")).get("mutant", []))


def is_equivalent(module: str, one: Mutant, entries: Iterable[dict[str, str]]) -> bool:
    """Whether a mutant of a module is listed."""
    return any((entry["module"], entry["line"], entry["what"]) == (module, one.text, one.what) for entry in entries)
