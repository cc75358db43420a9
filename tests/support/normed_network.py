"""A small network with batch norm, its fleet in float64, and the same in plain torch: training, losses, statistics."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import nn

from coordinator.models.registry import Model
from coordinator.rounds.round import round_rng
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import F64, ClientId, Fit, Flat, Schema
from edge_client.training.learner import Learner
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.simulation.emulated_devices import EmulatedDevices, no_rounding
from export.compiler.program import schema_of, vector_of
from tests.support.methods import MethodWorld, build
from tests.support.plain_loops import BATCH, MOMENTUM, RATE, STEPS, mean
from tests.support.softmax_program import CLASSES, FEATURES

HIDDEN, SAME = 4, 1e-10  # float64, over a few rounds with a division by a deviation
Named = dict[str, torch.Tensor]


@cache
def _model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
    return Model(name="normed", module=module, input=(FEATURES,), classes=CLASSES)


@cache
def _learner() -> Learner:
    return cpu_recipe(_model(), dtype="float64").open()


SCHEMA: Schema = schema_of(_model().module)
P = SCHEMA.n_params


def normed_world(
    case: str, settings: Mapping[str, float | str], local: dict[ClientId, DeviceData], *, k: int, seed: int
) -> MethodWorld:
    devices = EmulatedDevices(learner=_learner(), local=local, wire=no_rounding)
    strategy, start = build(case, settings, k=k), vector_of(_model().module, SCHEMA).astype(np.float64)
    return MethodWorld(strategy, devices, strategy.begin(start, SCHEMA, devices.fleet, round_rng(seed, 0)), seed)


def _scores(t: Named, x: torch.Tensor, statistics: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    hidden = x @ t["0.weight"].T + t["0.bias"]
    normed = (hidden - statistics[0]) / torch.sqrt(statistics[1] + 1e-5)
    return torch.relu(normed * t["1.weight"] + t["1.bias"]) @ t["3.weight"].T + t["3.bias"]


def _named(model: Flat) -> Named:
    return {name: torch.tensor(np.array(value)) for name, value in SCHEMA.split(model).items()}


def normed_fit(start: Flat, data: Dataset, task: Fit, *, mu: float = 0.0) -> Flat:
    """SGD with momentum in training mode; a batch of one sample is at its own mean and moves no running statistic."""
    t, rng = _named(start), np.random.Generator(np.random.PCG64(task.seed))
    names = [name for name in t if "running" not in name]
    begun, velocity = {n: t[n].clone() for n in names}, {n: torch.zeros_like(t[n]) for n in names}
    orders = itertools.chain.from_iterable(
        [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        for order in (rng.permutation(len(data)) for _ in itertools.count())
    )
    for rows in itertools.islice(orders, STEPS):
        x, y = torch.tensor(data.x[rows]), torch.tensor(data.y[rows])
        for n in names:
            t[n] = t[n].detach().requires_grad_()
        hidden = x @ t["0.weight"].T + t["0.bias"]
        center, spread = hidden.mean(dim=0), hidden.var(dim=0, correction=0)
        loss = nn.functional.cross_entropy(_scores(t, x, (center, spread)), y)
        gradients = torch.autograd.grad(loss, [t[n] for n in names])
        for n, g in zip(names, gradients, strict=True):
            velocity[n] = MOMENTUM * velocity[n] + g + mu * (t[n].detach() - begun[n])
            t[n] = t[n].detach() - RATE * velocity[n]
        if len(rows) > 1:
            for name, value in ("running_mean", center), ("running_var", hidden.var(dim=0, correction=1)):
                t[f"1.{name}"] = 0.9 * t[f"1.{name}"] + 0.1 * value.detach()
    return SCHEMA.join({name: value.detach().numpy() for name, value in t.items()})


def normed_losses(model: Flat, data: Dataset, statistics: Flat) -> F64:
    """[n] in inference mode, with the running statistics of the second model."""
    t, kept = _named(model), _named(statistics)
    scores = _scores(t, torch.tensor(data.x), (kept["1.running_mean"], kept["1.running_var"]))
    return np.asarray(nn.functional.cross_entropy(scores, torch.tensor(data.y), reduction="none").numpy())


def of_samples(model: Flat, data: Dataset, batch: int) -> Flat:
    """The model with the mean statistics of whole batches of these samples; of one sample, with its own."""
    t = _named(model)
    hidden = torch.tensor(data.x) @ t["0.weight"].T + t["0.bias"]
    parts = [hidden[at : at + batch] for at in range(0, len(hidden), batch)]
    parts = [part for part in parts if len(part) == batch] or parts[:1]
    if len(parts[0]) > 1:
        t["1.running_mean"] = torch.stack([part.mean(dim=0) for part in parts]).mean(dim=0)
        t["1.running_var"] = torch.stack([part.var(dim=0, correction=1) for part in parts]).mean(dim=0)
    return SCHEMA.join({name: value.numpy() for name, value in t.items()})


def fold(fits: dict[ClientId, Flat], a: list[float], n: list[float]) -> Flat:
    """Parameters by the method's weights, running statistics by samples."""
    rows = [*fits.values()]
    return np.concatenate([mean([row[:P] for row in rows], a), mean([row[P:] for row in rows], n)])
