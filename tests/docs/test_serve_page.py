"""docs/serve-centers.md tells the truth: its commands and scripts run as they stand, and it lists every key."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emulator.cli import app as emulator
from export.bundle.quantize import SCHEMES
from export.cli import app as export
from export.serve.openapi import openapi_document

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serve-centers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = [text.removeprefix("$ ").strip() for kind, text in BLOCKS if kind == "console"]
SCRIPTS = {text.splitlines()[0].removeprefix("# "): text for kind, text in BLOCKS if kind == "python"}
APPS = {"fedcenters-emulator": emulator, "fedcenters-export": export}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every command of the page in its order, in one folder."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in COMMANDS:
            name, *arguments = shlex.split(command)
            result = CliRunner().invoke(APPS[name], arguments)
            assert result.exit_code == 0, f"{command}: {result.output}"
    return folder


def test_the_commands_leave_what_the_page_says(folder: Path) -> None:
    center = folder / "centers" / "centers" / "center-0"
    for name in ("model.onnx", "model.tflite", "model.safetensors", "card.md", "card.json"):
        assert (center / name).is_file()
    small = {p.name for p in (folder / "small" / "centers" / "center-0").glob("model.*.*")}
    assert small == {f"model.{scheme}.{fmt}" for scheme in SCHEMES for fmt in ("onnx", "tflite")}
    assert (folder / "models" / "center-0" / "1" / "model.onnx").is_file()
    index = json.loads((folder / "public" / "index.json").read_text())
    assert set(index) == {"v", "generation", "manifest"}
    assert (folder / "public" / index["manifest"].removeprefix("/")).is_file()


def test_every_key_of_the_manifest_has_its_row(folder: Path) -> None:
    manifest = json.loads((folder / "centers" / "manifest.json").read_text())
    table = PAGE[PAGE.index("### manifest.json") : PAGE.index("## 2.")]
    named = {
        key for row in re.findall(r"^\| (`[^|]*) \|", table, flags=re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    }
    assert named == set(manifest)
    assert all(f"`{key}`" in table for key in manifest["centers"][0])


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_runs_without_us(folder: Path, name: str) -> None:
    (folder / name).write_text(SCRIPTS[name], encoding="utf-8")
    done = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[\d", done.stdout)


def test_the_page_lists_every_request() -> None:
    for path in openapi_document()["paths"]:
        plain = path.replace("{center}/{file}", "0/onnx").replace("{generation}/{path}", "<generation>/<path>")
        assert f"{plain}`" in PAGE


@pytest.mark.parametrize("link", re.findall(r"\]\((\.\./[\w/.]+)\)", PAGE))
def test_each_linked_file_exists(link: str) -> None:
    assert (ROOT / "docs" / link).is_file()
