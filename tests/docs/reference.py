"""`make reference`: the pages of all modules from their docstrings, as HTML that needs no server; pdoc writes them.

python -m tests.docs.reference FOLDER [MODULE ...]     without modules: the four rooms
"""

from __future__ import annotations

import sys
from pathlib import Path

import pdoc
import pdoc.render

ROOMS = ("edge_client", "coordinator", "export", "emulator")


def write(folder: Path, modules: tuple[str, ...] = ROOMS) -> None:
    """One page for each of the modules and of those below them, and index.html. Imports them all."""
    pdoc.render.configure(docformat="google", footer_text="fedcenters", show_source=False)
    pdoc.pdoc(*modules, output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), tuple(sys.argv[2:]) or ROOMS)
