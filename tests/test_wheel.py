"""The wheel: what `pip install fedcenters` puts on a machine."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import fedcenters as fc

ROOT = Path(__file__).parents[1]
ROOMS = ("edge_client", "coordinator", "export", "emulator")
NOT_SHIPPED = {"edge_client/web/package.json"}  # tells node in the tests that the page's files are modules


def test_the_wheel_holds_the_rooms_and_nothing_else(tmp_path: Path) -> None:
    """Also where a wheel of an older checkout was built: setuptools leaves a folder build/, and packs what is there."""
    source, built = tmp_path / "source", tmp_path / "built"
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("fedcenters.py", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    left = source / "build" / "lib" / "coordinator" / "now_elsewhere" / "__init__.py"
    left.parent.mkdir(parents=True)
    left.touch()
    wanted = {str(f.relative_to(source)) for room in ROOMS for f in (source / room).rglob("*") if f.is_file()}
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(built)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob(f"fedcenters-{fc.__version__}-py3-none-any.whl")  # boards compare the one, pip the other
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        typed = ast.parse(archive.read("fedcenters-stubs/__init__.pyi"))
    assert held == (wanted - NOT_SHIPPED) | {"fedcenters.py", "fedcenters-stubs/__init__.pyi"}
    imported = {a.asname: a.name for node in typed.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert imported == {name: name for name in fc.__all__}  # a type checker takes `X as X` alone for a name of the stub
