"""A fifth of the fleet lies: TKM's honest devices are served as if nobody did, the mean's are not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from coordinator.rounds.metrics import RoundReport
from coordinator.rounds.round import round_rng, run_round
from coordinator.strategies.base import Exchange, Replies, Strategy, drive
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.robust_tkm import TKM
from edge_client.data.dataset import DeviceData
from edge_client.protocol.task import Fit
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

TWO, ONE = grouped_fleet(10, 2), grouped_fleet(10, 1)  # groups
HOSTILE = ("d04", "d07")
STEPS = {"local_steps": 10, "batch_size": 8}


def attacked(method: Strategy, attack: str, local: Mapping[str, DeviceData]) -> tuple[RoundReport, dict[str, int]]:
    """The fourth round's report and assignment when the hostile devices answer something else than they learned."""
    devices = devices_of(local)
    schema, fleet, lies = devices.program.schema, devices.fleet, np.random.default_rng(5)
    state = method.begin(start_of(), schema, fleet, round_rng(0, 0))

    def ask(exchange: Exchange) -> Replies:
        replies = {c: devices.answer(c, task) for c, task in exchange.items()}
        for c in HOSTILE:
            task, honest = exchange[c], replies[c].update
            if isinstance(task, Fit) and honest is not None:
                way = honest - np.asarray(task.start)
                lie = {
                    "far": 1e3 * np.cos(np.arange(way.size)),
                    "noise": 50 * lies.standard_normal(way.size),
                    "back": -20 * way,
                }
                replies[c] = type(replies[c])(n=10_000, update=np.asarray(task.start) + lie[attack])
        return replies

    for number in range(1, 5):
        state, report = drive(run_round(method, state, schema, fleet, round_rng(0, number), batch=64), ask)
    return report, dict(state.assignment)


def honest(report: RoundReport) -> float:
    return float(np.mean([a for c, a in report.per_device.items() if c not in HOSTILE]))


@pytest.mark.parametrize("attack", ["far", "noise", "back"])
@pytest.mark.parametrize("reduce", ["trimmed-mean", "median"])
def test_a_fifth_of_liars_costs_the_others_nothing_where_means_fail(attack: str, reduce: str) -> None:
    method = TKM(clusters=2, trim_clusters=0.2, server=ServerOptions(reduce=reduce), **STEPS)  # type: ignore[arg-type]
    robust, assignment = attacked(method, attack, TWO)
    plain, _ = attacked(FeSEM(clusters=2, lam=0.0, e_step="k-means", **STEPS), attack, TWO)  # type: ignore[arg-type]
    groups = {c: i % 2 for i, c in enumerate(sorted(TWO)) if c not in HOSTILE}
    assert len({(g, assignment[c]) for c, g in groups.items()}) == 2
    assert honest(robust) > 0.95
    assert honest(plain) < 0.8


@pytest.mark.parametrize("attack", ["far", "noise", "back"])
def test_the_robust_mean_holds_without_trimming_the_clusters(attack: str) -> None:
    robust, _ = attacked(TKM(clusters=1, trim_clusters=0.0, **STEPS), attack, ONE)  # type: ignore[arg-type]
    plain, _ = attacked(FeSEM(clusters=1, lam=0.0, **STEPS), attack, ONE)  # type: ignore[arg-type]
    assert honest(robust) > 0.95
    assert honest(plain) < 0.8
