"""The settings that a run folder was begun with: a later start has the same ones, or another number of rounds.

Rounds are a function of (state, replies, seed), so that none but the last one knows how many there are: it has a test
of its own, and the centers are published after it. The number may change as long as no device was asked something that
another number would not ask.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.config import CoordinatorConfig, changed_settings
from coordinator.storage.key_value_store import DONE_FACT, SETTINGS_FACT
from coordinator.storage.store import Store
from edge_client.errors import ConfigError

CATALOG_FACT = "catalog"  # the key of the catalog's hash in the store's facts

Settings = Mapping[str, Any]


def settings_text(config: CoordinatorConfig) -> str:
    """The settings that decide the results, as they are stored."""
    return json.dumps(config.fingerprint(), sort_keys=True)


def accept_settings(config: CoordinatorConfig, store: Store) -> None:
    """Take over other numbers of rounds; of a run that had ended, the centers are published again after its new ones.

    Raises ConfigError for a folder that holds a training with other settings.
    """
    stored, wanted = store.facts.get(SETTINGS_FACT), settings_text(config)
    if stored in (None, wanted):
        return
    before, now = _by_run(json.loads(stored)), _by_run(json.loads(wanted))
    if changed := changed_settings(_without_rounds(before), _without_rounds(now)):
        raise ConfigError(
            f"{config.folder} holds a training with other settings: {'; '.join(changed)}",
            hint="restore them, or choose another `folder` for a training with the new ones",
        )
    for name, old, new in _other_rounds(before, now):
        if reason := _why_fixed(config, store, name, old, new):
            raise ConfigError(
                f"num-rounds of run {name} was {old} and cannot become {new}: {reason}",
                hint=f"write num-rounds = {old}, or choose another `folder` for a new training",
            )
    store.facts.put(SETTINGS_FACT, wanted, forget=(CATALOG_FACT, DONE_FACT))


def _by_run(settings: Settings) -> Settings:
    """The runs by name, and their rounds by the key of the configuration."""
    runs = {}
    for run in settings["runs"]:
        rest = {key: value for key, value in run.items() if key not in ("name", "rounds")}
        runs[run["name"]] = {"num-rounds": run["rounds"], **rest}
    return {**settings, "runs": runs}


def _without_rounds(settings: Settings) -> Settings:
    runs = {name: {k: v for k, v in run.items() if k != "num-rounds"} for name, run in settings["runs"].items()}
    return {**settings, "runs": runs, "order of the runs": list(runs)}


def _other_rounds(before: Settings, now: Settings) -> Iterator[tuple[str, int, int]]:
    for name, run in before["runs"].items():
        old, new = run["num-rounds"], now["runs"][name]["num-rounds"]
        if old != new:
            yield name, old, new


def _why_fixed(config: CoordinatorConfig, store: Store, name: str, old: int, new: int) -> str:
    """Why the number of rounds of a run cannot change now; "" where it can."""
    if config.round.asynchronous is not None:
        return "a run without rounds keeps it"
    run = {known: run for run, known in store.states.run_names().items()}.get(name)
    if run is None:
        return ""
    found = store.states.last(run)
    ended, turn = -1 if found is None else found[0], min(old, new)  # `turn` becomes the last round, or is so no more
    if new < old and (ended >= turn or store.exchanges.has_round(run, turn)):
        return f"it has come to round {max(ended, turn)}"
    if ended < turn and store.exchanges.has_round(run, turn):
        return f"its last round, {turn}, is under way; let it end first"
    if new > old and store.exchanges.has_round(run, old + 1):
        return "its devices have measured the centers for newcomers (teach-newcomers)"
    return ""
