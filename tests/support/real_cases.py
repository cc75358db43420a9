"""Random combinations for runs over a broker: fleets of a few kinds with tiny models, and what happens meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

import fedcenters as fc
from edge_client.protocol.task import Array
from tests.support.drawn_cases import DrawnCase, draw

DEVICES, FEATURES, CLASSES, WORDS, LENGTH = 5, 5, 4, 9, 6
REAL_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    # of the simulation, too
    "codec": ("f16", "i8"),
    "evaluate_every": (2, 3),
    "fraction_evaluate": (0.5, 0.34),
    "concurrency": (1, 3),
    "buffer": (1, 2),
    "max_staleness": (0, 1),
    "seed": (1, 7),
    "engine": ("litert", "pt2"),
    # of the coordinator; those but `over_select` change no number
    "over_select": (1.5,),
    "credits": (1, 2),
    "task_window": (1, 2),
    "keep_rounds": (2, 10),
    "in_flight_mib": (1,),
    "fraction_connected": (1.0,),
    "teach_newcomers": (True,),
    "formats": (["onnx"],),
    "program_batch": (4, 16),
    # of the world
    "fleet": ("normed", "tokens", "regression", "parts", "frozen", "uneven"),
    "event": ("restart", "early restart", "away", "replaced", "late"),
}
ALWAYS_REFUSED = ("reduce", "trim-updates")  # with `secure`
OFTEN = 0.6
LEAST = 5  # members of a sum over a broker


class Reader(nn.Module):
    """Classes of rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, 6), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.embedding(x.long()).mean(1))
        return out


class TwoInputs(nn.Module):
    """Classes of two arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, CLASSES), nn.Linear(3, CLASSES)

    def forward(self, wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(wide) + self.other(narrow)
        return out


def _perceptron(first: nn.Module, *middle: nn.Module) -> nn.Module:
    return nn.Sequential(first, *middle, nn.ReLU(), nn.Linear(6, CLASSES))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "normed": lambda: _perceptron(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6)),
    "frozen": lambda: _perceptron(nn.Linear(FEATURES, 6).requires_grad_(requires_grad=False)),
    "tokens": Reader,
    "parts": TwoInputs,
    "regression": lambda: nn.Linear(FEATURES, 1),
}


def model_of(kind: str) -> nn.Module:
    """The same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return MODELS.get(kind, lambda: nn.Linear(FEATURES, CLASSES))()


def fleet_of(kind: str) -> fc.Fleet:
    """Devices of two groups; in an uneven fleet one has many samples and one has a single one."""
    rng, data, test = np.random.default_rng(0), {}, {}
    for i in range(DEVICES):
        many = {0: 400, 1: 1}.get(i, 24) if kind == "uneven" else 24 + i
        data[f"d{i}"], test[f"d{i}"] = _samples(rng, kind, i % 2, many), _samples(rng, kind, i % 2, 12)
    return fc.fleet(data, test=test)


def _samples(rng: np.random.Generator, kind: str, group: int, n: int) -> tuple[Any, Array]:
    if kind == "tokens":
        x = rng.integers(0, WORDS, (n, LENGTH))
        return x, (x[:, 0] + group) % CLASSES
    if kind == "regression":
        x = rng.standard_normal((n, FEATURES)).astype(np.float32)
        return x, x[:, :1] * (1 - 2 * group)
    y = rng.integers(0, CLASSES, n)
    x = (3 * np.eye(CLASSES, FEATURES)[y] + 0.5 * rng.standard_normal((n, FEATURES))).astype(np.float32)
    narrow = rng.standard_normal((n, 3)).astype(np.float32)
    return {"wide": x, "narrow": narrow} if kind == "parts" else x, (y + group) % CLASSES


def draw_real(seed: int, most: int) -> DrawnCase:
    """A combination for a run over a broker, often with another fleet, an event and a bundle; the same for a seed."""
    case, rng = draw(seed, most, REAL_OPTIONS), random.Random(seed)  # noqa: S311 - repeatable on purpose
    settings = dict(case.settings)
    often = {key: rng.choice(REAL_OPTIONS[key]) for key in ("fleet", "event", "formats") if rng.random() < OFTEN}
    options = {**often, **case.options}
    if "secure" in settings:
        settings = {k: v for k, v in settings.items() if k not in ALWAYS_REFUSED} | {"least-members": LEAST}
    if "batch-norm" in settings:
        options["fleet"] = "normed"
    if options.get("engine") == "litert":
        options.pop("program_batch", None)  # its batch is fixed
    return replace(case, settings=settings, options=options)
