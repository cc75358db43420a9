"""Every method over a broker ends where direct calls end: the server, real clients, messages and blocks, one fleet.

The runs follow one another, so nothing that a device keeps for one of them may reach the next.
"""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.config_sections import RunConfig
from coordinator.strategies.registry import METHODS, method_settings, summed_members
from tests.support.direct_calls import train_directly
from tests.support.methods import build
from tests.support.virtual_federation import Federation

ROUNDS, DEVICES = 2, 3
RUNS = tuple(
    RunConfig(method=name, rounds=ROUNDS, name=name, settings=dict(method_settings(build(name, {"local-steps": 2}))))
    for name in sorted(METHODS)
)
ALONE, OF_TWO, OF_THREE = (tuple(run for run in RUNS if summed_members(run.method) == n) for n in (1, 2, 3))

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
        name=f"{method}-label-prior",
        settings=dict(method_settings(build(method, {"local-steps": 2, "label-prior": "device"}))),
    )
    for method in ("fedavg", "fedavg-plus", "fedem", "fedsoft", "ifca", "nonfed", "wecfl")
)
OTHER_BATCH = RunConfig(  # than the program's: statistics of a test are those of the batches of training
    method="fedavg",
    rounds=ROUNDS,
    name="fedavg-other-batch",
    settings=dict(method_settings(build("fedavg", {"local-steps": 2, "batch-norm": "batch", "batch-size": 24}))),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation.of(tmp_path_factory.mktemp("federation"), runs=ALONE, devices=DEVICES).play()


@pytest.fixture(scope="module")
def of_sums(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Federation]:
    places, runs = tmp_path_factory.mktemp("federations"), {2: OF_TWO, 3: OF_THREE}
    return {n: Federation.of(places / str(n), runs=some, devices=DEVICES, members=n).play() for n, some in runs.items()}


@pytest.fixture(scope="module")
def with_buffers(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    folder = tmp_path_factory.mktemp("federation")
    return Federation.of(folder, runs=(*POLICIES, OTHER_BATCH), devices=DEVICES, buffered=True).play()


@pytest.mark.parametrize("run", ALONE, ids=lambda run: run.name)
def test_over_a_broker_a_method_ends_as_with_direct_calls(trained: Federation, run: RunConfig) -> None:
    check_same(trained, run)


@pytest.mark.parametrize("run", OF_TWO + OF_THREE, ids=lambda run: run.name)
def test_so_does_a_method_that_adds_models(of_sums: dict[int, Federation], run: RunConfig) -> None:
    check_same(of_sums[summed_members(run.method)], run)


@pytest.mark.parametrize("run", [*POLICIES, OTHER_BATCH], ids=lambda run: run.name)
def test_so_it_does_with_every_policy_for_running_statistics_and_labels(
    with_buffers: Federation, run: RunConfig
) -> None:
    check_same(with_buffers, run)


def check_same(trained: Federation, run: RunConfig) -> None:
    found = trained.final_state(run.name)
    expected, tests = train_directly(trained, run)
    assert found.assignment == expected.assignment
    assert found.extra.keys() == expected.extra.keys()
    # Devices compute in float64 here, and round what they send or keep to float32.
    np.testing.assert_allclose(found.centers, expected.centers, rtol=0, atol=1e-7)
    for record, test in zip((r for r in trained.rounds() if r["run"] == run.name), tests, strict=True):
        assert record["per_device"] == test.per_device
        if test.loss.micro is not None:  # as of a mixture
            assert record["loss"]["micro"] == pytest.approx(test.loss.micro, rel=1e-5)  # models are float32
