"""A run is rounds of one method over one fleet; a round is the method's exchanges, then one of evaluation.

Generators only: whoever drives them (server, simulation, replay) asks the devices. No network, no clock, no disk.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from coordinator.metrics import Report, report
from coordinator.strategies.base import Exchange, Fleet, Replies, State, Strategy
from edge_client.protocol.task import ClientId, Probe, Schema

BEGIN = 0  # the "round" of Strategy.begin; rounds count from 1


def round_rng(seed: int, round: int) -> np.random.Generator:  # noqa: A002 - the protocol's word
    """The generator of one round: the same for a replay, independent of every other round's."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, round])))


def one_round(
    strategy: Strategy, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator, *, batch: int
) -> Generator[Exchange, Replies, tuple[State, Report]]:
    """The strategy's exchanges, then every device tests what it would be served; `batch` is for that evaluation."""
    after = yield from strategy.round(state, schema, fleet, rng)
    replies = yield {c: served(strategy, after, c, batch=batch) for c in sorted(fleet)}
    matrices = {c: r.confusion[0] for c, r in sorted(replies.items()) if r.confusion is not None}
    return after, report(matrices, after.assignment, n_centers=len(after.centers))


def served(strategy: Strategy, state: State, who: ClientId, *, batch: int) -> Probe:
    """The confusion matrix of a device's own predictor on its held-out samples."""
    mixture = strategy.predictor(state, who)
    return Probe(
        models=[model for _, model in mixture],
        prior=[weight for weight, _ in mixture] if len(mixture) > 1 else None,
        want=frozenset({"confusion"}),
        split="test",
        batch=batch,
        seed=0,
    )
