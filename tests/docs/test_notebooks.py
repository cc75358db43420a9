"""The notebooks of docs/ run from top to bottom in a kernel of their own, and come out as their text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.doc_pages import DOCS, ROOT

NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))
READ: Any = nbformat.read  # nbformat has no types here
CELL_S = 300  # a cell of a few seconds, on a machine that may be busy


def texts(notebook: Any) -> list[str]:  # noqa: ANN401 - nbformat's nodes
    """What the cells printed or showed."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]


def run(path: Path, folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = READ(path, as_version=4)
    NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": str(folder)}}).execute()
    return texts(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs_and_counts(path: Path) -> None:
    cells = [cell for cell in READ(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell for cell in cells if cell.outputs or cell.execution_count is not None] == []


@pytest.mark.timeout(600)
def test_the_first_run_finds_three_centers_that_one_model_cannot_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run(DOCS / "first-run.ipynb", tmp_path, monkeypatch)
    assert any("one model: 31%, three centers: 93%" in text for text in shown)
    assert (tmp_path / "first-run" / "metrics.jsonl").is_file()


@pytest.mark.timeout(600)
def test_ones_own_data_model_and_method_beat_one_model_and_devices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run(DOCS / "your-own.ipynb", tmp_path, monkeypatch)
    table = next(text for text in shown if "megabytes" in text)
    accuracy = {line[:17].strip(): float(line[17:].split()[0]) for line in table.splitlines()[1:]}
    assert accuracy["one model"] < accuracy["each device alone"] < accuracy["careful FeSEM"]
    assert any("take 2 centers" in text for text in shown)
