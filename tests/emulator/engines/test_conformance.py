"""Every engine of the emulator gives the numbers of the devices' own runtimes, in float64, update by update.

A new engine is a row of ENGINES. Programs are compiled once and shared with the other test files (support/programs.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from torch import nn

from coordinator.models.registry import Model
from edge_client.data.dataset import Dataset
from edge_client.protocol.task import Array, Fit, Flat
from edge_client.training.fit_probe import make_job
from edge_client.training.learner import EngineLearner, Learner, TrainedModel, TrainingJob
from emulator.engines.base import Recipe
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.engines.gpu.stacked import StackedRecipe
from export.compiler.program import vector_of
from export.compiler.program_functions import vocabulary_size
from tests.support import programs, reference_sgd
from tests.support.unrecorded_graphs import Unrecorded

ENGINES: dict[str, Callable[[Model], Recipe]] = {
    "lean": lambda model: cpu_recipe(model, dtype="float64"),
    "stacked": lambda model: StackedRecipe(model=model, device="cpu", dtype="float64"),
    "graphs": lambda model: Unrecorded(model=model),
}
# A model, and the runtime whose numbers count. In float64 ONNX Runtime has no convolution, and rounds factors beside
# products.
RUNTIMES = {
    "digits-mlp": "onnx",
    "wecfl-cnn": "pt2",
    "gn-cnn": "pt2",
    "dropout": "onnx",
    "tied-embedding": "onnx",
    "frozen-body": "pt2",
    "several-buffers": "onnx",
    "triangle": "pt2",
}
REFUSED = {("stacked", "several-buffers")}  # it writes buffers that are not batch norm's
PAIRS = [pair for pair in itertools.product(ENGINES, RUNTIMES) if pair not in REFUSED]
SAME = 1e-12  # relative: float64 sums of up to 10^5 terms, in another order, over a few steps
SAMPLES, BATCH = 13, 4  # a short batch of one sample ends each pass
TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "anchor": {"mu": 0.3, "anchor": True},
    "linear": {"linear": True},
    "rows": {"rows": "posterior:1"},
}
TOGETHER = {key: value for terms in TERMS.values() for key, value in terms.items()}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An engine, and the runtime that it must equal, with something to train on."""

    engine: Learner
    runtime: Learner
    start: Flat
    data: Dataset

    def job(self, terms: dict[str, Any], *, seed: int = 0, samples: int = SAMPLES) -> TrainingJob:
        rng = np.random.default_rng(seed)
        given = dict(terms)
        if "anchor" in given:
            given["anchor"] = self.start + 0.1 * rng.standard_normal(self.start.shape)
        if "linear" in given:
            given["linear"] = 0.05 * rng.standard_normal(self.start.shape)
        data = Dataset(self.data.x[:samples], self.data.y[:samples])
        task = Fit(start=self.start, steps=5, lr=0.05, batch=BATCH, seed=seed, **given)
        return make_job(self.engine.program, task, data, posterior=rng.uniform(0.1, 1.0, (2, samples)))

    def models(self) -> list[Flat]:
        """Near the start; buffers stay positive, as variances are."""
        rng = np.random.default_rng(5)
        return [self.start + 0.1 * rng.random(self.start.shape) for _ in range(3)]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Pair:
    engine, name = request.param
    model, runtime = programs.model(name), RUNTIMES[name]
    made = programs.compiled(name, "float64", (runtime,))
    return Pair(
        engine=ENGINES[engine](model).open(),
        runtime=EngineLearner(programs.running(name, runtime, "float64", (runtime,)), made.program),
        start=vector_of(model.module, made.program.schema).astype(np.float64),
        data=samples_of(model),
    )


def samples_of(model: Model) -> Dataset:
    """Half of each image is flat, so that pools tie there. A flat image alone would have no variance: batch norm would
    divide by the root of its epsilon, and two such layers make 1e-11 of float64's rounding."""
    rng = np.random.default_rng(1)
    tokens, shape = vocabulary_size(model.module), (SAMPLES, *model.input)
    x = rng.integers(tokens, size=shape).astype(np.float64) if tokens else rng.standard_normal(shape)
    if x.ndim == 4:
        x[:, :, : shape[2] // 2] = 0.0
    return Dataset(x, rng.integers(model.classes, size=SAMPLES))


def apart(one: Array, other: Array, scale: Array | None = None) -> float:
    """The largest difference, relative to the largest value of `scale`."""
    assert one.shape == other.shape
    return float(np.abs(one - other).max() / np.abs(other if scale is None else scale).max())


def check_same(one: TrainedModel, other: TrainedModel, job: TrainingJob) -> None:
    assert apart(one.vector, other.vector, other.vector - job.start) < SAME
    assert apart(one.losses, other.losses) < SAME


def test_the_program_is_the_one_that_is_compiled(pair: Pair) -> None:
    one, other = pair.engine.program, pair.runtime.program
    assert (one.model, one.schema, one.functions) == (other.model, other.schema, other.functions)
    assert (one.input, one.target, one.loss, one.dtype) == (other.input, other.target, other.loss, other.dtype)


@pytest.mark.parametrize("terms", [*TERMS, "together"])
def test_an_update_is_the_runtimes(pair: Pair, terms: str) -> None:
    samples = SAMPLES - 1 if pair.engine.program.model == "frozen-body" else SAMPLES
    asked = pair.job(TERMS.get(terms, TOGETHER), samples=samples)
    one, other = (next(iter(learner.train([asked]))) for learner in (pair.engine, pair.runtime))
    check_same(one, other, asked)


def test_jobs_do_not_see_each_other_nor_what_is_asked_between_them(pair: Pair) -> None:
    jobs = [pair.job(TOGETHER, seed=seed, samples=12) for seed in (1, 2, 1)]
    results = []
    for trained in pair.engine.train(jobs):
        pair.engine.evaluate(pair.models(), pair.data, batch=5)
        pair.engine.gradient(pair.models()[0], pair.data, batch=12, seed=3)
        results.append(trained)
    for asked, result in zip(jobs, results, strict=True):
        check_same(result, next(iter(pair.runtime.train([asked]))), asked)
    np.testing.assert_array_equal(results[0].vector, results[2].vector)


def test_nothing_that_was_given_is_changed(pair: Pair) -> None:
    asked = pair.job(TOGETHER, samples=12)
    given = [asked.start, asked.task.anchor, asked.task.linear, asked.data.x, asked.data.y, asked.weights]
    arrays = [array for array in given if array is not None]
    before = [array.copy() for array in arrays]
    (trained,) = pair.engine.train([asked])
    kept = trained.vector.copy()
    trained.vector[:] = 0
    (again,) = pair.engine.train([asked])
    np.testing.assert_array_equal(again.vector, kept)
    for one, other in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_candidates_are_evaluated_as_by_the_runtime(pair: Pair) -> None:
    models = pair.models()
    one, other = (learner.evaluate(models, pair.data, batch=5) for learner in (pair.engine, pair.runtime))
    assert one[0].dtype == np.float64
    assert apart(one[0], other[0]) < SAME
    assert apart(one[1], other[1]) < SAME


def test_a_gradient_is_the_runtimes(pair: Pair) -> None:
    data = Dataset(pair.data.x[:12], pair.data.y[:12])  # the last of 13 alone would have no variance
    one, other = (learner.gradient(pair.models()[0], data, batch=5, seed=4) for learner in (pair.engine, pair.runtime))
    assert apart(one, other) < SAME


def narrow_femnist() -> Model:
    """LEAF's network with 32 hidden units in place of 2,048."""
    whole = programs.model("femnist-cnn")
    layers = [*whole.module.children()][:-3]  # to the samples of 3,136 numbers
    return replace(whole, module=nn.Sequential(*layers, nn.Linear(3136, 32), nn.ReLU(), nn.Linear(32, whole.classes)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("made", "steps"),
    [
        pytest.param(lambda: programs.model("femnist-cnn"), 2, marks=pytest.mark.slow),  # gigabytes of memory, written
        (narrow_femnist, 2),
        (lambda: programs.model("linear-regression"), 4),
    ],
    ids=["femnist-cnn", "narrow-femnist-cnn", "linear-regression"],
)
def test_an_update_is_that_of_the_loop_that_everybody_writes(
    engine: str, made: Callable[[], Model], steps: int
) -> None:
    """LEAF's network takes minutes to compile."""
    model, terms = made(), frozenset({"anchor", "linear", "momentum", "q"})
    asked = reference_sgd.job_of(model, reference_sgd.JobFacts(n=5, steps=steps, batch=3, terms=terms))
    reference_sgd.check_same_as_loop(ENGINES[engine](model).open(), model, [asked])
