"""The tests of a module: the test files that import it, directly or through other files, the nearest first."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("edge_client", "coordinator", "export", "emulator", "tests")
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([A-Za-z_][\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)|import[ \t]+([^\n#]*))", re.MULTILINE
)
_COMMENT = re.compile(r"#[^\n]*")


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
    """By the text, which is thirty times as fast as by the syntax tree; so programs in texts count as well."""
    for found in _IMPORT.finditer(path.read_text(encoding="utf-8")):
        module, names, plain = found.groups()
        listed = _COMMENT.sub("", (names or plain).strip("()")).split(",")
        each = [name.split()[0] for name in listed if name.strip()]
        if module:
            yield module
        yield from (f"{module}.{name}" if module else name for name in each)


def nearest_tests(module: str, most: int) -> list[Path]:
    """At most `most` test files: the module's own, whatever it imports, then by the length of the way."""
    seen, wave = {module}, [module]
    room, _, stem = ("tests." + module).rpartition(".")
    own = f"{room}.test_{stem}"
    found = [own] if (ROOT / (own.replace(".", "/") + ".py")).exists() else []
    while wave and len(found) < most:
        wave = sorted({name for near in wave for name in importers()[near]} - seen)
        seen |= set(wave)
        files = [name for name in wave if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")]
        found += sorted(set(files) - {own}, key=lambda name: (not name.startswith(room + "."), name))
    return [ROOT / (name.replace(".", "/") + ".py") for name in found[:most]]
