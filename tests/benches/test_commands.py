"""Commands of BENCHMARKS.md that no other test starts, with small sizes: each runs to its end and prints figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benches.peer import environment

KEPT = "{kept}"  # a file of figures; the default is the repository's own
COMMANDS = (
    "benches.bundle --devices 5 --sizes 29k",
    "benches.cluster --only processes",
    "benches.clustering_many --d 16 --repeats 1",
    "benches.compiling --model linear-regression --first --engines onnx",
    "benches.fleet many --devices 20",
    "benches.golden_run --models digits-mlp --engines onnx",
    f"benches.million devices --devices 1000 2000 --methods fedavg --json {KEPT}",
    "benches.programs --models linear-regression --repeats 1 --engines onnx litert --memory",
    "benches.replies --devices 20 --disk-ms 0 --repeats 1",
    "benches.secure_mqtt 6",
    "benches.secure_sums --devices 20 --parameters 1000",
    "figures.architectures --count 4 --jobs 1",
)


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs_to_its_end_and_prints_figures(command: str, tmp_path: Path) -> None:
    module, *options = command.replace(KEPT, str(tmp_path / "kept.json")).split()
    told = subprocess.run(
        [sys.executable, "-m", f"tests.{module}", *options],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    assert re.search(r"\d", told.stdout)
    assert "exit code" not in told.stdout  # of a cell, in place of its figures
