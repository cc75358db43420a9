"""Import a user's own Python object: by `package.module:name`, or by a name that an installed package registered.

An entry point of the group `fedcenters.<kind>` has a name and an import path. An exception of the imported code becomes
one error message that names this code. Nothing is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from edge_client.errors import UsageError
from edge_client.printable import first_of
from edge_client.users_code import note_module
from export.diagnostics import first_sentence

MANY_NAMES, MOST_NAMES = 60, 12  # of more valid names a hint shows the first ones only
OTHER_NAMES = {"lr": "learning-rate", "epochs": "local-steps", "k": "clusters"}  # of our settings, elsewhere
ROOMS = ("edge_client", "coordinator", "export", "emulator")


def add_working_folder() -> None:
    """Let Python find a user's modules in the working folder.

    Our packages are loaded before, so that no file there, such as export.py, is taken for one of them.
    """
    for room in ROOMS:
        import_module(room)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a Path would not do there


def import_path(path: str) -> Any:  # noqa: ANN401 - a reader's own
    """Import the object `package.module:name`. Raises UsageError, which says what is missing."""
    module_name, _, name = path.partition(":")
    if not module_name or not name or "/" in module_name or module_name.endswith(".py"):
        raise UsageError(f"{path!r} is no import path", hint="write package.module:Class, like mynet:Net for mynet.py")
    if module_name.partition(".")[0] not in sys.stdlib_module_names.union(ROOMS):
        note_module(module_name)
    return _attribute(_imported(module_name), name)


def find_by_name(kind: str, name: str, ours: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a reader's own
    """One of `ours`, an import path, or what a package registered as a kind of plug-in ("methods", "data-sets" ...).

    Raises UsageError for an unknown name, with the most similar known one.
    """
    if name in ours:
        return ours[name]
    return import_path(name if ":" in name else _registered(kind, name, ours))


def check_name(kind: str, name: str, ours: Collection[str]) -> None:
    """Raises UsageError for an unknown name, as `find_by_name`, and for an import path that leads nowhere.

    Nothing is imported, so what a found package holds is not known.
    """
    if name in ours:
        return
    if ":" not in name:
        _registered(kind, name, ours)
        return
    package = name.partition(":")[0].partition(".")[0]
    if package and package not in sys.modules and find_spec(package) is None:
        raise _no_module(package)


def _registered(kind: str, name: str, ours: Collection[str]) -> str:
    """The import path of what a package registered. Raises UsageError."""
    registered = {point.name: point.value for point in entry_points(group=f"fedcenters.{kind}")}
    if name in registered:
        return registered[name]
    what, valid = kind.removesuffix("s").replace("-", " "), {*ours, *registered}
    raise UsageError(f"unknown {what} {name!r}", hint=f"{nearest_name_hint(name, valid)}, or package.module:name")


def nearest_name_hint(wrong: str, valid: Iterable[str]) -> str:
    """A hint: the valid name that is most similar to the wrong one, and all valid names, or the first of very many."""
    names = sorted(valid)
    meant = OTHER_NAMES.get(wrong)
    close = [name for name in names if name.replace("_", "-") == meant] or get_close_matches(wrong, names, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    shown = first_of(names, MOST_NAMES if len(names) > MANY_NAMES else len(names))  # a table may have 600 columns
    return f"{guess}use one of {shown}" if names else "it has no settings"


def describe_error(wrong: BaseException) -> str:
    """An exception of the user's code in one line: its class and its message."""
    kind, text = type(wrong).__name__, first_sentence(wrong)
    return text if text == kind else f"{kind}: {text}"


def _imported(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name and (name == missing.name or name.startswith(f"{missing.name}.")):
            raise _no_module(missing.name) from missing
        raise UsageError(
            f"module {name!r} needs {missing.name or missing}, which is not installed", hint="install it and try again"
        ) from missing
    except (Exception, SystemExit) as wrong:
        theirs = getattr(wrong, "name", None)
        where = f"try python -c 'import {name}', which says where"
        raise UsageError(
            f"importing {name!r} failed: {describe_error(wrong)}", hint=_rename(theirs) if theirs in ROOMS else where
        ) from wrong


def _no_module(name: str) -> UsageError:
    hint = "run this in the folder that holds it, or put that folder into PYTHONPATH"
    return UsageError(f"there is no module {name!r}", hint=hint)


def _attribute(module: ModuleType, name: str) -> object:
    if not hasattr(module, name):
        near = get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        where = getattr(module, "__file__", None) or "no file: `python -c`, a notebook, or a folder without __init__.py"
        hint = f"did you mean {near[0]!r}?" if near else f"it was read from {where}"
        hint = _rename(module.__name__) if module.__name__ in ROOMS else hint
        raise UsageError(f"module {module.__name__!r} has no {name!r}", hint=hint)
    return getattr(module, name)


def _rename(room: str) -> str:
    return f"{room!r} is a package of fedcenters: give your own {room}.py another name"
