"""Who steps when: every batch once, whole, in its place; the plan of memory is arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.models.registry import build_model
from edge_client.protocol.task import Optimiser
from edge_client.training.learner import TrainingJob
from emulator.engines.gpu.schedule import (
    MAX_MEMORY_SHARE,
    bytes_of,
    clients_at_once,
    make_schedule,
    order_jobs,
)
from tests.support.reference_sgd import JobFacts, job_of

MODEL = build_model("digits-mlp", seed=0)
FACTS = st.builds(
    JobFacts,
    n=st.integers(1, 20),
    steps=st.integers(1, 6),
    batch=st.integers(1, 8),
    seed=st.integers(0, 99),
    terms=st.sampled_from([frozenset[str](), frozenset({"q"})]),
)
JOBS = st.lists(FACTS, min_size=1, max_size=6).map(lambda facts: [job_of(MODEL, one) for one in facts])


def held(job: TrainingJob, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return job.data.x[used], np.eye(MODEL.classes)[job.data.y[used]]


def played(jobs: list[TrainingJob]) -> list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Client -> step -> x, y and q of its batch, read as an engine reads them."""
    plan = make_schedule(jobs)
    x, y = (
        np.concatenate(parts)
        for parts in zip(*(held(job, used) for job, used in zip(jobs, plan.used, strict=True)), strict=True)
    )
    found: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in jobs]
    for step in plan.steps:
        clients = np.arange(step.active)
        seen = []
        for bucket in step.buckets:
            who = clients[bucket.who]
            assert len(who) == bucket.clients
            uses = slice(bucket.at, bucket.at + bucket.clients * bucket.batch)
            rows, q = (part[uses].reshape(bucket.clients, bucket.batch) for part in (plan.rows, plan.q))
            for i, row, weight in zip(who, rows, q, strict=True):
                found[i].append((x[row], y[row], weight))
            seen += list(who)
        assert sorted(seen) == list(range(step.active))  # everybody at work, once
    return found


@given(jobs=JOBS)
def test_every_client_reads_its_own_batches_in_order_and_nothing_else(jobs: list[TrainingJob]) -> None:
    jobs = [jobs[i] for i in order_jobs(jobs)]
    for job, steps in zip(jobs, played(jobs), strict=True):
        assert len(steps) == len(job.batches)
        for index, (x, y, q) in zip(job.batches, steps, strict=True):
            np.testing.assert_array_equal(x, job.data.x[index])
            np.testing.assert_array_equal(y.argmax(1), job.data.y[index])
            np.testing.assert_array_equal(q, job.weights[index] / len(index))


@given(jobs=JOBS)
def test_clients_at_work_are_a_prefix_that_shrinks(jobs: list[TrainingJob]) -> None:
    order = order_jobs(jobs)
    assert sorted(order) == list(range(len(jobs)))
    active = [step.active for step in make_schedule([jobs[i] for i in order]).steps]
    assert active == [sum(len(job.batches) > k for job in jobs) for k in range(len(active))]


def test_a_stack_holds_each_used_sample_once() -> None:
    job = job_of(MODEL, JobFacts(n=10, steps=20, batch=4))
    few = replace(job, batches=job.batches[:1])
    first, second = make_schedule([job, few]).used
    assert list(first) == list(range(10))
    assert list(second) == sorted(job.batches[0])


@given(
    clients=st.integers(1, 20_000),
    per_client=st.integers(1, 10**9),
    free=st.integers(0, 10**12),
    most=st.integers(1, 4096),
)
def test_stacks_are_equal_parts_that_fit(clients: int, per_client: int, free: int, most: int) -> None:
    size = clients_at_once(clients, per_client=per_client, free=free, most=most)
    assert 1 <= size <= most
    assert size == 1 or size * per_client <= MAX_MEMORY_SHARE * free
    stacks = -(-clients // size)
    assert clients > size * (stacks - 1)
    assert size * stacks - clients < stacks  # no stack is smaller than another by more than the rounding


def test_ten_thousand_devices_of_the_wecfl_network_fit_a_card_of_80_gb() -> None:
    """With activations of 8 MB per client, an estimate for batches of 32, until a GPU has measured them."""
    model = build_model("wecfl-cnn", seed=0)
    job = job_of(model, JobFacts(n=600, steps=10, batch=32))
    one = bytes_of(job, size=29_130, target=10, activations=8_000_000, itemsize=4)
    assert one == 4 * 29_130 * 4 + 8_000_000 + 320 * (784 + 10) * 4 + 16 * 320
    adam = replace(job, task=replace(job.task, optimiser=Optimiser(name="adam")))
    more = bytes_of(adam, size=29_130, target=10, activations=8_000_000, itemsize=4) - one
    assert more == 3 * 29_130 * 4  # the mean squares, their roots, and the move
    size = clients_at_once(10_000, per_client=one, free=80_000_000_000, most=1024)
    assert size == 1000
    assert size * one < 10_000_000_000


@pytest.mark.parametrize("clients", [0, 1])
def test_nobody_and_one_need_no_plan(clients: int) -> None:
    assert clients_at_once(clients, per_client=1, free=1, most=8) == 1
