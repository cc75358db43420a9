"""Which line of a user's own code an exception came from: of a method, a model or a loader of theirs.

It is the user's where a module that a command imported for them (`note_module`) took part. Then the line is one of
that module, or of another file that is neither ours nor where Python keeps libraries.
"""

# ruff: noqa: PTH118, PTH120, PTH206 - rounds and methods import this, and pathlib is none of theirs

from __future__ import annotations

import os.path
import traceback
from dataclasses import dataclass
from types import FrameType

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_OURS = ("edge_client", "coordinator", "export", "emulator", "fedcenters.py")
_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}
_theirs: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class UsersLine:
    """A line of the user's own file; `raised_in` is the line of ours that it called and that raised, or empty."""

    place: str
    raised_in: str = ""


def note_module(name: str) -> None:
    """Say that a module is the user's."""
    _theirs.add(name)


def users_line(wrong: BaseException) -> UsersLine | None:
    """The innermost line of the user's own in the traceback; None where there is none."""
    frames = list(traceback.walk_tb(wrong.__traceback__))
    kinds = [_kind(frame) for frame, _ in frames]
    if "noted" not in kinds:
        return None
    at = max(i for i, kind in enumerate(kinds) if kind in {"noted", "elsewhere"})
    below = [i for i, kind in enumerate(kinds) if kind == "ours" and i > at]
    return UsersLine(place=place_of(*frames[at]), raised_in=place_of(*frames[below[-1]]) if below else "")


def _kind(frame: FrameType) -> str:
    name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    if file.startswith("<"):  # made code, as of dataclasses and torch
        return "made"
    path = os.path.realpath(file)
    if any(_is_in(path, os.path.join(_ROOT, ours)) for ours in _OURS):
        return "ours"
    if name in _theirs:
        return "noted"
    library = any(_is_in(path, folder) for folder in _library_folders()) or _LIBRARY_FOLDERS & set(path.split(os.sep))
    return "library" if library else "elsewhere"


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _library_folders() -> list[str]:
    import sysconfig  # only where something went wrong

    return [os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib", "purelib", "platlib")]


def place_of(frame: FrameType, line: int) -> str:
    """A line as `file.py, line 12, in round`, from the working folder on where the file is in it."""
    path = os.path.realpath(frame.f_code.co_filename)
    base = next((base for base in (os.path.realpath("."), _ROOT) if _is_in(path, base)), "")
    path = path[len(base) :].lstrip(os.sep) if base else path
    where = "" if frame.f_code.co_name == "<module>" else f", in {frame.f_code.co_name}"
    return f"{path}, line {line}{where}"
