"""Every engine under every optimiser against torch.optim, over twenty steps. A new optimiser is one more row of CASES.

The reference is the loop that everybody writes, in float64 (support/reference_sgd.py). It shares no code with ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coordinator.models.registry import Model
from edge_client.protocol.task import Optimiser
from edge_client.training.learner import EngineLearner, Learner, TrainingJob
from emulator.engines.base import Recipe
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.engines.gpu.stacked import StackedRecipe
from tests.support.programs import BATCH, compiled, model, running
from tests.support.reference_sgd import JobFacts, check_same_as_loop, job_of
from tests.support.unrecorded_graphs import Unrecorded

STEPS = 20
CASES: dict[str, dict[str, Any]] = {  # of a `Fit`
    "momentum": {"momentum": 0.9},
    "nesterov": {"optimiser": Optimiser(name="sgd", momentum=0.9, nesterov=True)},
    "sgd, decay, clip": {"optimiser": Optimiser(name="sgd", momentum=0.5, weight_decay=0.1, clip_norm=0.7)},
    "adam": {"lr": 0.01, "optimiser": Optimiser(name="adam")},
    "adam, all": {
        "lr": 0.01,
        "optimiser": Optimiser(name="adam", beta1=0.8, beta2=0.99, eps=1e-4, weight_decay=0.1, clip_norm=0.7),
    },
    "adamw": {"lr": 0.01, "optimiser": Optimiser(name="adamw", weight_decay=0.2, clip_norm=0.7)},
}
RUNTIMES = {  # a runtime, a model, a dtype -> the difference of the moves that rounding may make
    ("onnx", "digits-mlp", "float64"): 1e-9,
    ("pt2", "digits-mlp", "float64"): 1e-9,
    (
        "pt2",
        "wecfl-cnn",
        "float64",
    ): 1e-6,  # Adam makes whole steps of gradients that are rounding: biases before a norm
    ("onnx", "digits-mlp", "float32"): 1e-3,
    ("litert", "digits-mlp", "float32"): 1e-3,
    ("pt2", "digits-mlp", "float32"): 1e-3,
}
EMULATED: dict[str, Callable[[Model], Recipe]] = {
    "lean": lambda model: cpu_recipe(model, dtype="float64"),
    "stacked": lambda model: StackedRecipe(model=model, device="cpu", dtype="float64"),
    "graphs": lambda model: Unrecorded(model=model),
}
each_case = pytest.mark.parametrize("case", CASES)


def job(name: str, case: str, *, n: int = 3 * BATCH, seed: int = 0) -> TrainingJob:
    """Every term of the objective is there, too: anchor, linear and weights of samples."""
    facts = JobFacts(
        n=n, steps=STEPS, batch=BATCH, seed=seed, terms=frozenset({"anchor", "linear", "q"}), settings=CASES[case]
    )
    return job_of(model(name), facts)


def opened_learner(engine: str, name: str, dtype: str) -> Learner:
    every = ("onnx", "litert", "pt2") if dtype == "float32" else (engine,)
    return EngineLearner(running(name, engine, dtype, every), compiled(name, dtype, every).program)


@each_case
@pytest.mark.parametrize(("runtime", "name", "dtype"), RUNTIMES)
def test_twenty_steps_on_a_runtime_end_where_torch_optim_ends(runtime: str, name: str, dtype: str, case: str) -> None:
    learner = opened_learner(runtime, name, dtype)
    check_same_as_loop(learner, model(name), [job(name, case)], tolerance=RUNTIMES[runtime, name, dtype])


@each_case
@pytest.mark.parametrize("engine", EMULATED)
def test_twenty_steps_of_an_emulated_device_end_where_torch_optim_ends(engine: str, case: str) -> None:
    """Three devices with batches of other sizes at the end: those that stack do not disturb each other."""
    jobs = [job("digits-mlp", case, n=n, seed=seed) for seed, n in enumerate((3 * BATCH, 11, 2 * BATCH + 1))]
    check_same_as_loop(EMULATED[engine](model("digits-mlp")).open(), model("digits-mlp"), jobs, tolerance=1e-9)


@pytest.mark.parametrize("engine", EMULATED)
def test_devices_of_several_optimisers_train_side_by_side(engine: str) -> None:
    jobs = [job("digits-mlp", case, seed=seed) for seed, case in enumerate([*CASES, "adam", "adam"])]
    check_same_as_loop(EMULATED[engine](model("digits-mlp")).open(), model("digits-mlp"), jobs, tolerance=1e-9)


@pytest.mark.parametrize("runtime", ["onnx", "litert", "pt2"])
def test_running_statistics_move_as_under_sgd(runtime: str) -> None:
    """Those of the first step follow from the first weights alone."""
    learner = opened_learner(runtime, "wecfl-cnn", "float32")
    n = learner.program.schema.n_params
    facts = [JobFacts(n=BATCH, steps=1, batch=BATCH, settings=CASES[case]) for case in ("momentum", "adam")]
    one, other = (trained.vector for trained in learner.train([job_of(model("wecfl-cnn"), fact) for fact in facts]))
    assert np.array_equal(one[n:], other[n:])
    assert not np.array_equal(one[:n], other[:n])


@pytest.mark.parametrize("runtime", ["onnx", "litert", "pt2"])
def test_what_an_optimiser_remembers_ends_with_its_update(runtime: str) -> None:
    learner = opened_learner(runtime, "digits-mlp", "float32")
    asked = job("digits-mlp", "adam, all")
    one, other = learner.train([asked, asked])
    assert np.array_equal(one.vector, other.vector)
    assert not np.array_equal(one.vector, asked.start)
