"""More devices are asked than a round wants, and the first replies count, so that a slow device delays no round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from coordinator.strategies.base import Exchange, RequireAll, Strategy
from coordinator.strategies.common.sampling import part_of
from coordinator.strategies.registry import method_settings
from edge_client.protocol.task import Probe


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


def needs_all(tasks: Exchange) -> bool:
    """Whether the exchange asks exactly the devices that it wants, and waits for all of them."""
    return is_test(tasks) or isinstance(tasks, RequireAll)


def is_test(tasks: Exchange) -> bool:
    """Whether the exchange only evaluates on held-out samples; such an exchange waits for all devices."""
    return any(isinstance(task, Probe) and task.split == "test" for task in tasks.values())
