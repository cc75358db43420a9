"""The usual training loop, in float64: one client after the other, one batch after the other, torch's own optimisers.

What the fast engines must equal. The objective is spelled out as in `Fit` (edge_client/protocol/task.py), term by term.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from coordinator.models.registry import Model
from edge_client.data.dataset import Dataset, batches
from edge_client.protocol.program import Program
from edge_client.protocol.task import Fit, Flat
from edge_client.training.learner import Learner, TrainedModel, TrainingJob
from edge_client.training.noise import step_noise
from export.compiler.program import load_vector, schema_of, vector_of
from export.compiler.random_ops import NoiseReader

SAME = 1e-12  # relative: float64 sums of up to 10^5 terms, in another order, over a few steps


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What one client's job is made of."""

    n: int = 10
    steps: int = 3
    batch: int = 4
    seed: int = 0
    terms: frozenset[str] = frozenset()  # of anchor, linear, momentum, q
    settings: dict[str, Any] = field(default_factory=dict)


def start_of(model: Model) -> Flat:
    """[size] in float64."""
    return vector_of(model.module, schema_of(model.module)).astype(np.float64)


def job_of(model: Model, facts: JobFacts) -> TrainingJob:
    """A job with random samples and the terms of its facts."""
    rng = np.random.default_rng(facts.seed)
    x = rng.standard_normal((facts.n, *model.input))
    labels = rng.integers(model.classes, size=facts.n)
    y = rng.standard_normal((facts.n, model.classes)) if model.loss == "squared-error" else labels
    start = start_of(model)
    near = start + 0.1 * rng.standard_normal(len(start))
    extra: dict[str, Any] = {"lr": 0.05}
    extra |= {"anchor": near, "mu": 0.3} if "anchor" in facts.terms else {}
    extra |= {"linear": 0.05 * rng.standard_normal(len(start))} if "linear" in facts.terms else {}
    extra |= {"momentum": 0.9} if "momentum" in facts.terms else {}
    extra |= facts.settings
    task = Fit(start=start, steps=facts.steps, batch=facts.batch, seed=facts.seed, **extra)
    weights = rng.uniform(0.1, 1.0, facts.n) if "q" in facts.terms else np.ones(facts.n)
    order = list(batches(facts.n, facts.batch, facts.seed, facts.steps, fixed=False))
    return TrainingJob(task=task, start=start, data=Dataset(x, y), batches=order, weights=weights)


def loop(model: Model, program: Program, job: TrainingJob) -> TrainedModel:
    """One local update."""
    module = copy.deepcopy(model.module).double()
    load_vector(module, program.schema, job.start)
    module.train()
    named = dict(module.named_parameters())
    anchor = program.schema.split(np.zeros_like(job.start) if job.task.anchor is None else job.task.anchor)
    linear = program.schema.split(np.zeros_like(job.start) if job.task.linear is None else job.task.linear)
    optimizer, limit = torch_optimizer(module, job.task)
    losses = []
    for k, index in enumerate(job.batches):
        optimizer.zero_grad()
        drawn = step_noise(program, job.task.seed, k, len(index))
        loss = _data_loss(module, model, job, index, drawn.get("noise"))
        losses.append(float(loss.detach()))
        pulls = [
            (torch.from_numpy(linear[name]) * p).sum()
            + job.task.mu / 2 * ((p - torch.from_numpy(anchor[name])) ** 2).sum()
            for name, p in named.items()
        ]
        (loss + torch.stack(pulls).sum()).backward()  # type: ignore[no-untyped-call]
        if limit:
            torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
        optimizer.step()
    return TrainedModel(vector=vector_of(module, program.schema), losses=np.array(losses))


def torch_optimizer(module: nn.Module, task: Fit) -> tuple[torch.optim.Optimizer, float]:
    """torch's optimiser for a task, and the norm to which gradients are clipped before its step, 0 for none."""
    chosen, weights = task.optimiser, [p for p in module.parameters() if p.requires_grad]
    if chosen is None:
        return torch.optim.SGD(weights, lr=task.lr, momentum=task.momentum), 0.0
    if chosen.name == "sgd":
        how: dict[str, Any] = {"momentum": chosen.momentum, "nesterov": chosen.nesterov}
        return torch.optim.SGD(weights, lr=task.lr, weight_decay=chosen.weight_decay, **how), chosen.clip_norm
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[chosen.name]
    betas = (chosen.beta1, chosen.beta2)
    made = kind(weights, lr=task.lr, betas=betas, eps=chosen.eps, weight_decay=chosen.weight_decay)
    return made, chosen.clip_norm


def _data_loss(
    module: nn.Module, model: Model, job: TrainingJob, index: np.ndarray, drawn: np.ndarray | None
) -> Tensor:
    x, y = torch.from_numpy(job.data.x[index]), torch.from_numpy(job.data.y[index])
    if drawn is None:
        out = module(x)
    else:
        with NoiseReader(torch.from_numpy(drawn)):
            out = module(x)
    each = F.cross_entropy(out, y, reduction="none") if model.loss == "cross-entropy" else ((out - y) ** 2).mean(1)
    return (torch.from_numpy(job.weights[index]) * each).sum() / len(index)


def difference(job: TrainingJob, one: TrainedModel, other: TrainedModel) -> float:
    """Of two results, relative to the update's norm and to the largest loss."""
    update = np.linalg.norm(other.vector - job.start)
    assert one.losses.shape == other.losses.shape
    return max(
        float(np.linalg.norm(one.vector - other.vector) / update),
        float(np.abs(one.losses - other.losses).max() / np.abs(other.losses).max()),
    )


def check_same_as_loop(learner: Learner, model: Model, jobs: Sequence[TrainingJob], *, tolerance: float = SAME) -> None:
    """Every job's result, in the jobs' order."""
    results = list(learner.train(jobs))
    assert len(results) == len(jobs)
    for job, result in zip(jobs, results, strict=True):
        assert difference(job, result, loop(model, learner.program, job)) < tolerance
