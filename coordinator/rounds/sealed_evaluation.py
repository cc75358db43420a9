"""An evaluation of which the server learns sums only: one confusion matrix of all devices, and their mean scores."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from coordinator.rounds.metrics import FleetAverage, RoundReport, accuracy, f1
from coordinator.rounds.sealed_round import COUNTS_KEY
from coordinator.strategies.base import Exchange, Fleet, Replies, SealedSums, State, SumByCenter
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.sum_plan import plan_of
from edge_client.protocol.summed_task import MAX_BITS, SummedProbe, SumScale
from edge_client.protocol.task import ClientId


def sealed_evaluation(
    strategy: LocalSgd, state: State, fleet: Fleet, cohort: Sequence[ClientId], *, batch: int
) -> Generator[Exchange, Replies, RoundReport]:
    """Ask the cohort for its parts of the sum; averages are None where too few devices answered.

    No figure of one device or of one center is in the report.
    """
    served = plan_of(strategy, fleet).served
    usual = int(np.argmax(state.extra[COUNTS_KEY])) if COUNTS_KEY in state.extra else 0
    scale = SumScale(bits=MAX_BITS, devices=max(1, len(cohort)), clip=1.0)
    tasks = {}
    for who in cohort:
        models = [model for _, model in strategy.predictor(state, who)]
        weights = [weight for weight, _ in strategy.predictor(state, who)]
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
    pooled, devices, f1_all = none, none, None
    if isinstance(replies, SealedSums) and 0 in replies.sums:
        words = scale.signed(replies.sums[0])
        classes = round((len(words) - 3) ** 0.5)
        matrix, scores, count = words[:-3].reshape(classes, classes), words[-3:-1] / scale.levels, int(words[-1])
        pooled = FleetAverage(micro=accuracy(matrix), macro=float(scores[0] / count))
        devices, f1_all = FleetAverage(micro=None, macro=float(scores[1] / count)), f1(matrix)
    return RoundReport(
        accuracy=pooled,
        f1_of_devices=devices,
        f1_pooled=f1_all,
        per_device={},
        per_center=nothing,
        assignment=dict(sorted(state.assignment.items())),
        loss=none,
        loss_per_device={},
        loss_per_center=nothing,
    )
