"""The reference is made from docstrings: every public name has one, and the pages can be written."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.reference import ROOMS

ROOT = Path(__file__).parents[2]


def public(file: Path) -> list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """A module, and its classes and functions without a leading underscore; a class speaks for its methods."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [module, *(node for node in module.body if isinstance(node, kinds) and not node.name.startswith("_"))]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_a_docstring(room: str) -> None:
    silent = [
        f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}"
        for file in (ROOT / room).rglob("*.py")
        for node in public(file)
        if not ast.get_docstring(node)
    ]
    assert silent == []


def test_a_page_is_written_with_the_docstrings_words(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.docs.reference", str(tmp_path), "edge_client.protocol.topics"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    page = (tmp_path / "edge_client" / "protocol" / "topics.html").read_text(encoding="utf-8")
    assert "check_federation" in page
    assert (tmp_path / "index.html").is_file()
