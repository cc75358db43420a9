"""The lines that the Python interface promises, as they stand, in a plain interpreter that reads its stdin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEFORE = """
import numpy as np, pandas as pd
from torch import nn

rng = np.random.default_rng(0)
train = pd.DataFrame(rng.normal(size=(240, 4)).astype("float32"), columns=list("abcd"))
train["y"], train["subject"] = (train["a"] > 0).astype(int), np.arange(240) % 12
x, y = rng.random((8, 1, 8, 8), dtype=np.float32), np.arange(8)

class MyModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x)

"""
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
result = fc.simulate(fc.WeCFL(clusters=10), model=MyModule(), fleet=fleet, rounds=100, workers=2, seed=0)
fleet = fc.fleet(train, x=["a", "b", "c", "d"], y="y", partition=fc.partitions.Dirichlet(0.1, least=2), devices=8)
strategy = fc.IFCA(3)
for r in fc.rounds(strategy, fleet=fleet, model=MyModule(), rounds=2): print(r.accuracy)

fc.compare([fc.FedAvg(), fc.FeSEM(3), fc.IFCA(3)], fleet=fleet, model=MyModule, rounds=2, seeds=3).table()
program = fc.compile(MyModule(), fleet["device-00"].train.x, loss="cross-entropy")
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_lines_run_in_a_plain_interpreter(tmp_path: Path) -> None:
    """Typed into `python -i`, where no module has the user's classes and no script has a guard for worker processes."""
    typed = f"{BEFORE}\n{LINES}\nprint('the end', len(result.history), sorted(p.name for p in centers.iterdir())[:1])\n"
    typed = typed.replace("print('the end'", "from pathlib import Path; centers = Path('centers'); print('the end'")
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=typed,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "Error" not in done.stderr, done.stderr
    assert "the end 100" in done.stdout
