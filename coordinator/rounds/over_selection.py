"""More devices are asked than a round wants, and the first replies count, so that a slow device delays no round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from coordinator.strategies.base import Exchange, RequireAll, Strategy
from coordinator.strategies.common.sampling import part_of
from coordinator.strategies.registry import method_settings
from edge_client.protocol.task import ClientId, Fit, Probe


def with_over_selection(strategy: Strategy, share: float, fleet: int) -> tuple[Strategy, int | None]:
    """-> the method with a cohort `share` times as large, and how many replies are wanted.

    Without over-selection (`share` = 1) the second value is None: the replies of the whole cohort. So it is for a
    user's method without a `fraction_train`, which asks the devices that it chooses itself.
    """
    settings = method_settings(strategy)
    if share == 1 or "fraction-train" not in settings:
        return strategy, None
    fraction = float(settings["fraction-train"])
    more = cast("Strategy", replace(cast("Any", strategy), fraction_train=min(1.0, share * fraction)))
    return more, part_of(fraction, fleet)


def goal_of(tasks: Exchange, wanted: int | None) -> int | None:
    """How many replies close an exchange of a round that wants so many; None: those of all devices.

    Where `beside_fits` has devices, so many fits: as large a part of the fits as of the cohort.
    """
    if wanted is None or needs_all(tasks):
        return None
    told = len(beside_fits(tasks))
    return -(-wanted * (len(tasks) - told) // len(tasks)) if told else wanted


def beside_fits(tasks: Mapping[ClientId, object]) -> frozenset[ClientId]:
    """The devices that only tell losses while others train. Their replies are quick, and do not close the exchange."""
    if not any(isinstance(task, Fit) for task in tasks.values()):
        return frozenset()
    return frozenset(who for who, task in tasks.items() if isinstance(task, Probe))


def needs_all(tasks: Exchange) -> bool:
    """Whether the exchange asks exactly the devices that it wants, and waits for all of them."""
    return is_test(tasks) or isinstance(tasks, RequireAll)


def is_test(tasks: Mapping[ClientId, object]) -> bool:
    """Whether the exchange only evaluates on held-out samples; such an exchange waits for all devices."""
    return any(isinstance(task, Probe) and task.split == "test" for task in tasks.values())


def has_updates(tasks: Exchange) -> bool:
    """Whether an update of the exchange may come late; the late ones of an exchange without any go on being taken."""
    return any(isinstance(task, Fit) and task.upload for task in tasks.values())
