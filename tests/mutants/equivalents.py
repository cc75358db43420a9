"""Mutants that were looked at and found to change nothing that a caller can see, each with the reason.

`equivalent.toml` beside this file lists them: `module`, `line` (the line's text), `what` (the change as `make mutants`
prints it), `reason`, and `nth` where it is only one of several such changes of the line. They do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edge_client.toml_files import parse_toml
from tests.mutants.mutants import Mutant

LISTED = Path(__file__).with_name("equivalent.toml")


def listed() -> list[dict[str, Any]]:
    """The file's entries."""
    return list(parse_toml(LISTED.read_text(encoding="utf-8")).get("mutant", []))


def is_equivalent(module: str, one: Mutant, entries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a mutant of a module is listed."""
    mine = {"module": module, "line": one.text, "what": one.what, "nth": one.nth}
    return any(all(entry.get(name, value) == value for name, value in mine.items()) for entry in entries)
