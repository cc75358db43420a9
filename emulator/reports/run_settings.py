"""The settings of runs in flat keys, as reports show them: of one folder, and where those of several runs differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.strategies.registry import make_method, method_settings
from edge_client.errors import FedcentersError
from edge_client.toml_files import parse_toml
from emulator.config import CONFIG_FILE

PLACES = ("name", "out", "folder")  # they name the run and its folder, as the head of a table does
OF_THE_MODEL = {"name": "model", "batch-size": "batch-size"}  # keys of a coordinator's [model] -> a simulated run's


def read_settings(folder: Path, config: Mapping[str, Any], run: str) -> dict[str, Any]:
    """The settings of `run` in `folder`, whose config.toml is `config`; in a simulated run's keys where it has them.

    A simulated run's are as they are. A coordinator's are its own, those of [model] and of the [[runs]] table, and the
    method's defaults; where `simulate` asked for the run, what it asked for comes first.
    """
    rows = config.get("runs", ()) if "method" not in config else ()  # a method may have a setting of that name
    of_run = next((row for row in rows if row.get("name", row.get("method")) == run), None)
    if of_run is None:
        return dict(config)
    own = {key: value for key, value in config.items() if key not in ("runs", "model")}
    model = {OF_THE_MODEL.get(key, f"model.{key}"): value for key, value in config.get("model", {}).items()}
    asked = folder / CONFIG_FILE
    simulated = parse_toml(asked.read_text(encoding="utf-8")) if asked.is_file() else {}
    return {**own, **_defaults(of_run), **model, **of_run, **simulated}


def _defaults(of_run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run's method; none of a method that cannot be found here, or was another then."""
    given = {key: value for key, value in of_run.items() if key not in ("name", "method", "num-rounds")}
    try:
        return dict(method_settings(make_method(str(of_run["method"]), **given)))
    except FedcentersError:
        return {}


def differing_settings(runs: Collection[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each setting that two runs have with different values: its key, and what each run has, if anything.

    >>> differing_settings([{"method": "fesem", "seed": 0, "clusters": 3}, {"method": "fedavg", "seed": 0}])
    [['method', 'fesem', 'fedavg']]
    """
    keys = sorted({key for settings in runs for key in settings} - set(PLACES))
    return [
        [key, *(str(settings.get(key, "")) for settings in runs)]
        for key in keys
        if len({str(settings[key]) for settings in runs if key in settings}) > 1
    ]


def one_sided_settings(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """By name of the run: a sentence for the settings that only some of the runs have, and those alike.

    >>> one_sided_settings({"one": {"method": "fesem", "clusters": 3, "lam": 0.05}, "two": {"method": "fedavg"}})
    ['Only one has: clusters, lam.']
    """
    told = {row[0] for row in differing_settings(runs.values())} | set(PLACES)
    found: dict[tuple[str, ...], list[str]] = {}
    for key in sorted({key for settings in runs.values() for key in settings} - told):
        having = tuple(name for name, settings in runs.items() if key in settings)
        if len(having) < len(runs):
            found.setdefault(having, []).append(key)
    return [
        f"Only {_listed(names)} {'has' if len(names) == 1 else 'have'}: {', '.join(own)}."
        for names, own in found.items()
    ]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
