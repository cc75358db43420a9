"""Where a command will write: looked at before the work, and told as a UsageError when it cannot be written."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edge_client.errors import UsageError

PICTURES = (".pdf", ".png", ".svg")
DRAWINGS = (".eps", ".ps", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", *PICTURES)  # what matplotlib writes


def check_output_file(path: Path, *, endings: Sequence[str] = ()) -> None:
    """Refuse a file that cannot be written, or whose name has none of the `endings`. Raises UsageError."""
    if endings and path.suffix not in endings:
        raise UsageError(f"{path} ends with neither {' nor '.join(endings)}", hint=f"name it {path.stem}{endings[-1]}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="name a file in it")
    if not path.parent.exists():
        hint = f"make it with mkdir -p {shlex.quote(str(path.parent))}, or name another"
        raise UsageError(f"there is no folder {path.parent}", hint=hint)
    _check_rights(path if path.exists() else path.parent, path.parent)


def check_output_folder(path: Path) -> None:
    """Refuse a folder that cannot be made or written into. Raises UsageError."""
    there = next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())
    _check_rights(there, there)


def _check_rights(place: Path, folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", hint="name another place to write to")
    if not os.access(place, os.W_OK):
        raise UsageError(f"{place} may not be written", hint="change its rights, or name another place")


@contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Raise UsageError for what the operating system refuses while `place` is written."""
    try:
        yield
    except OSError as wrong:
        if wrong.errno is None:  # a library's own
            raise
        hint = "free disk space, or choose another folder"
        raise UsageError(f"cannot write to {place}: {wrong.strerror}", hint=hint) from wrong
