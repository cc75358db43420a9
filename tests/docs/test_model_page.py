"""docs/train-your-own-model.md tells the truth: its files and commands run as they stand, its tables fit the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import config as coordinator_config
from coordinator.models.registry import build_model
from coordinator.strategies.registry import make_method
from export.compiler.decompositions.supported_ops import SUPPORTED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "train-your-own-model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
PROGRAMS = {"fedcenters-export": ["-m", "export.cli"], "python": []}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which someone followed the page from top to bottom; each command's stdout is in <number>.txt."""
    folder = tmp_path_factory.mktemp("reader")
    for kind, text in BLOCKS:
        if kind in ("python", "toml"):
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
    for i, command in enumerate(commands()):
        (folder / f"{i}.txt").write_text(run(command, folder))
    return folder


def commands() -> list[str]:
    lines = [line for kind, text in BLOCKS if kind == "console" for line in text.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def run(command: str, folder: Path) -> str:
    program, *args = shlex.split(command)
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program], *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def printed(reader: Path, words: str) -> str:
    return (reader / f"{next(i for i, c in enumerate(commands()) if words in c)}.txt").read_text()


def test_compiling_prints_the_table_of_the_page(reader: Path) -> None:
    shown = next(text for kind, text in BLOCKS if kind == "text" and text.startswith("file"))
    names = [line.split()[0] for line in shown.splitlines()]
    assert [line.split()[0] for line in printed(reader, "--out").splitlines()] == names


def test_the_check_compares_all_three_functions(reader: Path) -> None:
    assert [line.split()[0] for line in printed(reader, "--check").splitlines()] == ["ok"] * 3


def test_training_with_plain_onnxruntime_learns_and_needs_nothing_of_ours(reader: Path) -> None:
    losses = [float(line.split()[1]) for line in printed(reader, "train.py").splitlines()]
    assert len(losses) == 20
    assert losses[-1] < 0.2 * losses[0]
    imports = re.findall(r"^(?:import|from) (\w+)", (reader / "train.py").read_text(), flags=re.MULTILINE)
    assert set(imports) == {"json", "numpy", "onnxruntime"}


def test_the_coordinators_configuration_and_factory_are_accepted(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(reader)
    settings = coordinator_config.read_config(reader / "coordinator.toml")
    for run in settings.runs:
        make_method(run.method, **run.settings)
    name = next(line.split('"')[1] for line in (reader / "coordinator.toml").read_text().splitlines() if ":fac" in line)
    built = build_model(name, seed=0)
    program = json.loads((reader / "program" / "program.json").read_text())
    assert (list(built.input), [built.classes]) == (program["input"], program["target"])
    assert {n for n, *_ in program["schema"]} <= set(built.module.state_dict())


def test_the_decomposition_of_the_page_is_torchs_own(reader: Path) -> None:
    assert float(printed(reader, "hardshrink.py").split()[1]) == 0.0


def test_each_operator_that_the_page_lists_is_supported() -> None:
    section = PAGE.split("may hold these operators")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ") and "`" in line]
    listed = {f"aten.{name}" for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(listed) > 50
    assert listed <= SUPPORTED


@pytest.mark.parametrize("link", re.findall(r"\]\((\.\./[\w/.]+)\)", PAGE))
def test_each_linked_file_exists(link: str) -> None:
    assert (ROOT / "docs" / link).is_file()
