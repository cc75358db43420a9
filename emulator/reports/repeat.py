"""How a run is played or seen again: by commands, or in Python where its samples, module or method are one's own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.models.members import check_model_name
from coordinator.strategies.registry import METHODS, make_method
from edge_client.errors import ConfigError, UsageError
from emulator.config import CONFIG_FILE, FLEET_FILE, GROUPS_FILE
from emulator.data import registry
from emulator.data.fleet import is_named_fleet
from emulator.options import OPTIONS
from emulator.simulation.checkpoint import CHECKPOINT_FOLDER

OWN_MODEL = "model/model.json"  # in the folder of a run whose module was the user's (emulator/api/kept_model.py)
DEFAULT_MODEL = "Perceptron"  # of `fc.simulate`, for the user's own samples


def repeat_in_python(settings: Mapping[str, Any], folder: Path) -> tuple[str, str] | None:
    """-> what a command cannot find of the run in `folder`, in words, and the call that repeats it; None for no part.

    `settings` are those of the run's file, in its flat keys.

    >>> repeat_in_python({"method": "fesem", "clusters": 3, "data-set": "arrays", "num-rounds": 5}, Path("runs/mine"))
    ('samples', 'fc.simulate(fc.FeSEM(3), fleet=fleet, rounds=5, seed=0)')
    >>> repeat_in_python({"method": "fesem", "data-set": "digits"}, Path("runs/mine"))
    """
    method, data, model = (str(settings.get(key, "")) for key in ("method", "data-set", "model"))
    parts, arguments = list[str](), ["fleet=fleet"]
    if _is_of_python(data, str(settings.get("partition", "")), folder):
        parts.append("samples")
    if _is_own_model(model, folder):
        parts.append("model")
        arguments.append("model=model")
    if own_loss_of(folder):
        parts.append("loss")
        arguments.append("loss=loss")
    if method.startswith("__main__:"):
        parts.append("method")
    if not parts:
        return None
    rounds, seed = (settings.get(key, OPTIONS[key].default) for key in ("num-rounds", "seed"))
    if (folder / CONFIG_FILE).is_file() and (folder / GROUPS_FILE).is_file():
        run = f"home.run({_method(method, settings)}, rounds={rounds}, seed={seed})"
        call = f"with fc.federation({', '.join(reversed(arguments))}) as home: {run}"
    else:
        call = f"fc.simulate({', '.join((_method(method, settings), *arguments))}, rounds={rounds}, seed={seed})"
    return " and ".join(parts), call


def own_loss_of(folder: Path) -> str:
    """What a loss of the user's own is called, which a coordinator's folder does not know; empty for a usual one.

    Raises ConfigError for a damaged file.
    """
    from coordinator.storage.run_reader import read_program

    if (folder / FLEET_FILE).is_file():
        try:
            parts = json.loads((folder / FLEET_FILE).read_text(encoding="utf-8")).get("parts", {})
        except (OSError, ValueError) as wrong:
            raise ConfigError(f"{folder / FLEET_FILE} cannot be read: {wrong}", hint="save the run again") from wrong
        return str(parts.get("loss", [""])[0])
    with suppress(ConfigError):  # no coordinator wrote it
        return "own" if read_program(folder).own_loss else ""
    return ""


def show_coordinator(folder: Path, settings: Mapping[str, Any], *, done: bool) -> str:
    """The commands that show the run in a coordinator's folder again; before it is `done`, the one that goes on.

    >>> print(show_coordinator(Path("runs/home"), {"exit-when-done": True}, done=True))
    fedcenters-coordinator status runs/home
    FEDCENTERS_EXIT_WHEN_DONE=false fedcenters-coordinator serve runs/home/config.toml --dashboard 8080  # until Ctrl-C
    """
    show = shlex.join(("fedcenters-coordinator", "status", str(folder)))
    serve = shlex.join(("fedcenters-coordinator", "serve", str(folder / "config.toml")))
    if not done:
        return f"{show}\n{serve}"
    stay = "FEDCENTERS_EXIT_WHEN_DONE=false " if settings.get("exit-when-done") else ""  # else `serve` ends at once
    return f"{show}\n{stay}{serve} --dashboard 8080  # until Ctrl-C"


def _is_of_python(data: str, partition: str, folder: Path) -> bool:
    """Whether the samples, or how devices share them, were given in Python: no name finds them, and a run is here."""
    if not data or ":" in data or is_named_fleet(data, partition):
        return False
    return registry.is_given_in_python(data) or any((folder / name).is_file() for name in (FLEET_FILE, GROUPS_FILE))


def _is_own_model(model: str, folder: Path) -> bool:
    if (folder / OWN_MODEL).is_file():
        return model != DEFAULT_MODEL
    if model in {"", DEFAULT_MODEL} or not any((folder / name).exists() for name in (GROUPS_FILE, CHECKPOINT_FOLDER)):
        return False
    try:
        check_model_name(model)
    except UsageError:
        return True
    return False


def _method(path: str, settings: Mapping[str, Any]) -> str:
    """The method as a value of Python: of ours with the settings that differ from its defaults."""
    own = {key: value for key, value in settings.items() if key not in OPTIONS}
    if path in METHODS:
        return f"fc.{make_method(path, **own)!r}"
    given = ", ".join(f"{key.replace('-', '_')}={value!r}" for key, value in own.items())
    return f"{path.rpartition(':')[2]}({given})"
