"""A pass whose last batch holds one sample, under batch norm of one value per channel: a device trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from coordinator.models.registry import Model
from edge_client.data.dataset import Dataset
from edge_client.protocol.task import Fit
from edge_client.training.fit_probe import run_fit
from edge_client.training.learner import EngineLearner
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.engines.gpu.stacked import StackedRecipe
from export.compiler.program import compile_program, vector_of
from tests.support.programs import opened

SAMPLES, BATCH = 9, 4  # batches of 4, 4 and 1
SAME = 1e-10


def test_a_device_trains_on_and_every_engine_does_the_same(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = Model(name="row-norm", module=module, input=(5,), classes=3)
    made = compile_program(module, (5,), dtype="float64", engines=("onnx", "pt2"))
    schema, start = made.program.schema, vector_of(module.double(), made.program.schema)
    device, of_torch = (EngineLearner(opened(made, engine, tmp_path), made.program) for engine in ("onnx", "pt2"))
    rng = np.random.default_rng(0)
    data = Dataset(rng.standard_normal((SAMPLES, 5)), rng.integers(3, size=SAMPLES))

    def fit(steps: int) -> Fit:
        return Fit(start=start, steps=steps, lr=0.1, batch=BATCH, seed=0)

    whole, and_one = (schema.split(run_fit(device, fit(steps), data).vector) for steps in (2, 3))
    assert all(np.array_equal(whole[name], and_one[name]) for name in ("1.running_mean", "1.running_var"))
    assert not np.array_equal(whole["3.bias"], and_one["3.bias"])
    trained = run_fit(device, fit(6), data).vector
    recipes = (cpu_recipe(model, dtype="float64"), StackedRecipe(model=model, device="cpu", dtype="float64"))
    for learner in (of_torch, *(recipe.open() for recipe in recipes)):
        assert np.abs(run_fit(learner, fit(6), data).vector - trained).max() < SAME
