"""The lines that the Python interface promises, as they stand: in a plain interpreter, in IPython and in a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
BEFORE = """
import fedcenters as fc
import numpy as np, torch
from sklearn.datasets import load_digits
from torch import nn

pixels, labels = load_digits(return_X_y=True)
images = np.tile(pixels.reshape(-1, 1, 8, 8).astype("float32") / 16, (12, 1, 1, 1))

class Digits(torch.utils.data.Dataset):
    def __len__(self):
        return len(images)
    def __getitem__(self, i):
        return {"x": images[i], "y": int(labels[i % len(labels)]), "subject": i % 12}

class MyModule(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

train, x, example_input, strategy = Digits(), images[:24], images[:4], fc.IFCA(3)
"""
# `...` stands for the arguments of a run, which are filled in.
LINES = """
import fedcenters as fc

result = fc.simulate(fc.FeSEM(clusters=3), fleet=fc.fleets.digits(devices=12), rounds=10)
result.history
result.assignments
result.centers[0]
result.plot()
result.nearest(x, y=None)
result.export("centers/", formats=("onnx", "tflite"))

fleet = fc.fleet(train, by="subject", test=0.2)
fleet = fc.fleet(train, partition=fc.partitions.Dirichlet(0.1), devices=100)
result = fc.simulate(fc.WeCFL(clusters=10), model=MyModule(), fleet=fleet, rounds=100, workers=2, seed=0)
for r in fc.rounds(strategy, fleet=fleet, rounds=2): print(r.accuracy)

fc.compare([fc.FedAvg(), fc.FeSEM(3), fc.IFCA(3)], fleet=fleet, seeds=3).table()
program = fc.compile(MyModule(), example_input, loss="cross-entropy")
with fc.federation("embedded", model=MyModule()) as home: home.run(fc.FeSEM(3), rounds=5)

print("the end", len(result.history), sorted(p.name for p in __import__("pathlib").Path("centers").iterdir())[:1])
"""
SHELLS = {
    "python": [sys.executable, "-i", "-q"],
    "ipython": [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit"],
}
WHOLE_S = 1800  # nine runs of 100 devices are in it


@pytest.mark.slow
@pytest.mark.timeout(WHOLE_S)
@pytest.mark.parametrize("shell", SHELLS)
def test_the_lines_run_where_they_are_typed(shell: str, tmp_path: Path) -> None:
    """On stdin, where no module has the user's classes and no script has a guard for worker processes."""
    done = subprocess.run(
        SHELLS[shell],
        input=f"{BEFORE}\n{LINES}\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Error" not in done.stderr, done.stderr
    assert "the end 100" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(WHOLE_S)
def test_the_lines_run_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    written: Any = nbformat.v4  # nbformat has no types here
    cells = [written.new_code_cell(text) for text in (BEFORE, *LINES.strip().split("\n\n"))]
    notebook = written.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=WHOLE_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "the end 100" in notebook.cells[-1].outputs[-1]["text"]
