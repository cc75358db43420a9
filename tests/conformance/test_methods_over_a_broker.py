"""Every method over a broker ends where direct calls end: the server, real clients, messages and blocks, one fleet.

The runs follow one another, so nothing that a device keeps for one of them may reach the next.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from coordinator.artifacts.finished_run import make_strategy
from coordinator.config_sections import RunConfig
from coordinator.rounds.round import round_rng, run_round
from coordinator.storage import state_codec
from coordinator.strategies.base import Exchange, Replies, State, drive
from coordinator.strategies.registry import METHODS, method_settings
from edge_client.training.learner import EngineLearner
from emulator.simulation.virtual_network import EmulatedDevices, round_through_f32_delta
from tests.support.methods import build
from tests.support.softmax_program import SoftmaxEngine, grouped_fleet, start_of
from tests.support.virtual_federation import Federation, program

ROUNDS, DEVICES = 2, 3
RUNS = tuple(
    RunConfig(method=name, rounds=ROUNDS, name=name, settings=dict(method_settings(build(name, {"local-steps": 2}))))
    for name in sorted(METHODS)
)


POLICIES = tuple(
    RunConfig(
        method=method,
        rounds=ROUNDS,
        name=f"{method}-{policy}",
        settings=dict(method_settings(build(method, {"local-steps": 2, "batch-norm": policy}))),
    )
    for method in ("fedavg", "fesem", "fedem", "ifca", "ditto")
    for policy in ("average", "local", "batch")
) + tuple(
    RunConfig(
        method=method,
        rounds=ROUNDS,
        name=f"{method}-told",
        settings=dict(method_settings(build(method, {"local-steps": 2, "label-prior": "device"}))),
    )
    for method in ("fedavg", "fedem", "ifca")
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return training(Federation.of(tmp_path_factory.mktemp("federation"), runs=RUNS, devices=DEVICES))


@pytest.fixture(scope="module")
def with_buffers(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    folder = tmp_path_factory.mktemp("federation")
    return training(Federation.of(folder, runs=POLICIES, devices=DEVICES, buffered=True))


def training(fed: Federation) -> Federation:
    fed.start_coordinator()
    fed.start_devices(DEVICES)
    fed.finish()
    fed.world.end()
    return fed


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_over_a_broker_a_method_ends_as_with_direct_calls(trained: Federation, run: RunConfig) -> None:
    check_same(trained, run)


@pytest.mark.parametrize("run", POLICIES, ids=lambda run: run.name)
def test_so_it_does_with_every_policy_for_running_statistics_and_labels(
    with_buffers: Federation, run: RunConfig
) -> None:
    check_same(with_buffers, run)


def check_same(trained: Federation, run: RunConfig) -> None:
    found = state_codec.decode_state(trained.final_states()[run.name])
    expected, per_device = directly(run, trained)
    assert found.assignment == expected.assignment
    assert found.extra.keys() == expected.extra.keys()
    # Devices compute in float64 here, and round what they send or keep to float32.
    np.testing.assert_allclose(found.centers, expected.centers, rtol=0, atol=1e-7)
    assert [record["per_device"] for record in trained.rounds() if record["run"] == run.name] == per_device


def directly(run: RunConfig, fed: Federation) -> tuple[State, list[Mapping[str, float]]]:
    """The last state, and how well every device was served after each round."""
    learner = EngineLearner(SoftmaxEngine(), program(buffered=fed.buffered))
    devices = EmulatedDevices(learner=learner, local=grouped_fleet(DEVICES, 2), wire=round_through_f32_delta)
    strategy, schema, seed = make_strategy(run, fed.config), devices.program.schema, fed.config.seed
    state = strategy.begin(
        start_of(buffered=fed.buffered).astype(np.float32), schema, devices.fleet, round_rng(seed, 0)
    )

    served: list[Mapping[str, float]] = []

    def ask(exchange: Exchange) -> Replies:
        return {c: devices.answer(c, task) for c, task in exchange.items()}

    for number in range(1, ROUNDS + 1):
        devices.posterior.clear()
        generator = run_round(strategy, state, schema, devices.fleet, round_rng(seed, number), batch=8)
        state, report = drive(generator, ask)
        served.append(report.per_device)
    return state, served
