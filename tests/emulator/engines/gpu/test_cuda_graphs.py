"""Replayed steps equal the plain loop: unrecorded on the CPU, which is all but the recording; recorded on CUDA."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.errors import RuntimeMissing
from edge_client.training.learner import Learner, TrainedModel, TrainingJob
from emulator.engines.gpu.cuda_graphs import GraphLearner, GraphRecipe, Run
from emulator.engines.gpu.objective import Objective
from emulator.engines.gpu.stacked import StackedRecipe
from tests.support.engine_models import TERMS, model_of
from tests.support.reference_sgd import SAME, JobFacts, check_same_as_loop, difference, job_of
from tests.support.unrecorded_graphs import Unrecorded

NAMES = ["digits-mlp", "wecfl-cnn", "gn-cnn", "dropping", "reading"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small kernels only wait for each other where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def two_lanes(name: str) -> Learner:
    return Unrecorded(model=model_of(name)).open()


RAGGED = [
    JobFacts(n=9, steps=2, batch=4, terms=TERMS[-1]),
    JobFacts(n=3, steps=5, batch=4, terms=TERMS[-1], settings={"lr": 0.01, "momentum": 0.5}),
    JobFacts(n=16, steps=5, batch=8),
    JobFacts(n=9, steps=5, batch=4, terms=frozenset({"anchor"}), settings={"mu": 0.9}),
    JobFacts(n=10, steps=5, batch=4, terms=frozenset({"momentum"})),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: "+".join(sorted(terms)) or "plain")
def test_updates_equal_the_plain_loop(name: str, terms: frozenset[str]) -> None:
    """More jobs than lanes: what one client leaves in its lane must not reach the next."""
    jobs = [job_of(model_of(name), JobFacts(n=7 + i, seed=i, terms=terms)) for i in range(3)]
    check_same_as_loop(two_lanes(name), model_of(name), jobs)


@pytest.mark.parametrize("name", NAMES)
def test_ragged_jobs_equal_the_plain_loop(name: str) -> None:
    jobs = [job_of(model_of(name), replace(one, seed=i)) for i, one in enumerate(RAGGED)]
    check_same_as_loop(two_lanes(name), model_of(name), jobs)


@cache
def trained_alone(i: int) -> tuple[TrainingJob, TrainedModel]:
    """A job of RAGGED, and what it ends with where no other job is trained."""
    job = job_of(model_of("digits-mlp"), replace(RAGGED[i], seed=i))
    return job, next(iter(two_lanes("digits-mlp").train([job])))


@given(order=st.permutations(range(len(RAGGED))), lanes=st.integers(1, 7))
@settings(max_examples=20)
def test_neither_the_order_of_jobs_nor_the_number_of_lanes_changes_an_update(order: list[int], lanes: int) -> None:
    jobs, alone = zip(*map(trained_alone, order), strict=True)
    results = Unrecorded(model=model_of("digits-mlp"), lanes=lanes).open().train(jobs)
    for job, result, expected in zip(jobs, results, alone, strict=True):
        assert difference(job, result, expected) < SAME


def test_a_batch_size_is_recorded_once_per_lane_and_short_batches_never() -> None:
    recordings: list[Run] = []

    def record(run: Run) -> Run:
        recordings.append(run)
        return run

    objective = Objective(model_of("digits-mlp"), device=torch.device("cpu"), dtype="float64")
    learner = GraphLearner(objective, lanes=2, record=record)
    facts = [
        JobFacts(n=9, batch=4),
        JobFacts(n=9, batch=4),
        JobFacts(n=8, batch=4),
        JobFacts(n=3, batch=4),
        JobFacts(n=8, batch=2),
    ]
    list(learner.train([job_of(model_of("digits-mlp"), one) for one in facts]))
    assert len(recordings) == 3  # size 4 in both lanes, size 2 in one


def test_probes_are_those_of_stacked() -> None:
    model, job = model_of("wecfl-cnn"), job_of(model_of("wecfl-cnn"), JobFacts(n=9))
    one, other = two_lanes("wecfl-cnn"), StackedRecipe(model=model, device="cpu", dtype="float64").open()
    found, expected = (learner.gradient(job.start, job.data, batch=4, seed=0) for learner in (one, other))
    np.testing.assert_allclose(found, expected, rtol=0, atol=SAME * np.abs(expected).max())
    models = [job.start, 1.1 * job.start]
    for here, there in zip(
        one.evaluate(models, job.data, batch=4), other.evaluate(models, job.data, batch=4), strict=True
    ):
        np.testing.assert_allclose(here, there, rtol=SAME, atol=SAME)


def test_a_recipe_travels_to_other_processes() -> None:
    recipe = GraphRecipe(model=model_of("digits-mlp"), lanes=3)
    copy = pickle.loads(ForkingPickler.dumps(recipe))  # noqa: S301 - our own
    assert not any(p.untyped_storage().is_shared() for p in recipe.model.module.parameters())
    assert (copy.device, copy.dtype, copy.lanes, copy.model.name) == ("cuda", "float32", 3, "digits-mlp")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "auto", "cpu"])
def test_without_cuda_it_says_what_to_do(device: str) -> None:
    with pytest.raises(RuntimeMissing, match=r"hint: choose the engine lean"):
        GraphRecipe(model=model_of("digits-mlp"), device=device).open()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_recorded_steps_equal_the_plain_loop(name: str) -> None:
    jobs = [job_of(model_of(name), replace(one, seed=i)) for i, one in enumerate(RAGGED)]
    check_same_as_loop(GraphRecipe(model=model_of(name), dtype="float64", lanes=2).open(), model_of(name), jobs)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # recurrent layers, one client after the other
@pytest.mark.parametrize("name", NAMES)
def test_stacked_steps_on_cuda_equal_the_plain_loop(name: str) -> None:
    jobs = [job_of(model_of(name), replace(one, seed=i)) for i, one in enumerate(RAGGED)]
    check_same_as_loop(StackedRecipe(model=model_of(name), device="cuda", dtype="float64").open(), model_of(name), jobs)
