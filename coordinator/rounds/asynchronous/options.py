"""The options of a run that waits for no device, and which methods can be played so."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.strategies.base import Fleet, Strategy
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.setting_checks import check_range
from coordinator.strategies.plans.asynchronous_plan import whole_rounds
from coordinator.strategies.plans.sum_plan import own_parts
from edge_client.errors import ConfigError, FedcentersError


@dataclass(frozen=True, kw_only=True)
class Asynchronous:
    """How many devices train at once, how many updates fill the buffers, and how old a center may become meanwhile."""

    concurrency: int
    buffer: int = 10
    max_staleness: int = 20

    def __post_init__(self) -> None:
        check_range("concurrency", self.concurrency, low=1)
        check_range("buffer", self.buffer, low=1)
        check_range("max-staleness", self.max_staleness, low=0)


def options_of(
    concurrency: int | None,
    buffer: int | None,
    max_staleness: int | None,
    *,
    wrong: type[FedcentersError] = ConfigError,
) -> Asynchronous | None:
    """The options as a user gives them, without a concurrency None: a run with rounds, where any other raises `wrong`.

    Raises ConfigError for a value out of its limits.
    """
    options = {"buffer": buffer, "max_staleness": max_staleness}
    given = {name: value for name, value in options.items() if value is not None}
    if concurrency is not None:
        return Asynchronous(concurrency=concurrency, **given)
    for name in given:
        hint = "say with concurrency how many devices train at once, or leave it out"
        raise wrong(f"{name.replace('_', '-')} without concurrency: a run with rounds has no buffers", hint=hint)
    return None


def buffer_of_all(buffer: int, devices: int) -> str:
    """A warning where a buffer has room for the whole fleet, so that a run waits for every device; else an empty text.

    A center's own buffer is its devices' share of it.
    """
    if not 1 < devices <= buffer:
        return ""
    return (
        f"buffer is {buffer}, with {devices} devices: each version of a center takes an update of each of its devices, "
        f"and the run waits for the slowest, as with rounds. Give a smaller one, as buffer = {devices // 2}; of "
        "several centers one with two devices waits for both with any buffer"
    )


def check_asynchronous(strategy: Strategy, fleet: Fleet) -> LocalSgd:
    """The method, which can work without rounds. Raises ConfigError with the reason for any other."""
    name = type(strategy).__name__
    if not isinstance(strategy, LocalSgd):
        raise whole_rounds(name, "it is no method of local SGD")
    server = strategy.server
    if own := own_parts(strategy, "asynchronous_plan"):
        raise whole_rounds(name, f"its `{own[0]}` works on whole rounds")
    strategy.asynchronous_plan(fleet)
    if server.secure != "off":
        why = "a masked sum is one of devices that are asked together"
        raise whole_rounds(f"secure {server.secure}", why, "set secure = off, or leave out concurrency")
    if server.privacy_noise:
        why = "noise is accounted for by rounds, and a fast device is in more versions than a slow one"
        raise whole_rounds("privacy-noise", why, "set privacy-noise = 0, or leave out concurrency")
    if server.reduce != "mean":
        why = "a robust rule counts on an honest majority of a round, and a buffer has the fastest devices"
        hint = "set reduce = mean, for which max-update-ratio still refuses outliers; or leave out concurrency"
        raise whole_rounds(f"reduce {server.reduce}", why, hint)
    if strategy.label_prior != "model":
        hint = "set label-prior = model, or leave out concurrency"
        raise whole_rounds(f"label-prior {strategy.label_prior}", "label counts are asked of a whole round", hint)
    if strategy.fraction_train < 1:
        why = "no cohort is drawn: concurrency says how many devices train at once"
        raise whole_rounds(f"fraction-train {strategy.fraction_train:g}", why, "leave one of them out")
    return strategy
