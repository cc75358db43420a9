"""Probes whose models are evaluated together get the replies of probes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import Malformed
from edge_client.protocol.task import F64, Array, ClientId, OwnModel, Probe, Reply
from edge_client.training.fit_probe import run_probe
from edge_client.training.learner import Evaluation
from emulator.engines.gpu.stacked import StackedLearner, StackedRecipe
from emulator.simulation.emulated_devices import EmulatedDevices
from emulator.simulation.probes_together import run_probes
from tests.support.engine_models import model_of
from tests.support.reference_sgd import SAME, JobFacts, job_of

SIZES = {"a": 5, "b": 11, "c": 1}


def learner_of(name: str) -> StackedLearner:
    found = StackedRecipe(model=model_of(name), device="cpu", dtype="float64").open()
    assert isinstance(found, StackedLearner)
    return found


def fleet_of(name: str) -> dict[ClientId, DeviceData]:
    each = {who: job_of(model_of(name), JobFacts(n=n, seed=n)).data for who, n in SIZES.items()}
    return {who: DeviceData(train=data, test=Dataset(data.x[:3], data.y[:3])) for who, data in each.items()}


def assert_equal(one: Reply, other: Reply) -> None:
    for field in fields(Reply):
        ours, alone = getattr(one, field.name), getattr(other, field.name)
        assert (ours is None) == (alone is None)
        if alone is not None:
            np.testing.assert_allclose(ours, alone, rtol=SAME, atol=SAME)


@pytest.mark.parametrize("name", ["digits-mlp", "wecfl-cnn", "reading"])
def test_every_reply_is_that_of_the_probe_alone(name: str) -> None:
    """Devices of several sizes and numbers of models; batch norm of the device's own; gradients; a refusal."""
    learner, local = learner_of(name), fleet_of(name)
    start = job_of(model_of(name), JobFacts()).start
    base = Probe(models=[start, 1.1 * start], want=frozenset({"loss", "votes"}), split="train", batch=4, seed=1)
    counted = replace(base, models=[start], want=frozenset({"confusion", "answers"}), split="test")
    graded = replace(base, models=[start], want=frozenset({"grad"}))
    for tasks in (
        dict.fromkeys(SIZES, base),
        {"a": base, "b": counted, "c": graded},
        {"a": replace(base, buffers="batch"), "b": replace(base, limit=7, batch=3), "c": base},
    ):
        devices = EmulatedDevices(learner=learner, local=local)
        for who, reply in devices.answers(tasks).items():
            assert isinstance(reply, Reply)
            assert_equal(reply, run_probe(learner, tasks[who], local[who]))


def test_a_device_that_refuses_its_probe_costs_the_others_nothing() -> None:
    learner, local = learner_of("digits-mlp"), fleet_of("digits-mlp")
    local["b"] = replace(local["b"], test=None)
    start = job_of(model_of("digits-mlp"), JobFacts()).start
    task = Probe(models=[start], want=frozenset({"loss"}), split="test", batch=4, seed=1)
    found = EmulatedDevices(learner=learner, local=local).answers(dict.fromkeys(SIZES, task))
    assert found["b"] == "no_data"
    assert isinstance(found["a"], Reply)
    assert isinstance(found["c"], Reply)


def test_models_of_a_device_are_its_own() -> None:
    learner, local = learner_of("digits-mlp"), fleet_of("digits-mlp")
    start = job_of(model_of("digits-mlp"), JobFacts()).start
    devices = EmulatedDevices(learner=learner, local=local)
    devices.own["b", "main"] = 2 * start
    models: list[Array | OwnModel] = [start, OwnModel(slot="main", init=start)]
    task = Probe(models=models, want=frozenset({"loss"}), split="train", batch=4, seed=1)
    found = devices.answers(dict.fromkeys(SIZES, task))
    losses = {
        who: reply.losses for who, reply in found.items() if isinstance(reply, Reply) and reply.losses is not None
    }
    assert {who: bool(np.isclose(*values)) for who, values in losses.items()} == {"a": True, "b": False, "c": True}


class Counting(StackedLearner):
    """Counts passes."""

    def __init__(self) -> None:
        one = learner_of("digits-mlp")
        super().__init__(one.objective, chunk=None, stacks_models=True)
        self.passes = 0

    def evaluate_each(self, asked: Sequence[Evaluation], *, batch: int) -> list[tuple[F64, Array]]:
        self.passes += 1
        return super().evaluate_each(asked, batch=batch)

    def evaluate(self, models: Sequence[Array], data: Dataset, *, batch: int) -> tuple[F64, Array]:
        raise Malformed("bad_task", "one by one")


def test_probes_of_one_batch_size_are_one_pass() -> None:
    learner, local = Counting(), fleet_of("digits-mlp")
    start = job_of(model_of("digits-mlp"), JobFacts()).start
    task = Probe(models=[start], want=frozenset({"loss"}), split="train", batch=4, seed=1)
    found = dict(run_probes(learner, dict.fromkeys(SIZES, task), lambda one, who: run_probe(one, task, local[who])))
    assert found.keys() == SIZES.keys()
    assert learner.passes == 1
