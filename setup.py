"""What pyproject.toml cannot say of the build: it begins without old files, and adds type information of `fedcenters`.

setuptools packs what lies in build/, also files of an older version of this checkout that were moved or deleted since.

A type checker reads an installed package that has the file py.typed; a module of one file has no place for it. PEP 561
lets a distribution ship a package of stubs instead, which is made here from the imports for type checkers.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def stubs(source: str) -> str:
    """The names that a module imports `if TYPE_CHECKING`, each as a re-export."""
    blocks = [node.body for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for node in blocks[0] if isinstance(node, ast.ImportFrom)]
    return "".join(f"from {n.module} import {a.name} as {a.name}\n" for n in imports for a in n.names)


class BuildWithStubs(build_py):
    """Removes what an earlier build left of these packages, and adds fedcenters-stubs to what a wheel contains."""

    def run(self) -> None:
        if not self.editable_mode:
            for room in {name.partition(".")[0] for name in self.packages}:
                shutil.rmtree(Path(self.build_lib) / room, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            place = Path(self.build_lib) / "fedcenters-stubs" / "__init__.pyi"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(stubs((ROOT / "fedcenters.py").read_text(encoding="utf-8")), encoding="utf-8")


setup(cmdclass={"build_py": BuildWithStubs})
