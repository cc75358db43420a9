"""The tests of a module: the test files that import it, directly or through other files, the nearest first."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("edge_client", "coordinator", "export", "emulator", "tests")


def name_of(path: Path) -> str:
    """coordinator/rounds/round.py -> coordinator.rounds.round"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def importers() -> dict[str, set[str]]:
    """Which modules import a module, by name."""
    paths = {name_of(path): path for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in paths.items():
        for imported in _imports(path):
            found[imported].add(name)
    return found


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def nearest_tests(module: str, most: int) -> list[Path]:
    """At most `most` test files, by the length of the way; the module's own file, then its folder's first."""
    seen, wave, found = {module}, [module], list[str]()
    while wave and len(found) < most:
        wave = sorted({name for near in wave for name in importers()[near]} - seen)
        seen |= set(wave)
        room, _, own = ("tests." + module).rpartition(".")
        files = [name for name in wave if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")]
        found += sorted(files, key=lambda name: (name != f"{room}.test_{own}", not name.startswith(room + "."), name))
    return [ROOT / (name.replace(".", "/") + ".py") for name in found[:most]]
