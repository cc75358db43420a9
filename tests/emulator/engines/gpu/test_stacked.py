"""Clients as a batch dimension get the numbers of the plain loop: every term, ragged jobs, any order, any chunk."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import cache
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import Malformed, ProgramRefused, RuntimeMissing
from edge_client.protocol.task import Fit, Probe
from edge_client.training.fit_probe import run_fit, run_probe
from edge_client.training.learner import Learner
from emulator.engines.gpu.stacked import StackedRecipe
from export.compiler.program import load_vector
from tests.support.engine_models import TERMS, CountingBuffer, Mixing, StackBranching, made, model_of
from tests.support.reference_sgd import SAME, JobFacts, check_same_as_loop, difference, job_of


@cache
def learner_of(name: str, chunk: int | None = None) -> Learner:
    return StackedRecipe(model=model_of(name), device="cpu", dtype="float64", chunk=chunk).open()


@pytest.mark.parametrize(
    "name", ["digits-mlp", "mnist-mlp", "wecfl-cnn", "gn-cnn", "linear-regression", "dropping", "reading"]
)
@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: "+".join(sorted(terms)) or "plain")
def test_updates_equal_the_plain_loop(name: str, terms: frozenset[str]) -> None:
    jobs = [job_of(model_of(name), JobFacts(n=7 + i, seed=i, terms=terms)) for i in range(3)]
    check_same_as_loop(learner_of(name), model_of(name), jobs)


@pytest.mark.parametrize("name", ["digits-mlp", "wecfl-cnn", "gn-cnn", "dropping", "reading"])
def test_ragged_jobs_equal_the_plain_loop(name: str) -> None:
    """Other numbers of steps and samples, batches shorter than asked, and every scalar its own."""
    every = TERMS[-1]
    facts = [
        JobFacts(n=9, steps=2, batch=4, terms=every),
        JobFacts(n=3, steps=5, batch=4, terms=every, settings={"lr": 0.01, "momentum": 0.5}),
        JobFacts(n=16, steps=5, batch=8),
        JobFacts(n=9, steps=5, batch=4, terms=frozenset({"anchor"}), settings={"mu": 0.9}),
        JobFacts(n=9, steps=1, batch=4, terms=frozenset({"linear", "q"}), settings={"lr": 0.2}),
        JobFacts(n=10, steps=5, batch=4, terms=frozenset({"momentum"})),
    ]
    jobs = [job_of(model_of(name), replace(one, seed=i)) for i, one in enumerate(facts)]
    check_same_as_loop(learner_of(name), model_of(name), jobs)


def test_clients_that_share_a_start_and_a_data_set_equal_the_plain_loop() -> None:
    model = model_of("digits-mlp")
    one = job_of(model, JobFacts(n=6, terms=TERMS[-1]))
    jobs = [one, replace(one, task=replace(one.task, lr=0.5)), one]
    check_same_as_loop(learner_of("digits-mlp"), model, jobs)


@given(data=st.data())
@settings(max_examples=25)
def test_neither_the_order_of_jobs_nor_the_chunk_changes_an_update(data: st.DataObject) -> None:
    model = model_of("digits-mlp")
    sizes = st.integers(1, 9)
    facts = data.draw(
        st.lists(
            st.builds(
                JobFacts, n=sizes, steps=st.integers(1, 4), batch=st.integers(1, 5), terms=st.sampled_from(TERMS)
            ),
            min_size=1,
            max_size=5,
        )
    )
    jobs = [job_of(model, replace(one, seed=i)) for i, one in enumerate(facts)]
    alone = [next(learner_of("digits-mlp").train([job])) for job in jobs]
    order = data.draw(st.permutations(range(len(jobs))))
    together = learner_of("digits-mlp", data.draw(st.integers(1, 6))).train([jobs[i] for i in order])
    for i, result in zip(order, together, strict=True):
        assert difference(jobs[i], result, alone[i]) < SAME


def test_no_jobs_give_no_results() -> None:
    assert list(learner_of("digits-mlp").train([])) == []


def test_a_diverged_client_is_refused_and_leaves_the_others_alone() -> None:
    model = model_of("digits-mlp")
    jobs = [job_of(model, JobFacts(seed=i)) for i in range(3)]
    bad = replace(jobs[1], task=replace(jobs[1].task, lr=1e300))
    first, _, last = learner_of("digits-mlp").train([jobs[0], bad, jobs[2]])
    for job, result in ((jobs[0], first), (jobs[2], last)):
        assert difference(job, result, next(learner_of("digits-mlp").train([job]))) < SAME
    with pytest.raises(Malformed, match="not_finite"):
        run_fit(learner_of("digits-mlp"), bad.task, bad.data)


@pytest.mark.parametrize("name", ["digits-mlp", "wecfl-cnn", "dropping", "reading"])
def test_models_are_evaluated_as_torch_evaluates_them(name: str) -> None:
    model, learner = model_of(name), learner_of(name)
    job = job_of(model, JobFacts(n=11))
    models = [job.start, job.start * 1.1]
    losses, logits = learner.evaluate(models, job.data, batch=4)
    for m, vector in enumerate(models):
        module = copy.deepcopy(model.module).double().eval()
        load_vector(module, learner.program.schema, vector)
        with torch.no_grad():
            out = module(torch.from_numpy(job.data.x))
        each = nn.functional.cross_entropy(out, torch.from_numpy(job.data.y), reduction="none")
        # float64, sums in another order
        np.testing.assert_allclose(logits[m], out.numpy(), rtol=SAME, atol=SAME)
        np.testing.assert_allclose(losses[m], each.numpy(), rtol=SAME, atol=SAME)


@pytest.mark.parametrize("name", ["digits-mlp", "gn-cnn"])
@pytest.mark.parametrize("n", [3, 8, 11])
def test_the_gradient_of_all_samples_is_that_of_one_large_step(name: str, n: int) -> None:
    """Without batch norm the mean over batches is the mean over samples: a step of lr 1 over all of them."""
    model = model_of(name)
    job = job_of(model, JobFacts(n=n, steps=1, batch=n, settings={"lr": 1.0}))
    stepped = next(learner_of(name).train([job]))
    found = learner_of(name).gradient(job.start, job.data, batch=4, seed=0)
    np.testing.assert_allclose(found, job.start - stepped.vector, rtol=0, atol=SAME)


def test_the_gradient_normalises_each_batch_by_itself_and_from_the_buffers_that_were_sent() -> None:
    model, learner = model_of("wecfl-cnn"), learner_of("wecfl-cnn")
    job = job_of(model, JobFacts(n=10))
    parts = [slice(0, 4), slice(4, 8), slice(8, 10)]
    expected = np.zeros(learner.program.schema.n_params)
    for part in parts:
        data = Dataset(job.data.x[part], job.data.y[part])
        expected += len(data) / 10 * learner.gradient(job.start, data, batch=4, seed=0)
    found = learner.gradient(job.start, job.data, batch=4, seed=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=SAME)


def test_the_clients_own_fit_and_probe_run_on_it() -> None:
    model, learner = model_of("digits-mlp"), learner_of("digits-mlp")
    job = job_of(model, JobFacts(n=12))
    task = Fit(start=job.start, steps=4, lr=0.1, batch=5, seed=3)
    after = run_fit(learner, task, job.data).vector
    want = frozenset({"loss", "votes", "confusion"})
    reply = run_probe(learner, Probe(models=[job.start, after], want=want, batch=5, seed=0), DeviceData(train=job.data))
    assert reply.losses is not None
    assert reply.votes is not None
    assert reply.losses[1] < reply.losses[0]
    assert reply.votes.sum() == 12


def test_float32_updates_are_float32_and_near() -> None:
    model = model_of("digits-mlp")
    job = job_of(model, JobFacts(terms=TERMS[-1]))
    (single,) = StackedRecipe(model=model, device="cpu").open().train([job])
    (double,) = learner_of("digits-mlp").train([job])
    assert single.vector.dtype == np.float32
    assert difference(job, single, double) < 1e-4  # float32 has 7 digits; the update is a tenth of the weights


def test_a_buffer_that_a_step_writes_and_is_not_batch_norms_is_refused_by_name() -> None:
    with pytest.raises(ProgramRefused, match=r"seen\n\nhint: choose the engine lean"):
        StackedRecipe(model=made(CountingBuffer, (3,), 2), device="cpu").open()


def test_a_model_that_torch_cannot_stack_is_refused_by_name() -> None:
    with pytest.raises(ProgramRefused, match=r"(?s)'StackBranching' cannot be stacked.*choose the engine lean"):
        StackedRecipe(model=made(StackBranching, (3,), 2), device="cpu").open()


def test_a_model_that_comes_out_differently_in_a_stack_is_refused_by_name() -> None:
    with pytest.raises(ProgramRefused, match=r"(?s)'Mixing' mixes the clients.*choose the engine lean"):
        StackedRecipe(model=made(Mixing, (3,), 2), device="cpu").open()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_said() -> None:
    with pytest.raises(RuntimeMissing, match="no CUDA device"):
        StackedRecipe(model=model_of("digits-mlp"), device="cuda").open()


def test_a_recipe_travels_to_other_processes_and_leaves_its_module_where_it_was() -> None:
    sent = StackedRecipe(model=model_of("digits-mlp"), device="cpu", dtype="float64", chunk=3)
    recipe = pickle.loads(ForkingPickler.dumps(sent))  # noqa: S301 - our own
    assert not any(p.untyped_storage().is_shared() for p in sent.model.module.parameters())
    job = job_of(model_of("digits-mlp"), JobFacts())
    (here,), (there,) = learner_of("digits-mlp").train([job]), recipe.open().train([job])
    np.testing.assert_array_equal(here.vector, there.vector)
