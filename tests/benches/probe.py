"""Bench: five candidate models on a device's samples, our `Learner.evaluate` against loading each and evaluating it."""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coordinator.models.registry import Model, build_model
from edge_client.data.dataset import Dataset
from edge_client.protocol.task import Array, Flat, Schema
from tests.benches.results import BenchFigure
from tests.benches.turns import interleaved, timed
from tests.benches.work import BATCH, images, prepared

K, SAMPLES = 5, 640
NAMES = {"wecfl-cnn": "wecfl", "mnist-mlp": "mlp"}
TOLERANCE = 1e-4  # of a loss, absolute, in float32: folding batch norm changes the order of sums; 4e-6 were seen


def run(repeats: int) -> tuple[list[BenchFigure], dict[str, str]]:
    """A row for each model."""
    return [one_model(name, repeats) for name in NAMES], {}


def one_model(name: str, repeats: int) -> BenchFigure:
    """Milliseconds of CPU for all K models on all samples."""
    model = build_model(name, seed=0)
    work, recipe = prepared(model, 1)
    learner, data = recipe.open(), images(SAMPLES, classes=model.classes, seed=1)
    models = centers(work.start, work.program.schema)
    both: list[Array] = [np.zeros(0), np.zeros(0)]
    loop = LoadAndEvaluate(model, work.program.schema)
    took = interleaved(
        {
            "ours": timed(lambda: both.__setitem__(0, learner.evaluate(models, data, batch=BATCH)[0])),
            "theirs": timed(lambda: both.__setitem__(1, loop.losses(models, data))),
        },
        repeats,
    )
    off = float(np.abs(both[0] - both[1]).max())
    return BenchFigure(
        row=f"probe-{NAMES[name]}",
        ours=1e3 * took["ours"].cpu_s,
        theirs=1e3 * took["theirs"].cpu_s,
        score=took["theirs"].cpu_s / took["ours"].cpu_s,
        note=f"{SAMPLES} samples; the losses are {off:.0e} apart",
        unmeasured="" if off <= TOLERANCE else f"the losses are {off:.0e} apart: not the same numbers",
    )


def centers(start: Flat, schema: Schema) -> list[Flat]:
    """K models near `start` [schema.size]; the buffers stay, for a variance must be positive."""
    rng = np.random.default_rng(0)
    models = []
    for _ in range(K):
        model = start.copy()
        model[: schema.n_params] += 0.01 * rng.standard_normal(schema.n_params)
        models.append(model.astype(start.dtype))
    return models


class LoadAndEvaluate:
    """The usual loop: load a state, go through the samples in batches of 32, keep every loss."""

    def __init__(self, model: Model, schema: Schema) -> None:
        self._net, self._schema = copy.deepcopy(model.module).eval(), schema

    @torch.inference_mode()
    def losses(self, models: list[Flat], data: Dataset) -> NDArray[np.float32]:
        """[K, n]."""
        x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
        batches = list(zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True))
        rows = []
        for model in models:
            state = {name: torch.from_numpy(np.asarray(a)) for name, a in self._schema.split(model).items()}
            self._net.load_state_dict(state, strict=False)  # num_batches_tracked is not among ours
            losses = [nn.functional.cross_entropy(self._net(a), b, reduction="none") for a, b in batches]
            rows.append(torch.cat(losses))
        found: NDArray[np.float32] = torch.stack(rows).numpy()
        return found
