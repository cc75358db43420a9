"""What a run has found out, a line of JSON for each mutant and each file of tests: an interrupted run goes on from it.

A line counts as long as the texts that it rests on are the same. That a mutant was found rests on its module; that it
survived rests on its module and on the files of tests that ran; the tests of a file, with the lines that they execute,
on the file and on all modules that were looked at. Of several lines the last one counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutants.mutants import Mutant
from tests.mutants.nearest_tests import ROOT, name_of
from tests.mutants.score import FOUND


def digest(files: Iterable[Path]) -> str:
    """Of the texts of files, in their order."""
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:16]


class Journal:
    def __init__(self, path: Path, modules: list[Path]) -> None:
        self._path, self._modules = path, digest(modules)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if not text.endswith("\n"):  # the run was cut off in the middle of a line
            text = text[: text.rfind("\n") + 1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        whole = [json.loads(line) for line in text.splitlines()]
        self._verdicts = {tuple(line["mutant"]): line for line in whole if "mutant" in line}
        self._files = {line["file"]: line for line in whole if "file" in line}

    def verdict(self, module: Path, one: Mutant, tests: list[Path]) -> str | None:
        line = self._verdicts.get(_key(module, one), {})
        if line.get("module") != digest([module]):
            return None
        return str(line["verdict"]) if line["verdict"] == FOUND or line["tests"] == digest(tests) else None

    def add_verdict(self, module: Path, one: Mutant, tests: list[Path], verdict: str) -> None:
        line = {"mutant": _key(module, one), "at": one.line, "verdict": verdict}
        line |= {"module": digest([module]), "tests": digest(tests)}
        self._verdicts[_key(module, one)] = line
        self._append(line)

    def tests(self, file: Path) -> dict[str, Any] | None:
        line = self._files.get(str(file.relative_to(ROOT)), {})
        return dict(line["tests"]) if line.get("digest") == digest([file]) + self._modules else None

    def add_tests(self, file: Path, tests: dict[str, Any]) -> None:
        line = {"file": str(file.relative_to(ROOT)), "digest": digest([file]) + self._modules, "tests": tests}
        self._files[str(line["file"])] = line
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


def _key(module: Path, one: Mutant) -> tuple[str, str, str, int]:
    return name_of(module), one.text, one.what, one.nth
