"""A copy of the tree in which a module can be changed, and pytest there, in forks of one process (forks.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mutants.nearest_tests import ROOMS, ROOT, name_of

MARKED = "not slow and not browser and not gpu and not board"
TEST_S = 180.0  # as in pyproject.toml


@contextmanager
def tree_copy(patience: float) -> Iterator[TreeCopy]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder) / "copy"
        for room in ROOMS:
            shutil.copytree(ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy(file, root)
        (root / "docs").symlink_to(ROOT / "docs")
        if (ROOT / ".web").exists():
            (root / ".web").symlink_to(ROOT / ".web")
        copy = TreeCopy(root, patience)
        try:
            yield copy
        finally:
            copy.close()


class TreeCopy:
    def __init__(self, root: Path, patience: float) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        self._root = root
        self._timeout_s = TEST_S * patience
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forks"],
            cwd=root,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @contextmanager
    def changed(self, module: Path, source: str) -> Iterator[None]:
        """With a module's text replaced."""
        place = self._root / module.relative_to(ROOT)
        place.write_text(source, encoding="utf-8")
        try:
            yield
        finally:
            shutil.copy(module, place)

    def run(self, tests: Iterable[str], limit_s: float, profile: str, marked: str = "") -> int:
        """pytest's status at the first failure."""
        return int(self._asked(["-x", "-m", MARKED + marked, *tests], limit_s, profile, [])["status"])

    def traced(self, file: Path, modules: Iterable[Path], limit_s: float) -> dict[str, Any]:
        """Of each test of a file that passes its `seconds`, and the `lines` of the modules that it executes."""
        return dict(self._asked(["-m", MARKED, str(file.relative_to(ROOT))], limit_s, "few", modules)["tests"])

    def close(self) -> None:
        self._server.communicate()

    def _asked(self, arguments: list[str], limit_s: float, profile: str, traced: Iterable[Path]) -> Any:  # noqa: ANN401 - JSON
        assert self._server.stdin
        assert self._server.stdout
        asked = {
            "arguments": ["-q", "-p", "no:cacheprovider", "-o", f"timeout={self._timeout_s}", *arguments],
            "limit_s": limit_s,
            "profile": profile,
            "traced": {str(self._root / module.relative_to(ROOT)): name_of(module) for module in traced},
        }
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())
