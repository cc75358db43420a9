"""A finished run, and the method that a run's configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.config import TOP_LEVEL_KEYS, CoordinatorConfig, top_level_hint
from coordinator.config_sections import RunConfig
from coordinator.strategies.base import Replies, State, Strategy
from coordinator.strategies.registry import Setting, UnknownSetting, make_method
from edge_client.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run: its method, its last state, and what devices answered when asked to measure every center."""

    run: RunConfig
    strategy: Strategy
    state: State
    measurements: Replies = field(default_factory=dict)


def make_strategy(run: RunConfig, config: CoordinatorConfig) -> Strategy:
    """The method of a run; its batch size is the program's unless the run sets another. Raises ConfigError."""
    batch = config.model.batch_size
    settings: Mapping[str, Setting] = {"batch-size": batch, **run.settings}
    if settings["batch-size"] != batch and "litert" in config.model.engines:
        raise ConfigError(
            f"run {run.name} has batch-size {settings['batch-size']}, but LiteRT's program is compiled for {batch}",
            hint="set the same number as batch-size under [model], or leave it out of the run",
        )
    try:
        return make_method(run.method, **settings)
    except UnknownSetting as wrong:
        if wrong.key not in TOP_LEVEL_KEYS:
            raise
        raise ConfigError(wrong.message, hint=top_level_hint(wrong.key)) from wrong
