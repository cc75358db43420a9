"""An evaluation of which the server learns sums only: the samples that are right, and mean scores."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from coordinator.rounds.metrics import FleetAverage, RoundReport, make_center_report
from coordinator.strategies.base import Exchange, Fleet, Replies, SealedSums, State, SumByCenter
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.loss_starts import COUNTS_KEY
from coordinator.strategies.plans.sum_plan import plan_of
from edge_client.protocol.summed_task import MAX_BITS, SCORE_LEVELS, SummedProbe, SumScale
from edge_client.protocol.task import ClientId, OwnModel


def sealed_evaluation(
    strategy: LocalSgd, state: State, fleet: Fleet, cohort: Sequence[ClientId], *, batch: int, last: bool
) -> Generator[Exchange, Replies, RoundReport]:
    """Ask the cohort for its parts of the sum; averages are None where too few devices answered.

    No figure of one device or of one center is in the report. After the `last` round the report says, where devices are
    served other models than their centers, that the scores of the centers are not known: no sum has them.
    """
    served = plan_of(strategy, fleet).served
    usual = int(np.argmax(state.extra[COUNTS_KEY])) if COUNTS_KEY in state.extra else 0
    scale = SumScale(bits=MAX_BITS, devices=max(1, len(cohort)), clip=1.0)
    apart, tasks = served == "mixture" and len(state.centers) > 1, {}
    for who in cohort:
        models = [model for _, model in strategy.predictor(state, who)]
        weights = [weight for weight, _ in strategy.predictor(state, who)]
        apart |= served == "asked" and (len(models) > 1 or isinstance(models[0], OwnModel))
        if served != "asked":
            models, weights = list(state.centers), []
        tasks[who] = SummedProbe(
            models=models,
            prior=weights if len(weights) > 1 else None,
            want=frozenset({"confusion"}),
            split="test",
            batch=batch,
            seed=0,
            served=served,
            usual=usual,
            scale=scale,
        )
    replies = (yield SumByCenter(tasks, least=strategy.server.least_members)) if tasks else {}
    none, nothing = FleetAverage(micro=None, macro=None), (None,) * len(state.centers)
    pooled, devices = none, none
    if isinstance(replies, SealedSums) and 0 in replies.sums:
        right, samples, accuracies, f1s, count = (float(word) for word in replies.sums[0])
        pooled = FleetAverage(micro=right / samples, macro=accuracies / SCORE_LEVELS / count)
        devices = FleetAverage(micro=None, macro=f1s / SCORE_LEVELS / count)
    return RoundReport(
        accuracy=pooled,
        f1_of_devices=devices,
        f1_pooled=None,
        per_device={},
        per_center=nothing,
        assignment=dict(sorted(state.assignment.items())),
        loss=none,
        loss_per_device={},
        loss_per_center=nothing,
        centers=make_center_report({}, n_centers=len(state.centers)) if last and apart else None,
    )
