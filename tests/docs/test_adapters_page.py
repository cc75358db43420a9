"""docs/one-base-many-adapters.md: its scripts run as they stand where peft is installed (`make models`)."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcenters as fc
from coordinator.config import read_config
from coordinator.strategies.registry import make_method
from tests.support.doc_pages import DOCS, PageReader, blocks
from tests.zoo.rows import without_torchvisions_own_operators

PAGE = "one-base-many-adapters.md"
PARTS = ("Gloucester", "Menenius", "Romeo", *(f"Citizen {i}" for i in range(11)))  # of which the last trains the base


def scripts(folder: Path) -> None:
    """The page's files, with fewer steps and rounds."""
    short = {"STEPS = 48, 1000": "STEPS = 48, 5", "rounds=3, seeds=2": "rounds=1, seeds=1"}
    reader = PageReader(folder=folder, here=short)
    for block in (b for b in blocks(DOCS / PAGE) if b.kind in ("python", "toml")):
        reader.write(block.text)


def play(folder: Path) -> None:
    """Speeches of all parts, drawn from letters; longer ones first."""
    rng = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyz ,.IMLUSKEPARTHO")
    speeches = [
        f"{who.upper()}:\n{''.join(rng.choice(letters, 2_000 - 50 * i))}My lord, I know" for i, who in enumerate(PARTS)
    ]
    (folder / "shakespeare.txt").write_text("\n\n".join(speeches), encoding="ascii")


def test_the_coordinators_file_is_accepted(tmp_path: Path) -> None:
    scripts(tmp_path)
    for run in read_config(tmp_path / "coordinator.toml").runs:
        assert make_method(run.method, **run.settings).representation == "*lora_B*"  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")  # of libraries that other projects keep
def test_the_pages_scripts_end_with_adapters_that_peft_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_torchvisions_own_operators()
    pytest.importorskip("peft", reason="peft is not installed: make models installs it")
    scripts(tmp_path)
    play(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path("prepare.py")
    assert len(list((tmp_path / "devices").iterdir())) == 12
    runpy.run_path("simulate.py")
    assert "three adapters" in capsys.readouterr().out
    names = runpy.run_path("adapted.py")
    settings: dict[str, Any] = {"representation": "*lora_B*", "local_steps": 2, "learning_rate": 0.05}
    result = fc.simulate(fc.WeCFL(2, **settings), fleet=fc.fleet("devices"), model=names["make"], rounds=2)
    result.export("centers", formats=("onnx",), stacked=True)
    runpy.run_path("use.py")
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2
    assert all(float(line.split()[-1]) < 1e-4 for line in told)
