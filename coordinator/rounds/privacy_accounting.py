"""The privacy loss of a run so far: how many releases used each device's updates, kept in the method's state.

An update enters at most one release, so the count of updates is an upper bound. State and counts are stored together,
so that a restart loses none. Cohorts are drawn from the run's seed, which is not secret, so that there is no
amplification by sampling: every exchange that a device answered counts in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard, cast

import numpy as np

from coordinator.aggregation.privacy import epsilon_spent
from coordinator.aggregation.skellam_accounting import SPENT_KEY, epsilon_of
from coordinator.rounds.round_record import PrivacyRecord
from coordinator.strategies.base import Replies, Round, State, Strategy, late_replies, relay, vector_samples
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.server_options import check_applied
from coordinator.strategies.common.updates import pack_by_client, unpack_by_client
from edge_client.errors import ConfigError
from edge_client.protocol.task import Schema

RELEASES_KEY = "private-releases"
EPSILON_STEPS = 10_000  # of 1: a record has four decimals


def is_private(strategy: Strategy) -> TypeGuard[LocalSgd]:
    """Whether noise hides what a single device contributes."""
    return isinstance(strategy, LocalSgd) and strategy.server.privacy_noise > 0


def check_private(strategy: Strategy) -> None:
    """Raise ConfigError for what can be told before there is a model.

    That are options that a user's method may ignore, and an accountant that is not installed.
    """
    if isinstance(strategy, LocalSgd):
        check_applied(strategy, strategy.server)
    if is_private(strategy):
        epsilon_spent(strategy.server.privacy_noise, 1, strategy.server.privacy_delta)


def with_noise_key(strategy: Strategy, schema: Schema, secret: Callable[[], bytes]) -> Strategy:
    """A private method with the noise key that `secret` returns; any other method as it is.

    Raises ConfigError for a model that the noise cannot protect, and what `check_private` raises.
    """
    check_private(strategy)
    if not is_private(strategy):
        return strategy
    if schema.size > schema.n_params:
        raise ConfigError(
            "running statistics (batch norm) have no bound that noise could follow",
            hint="use a model with group norm, or set privacy-noise = 0",
        )
    server = strategy.server
    if server.secure == "off":  # else devices draw the noise
        server = replace(server, secret=secret())
    return cast("Strategy", replace(strategy, server=server))


def count_releases(strategy: Strategy, before: State, exchanges: Round) -> Round:
    """Run the round; the new state of a private method counts how often each device's updates were used."""
    if not is_private(strategy) or strategy.server.secure != "off":
        return (yield from exchanges)
    times = Counter({c: int(n) for c, n in unpack_by_client(before.extra, RELEASES_KEY).items()})

    def count(replies: Replies) -> None:
        for some in (replies, late_replies(replies)):
            times.update(vector_samples(some, "update").keys() | vector_samples(some, "grad").keys())

    after = yield from relay(exchanges, see=count)
    counts = pack_by_client(RELEASES_KEY, {c: np.array(n) for c, n in times.items()})
    return replace(after, extra={**after.extra, **counts})


def privacy_spent(strategy: Strategy, state: State) -> PrivacyRecord | None:
    """The field `privacy` of a round's record; None for a method that is not private.

    `given_assignments`: the guarantee covers the centers given the assignment only, because the method groups devices
    by comparing their updates with each other.
    """
    if not is_private(strategy):
        return None
    server = strategy.server
    if server.secure != "off":
        spent = state.extra.get(SPENT_KEY, np.zeros((2, 1)))
        epsilon, releases = epsilon_of(spent[0], server.privacy_delta), int(spent[1, 0])
    else:
        releases = max((int(n) for n in unpack_by_client(state.extra, RELEASES_KEY).values()), default=0)
        epsilon = epsilon_spent(server.privacy_noise, releases, server.privacy_delta)
    return {
        "epsilon": float(np.ceil(epsilon * EPSILON_STEPS) / EPSILON_STEPS),  # a bound is rounded up
        "delta": server.privacy_delta,
        "releases": releases,
        "noise": server.privacy_noise,
        "clip": server.privacy_clip,
        "given_assignments": len(state.centers) > 1 if server.secure != "off" else strategy.clusters_together,
    }
