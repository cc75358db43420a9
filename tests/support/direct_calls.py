"""The training of a virtual federation by direct calls, without a broker: both must end with the same models."""

from __future__ import annotations

import numpy as np

from coordinator.artifacts.finished_run import make_strategy
from coordinator.config_sections import RunConfig
from coordinator.rounds.metrics import RoundReport
from coordinator.rounds.round import round_rng, run_round
from coordinator.strategies.base import Exchange, Replies, State, drive
from coordinator.strategies.registry import batch_size
from edge_client.protocol.task import ClientId
from edge_client.training.learner import EngineLearner
from emulator.simulation.emulated_devices import EmulatedDevices, round_through_f32_delta
from tests.support.softmax_program import SoftmaxEngine, grouped_fleet, start_of
from tests.support.virtual_federation import Federation, program


def train_directly(
    fed: Federation, run: RunConfig | None = None, *, silent: frozenset[ClientId] = frozenset(), since: int = 1
) -> tuple[State, list[RoundReport]]:
    """The last state, and what the test after each round found.

    The devices of `silent` do not answer from round `since` on.
    """
    run = run or fed.config.runs[0]
    learner = EngineLearner(SoftmaxEngine(), program(buffered=fed.buffered, members=fed.members))
    local = grouped_fleet(fed.config.fleet.min_devices, 2)
    devices = EmulatedDevices(learner=learner, local=local, wire=round_through_f32_delta)
    strategy, schema, seed = make_strategy(run, fed.config), devices.program.schema, fed.config.seed
    start = start_of(buffered=fed.buffered, members=fed.members).astype(np.float32)
    state = strategy.begin(start, schema, devices.fleet, round_rng(seed, 0))
    found: list[RoundReport] = []
    for number in range(1, run.rounds + 1):
        gone = silent if number >= since else frozenset[ClientId]()

        def ask(exchange: Exchange, gone: frozenset[ClientId] = gone) -> Replies:
            return {cid: devices.answer(cid, task) for cid, task in exchange.items() if cid not in gone}

        devices.posterior.clear()
        rng, batch = round_rng(seed, number), batch_size(strategy)
        state, report = drive(run_round(strategy, state, schema, devices.fleet, rng, batch=batch), ask)
        found.append(report)
    return state, found
