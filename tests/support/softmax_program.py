"""A training program in twenty lines of numpy: softmax regression in float64, for tests that need exact arithmetic.

The model is a weight [classes, features] and a bias [classes]; with `buffered` also a running mean [features] that each
training step moves and that evaluation subtracts, so that buffers have an effect. A sum of several `members` has as
many weights and biases, and the switches of coordinator/models/sums.py. Feeds are checked, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from coordinator.rounds.round import round_rng
from coordinator.strategies.base import State, Strategy, drive
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.engines.base import Rule
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId, Flat, Schema, Tensors, TensorSpec
from edge_client.training.learner import EngineLearner
from emulator.simulation.emulated_devices import EmulatedDevices, no_rounding

FEATURES, CLASSES = 5, 4
FLOAT64 = np.dtype(np.float64)


def schema(*, buffered: bool = False, members: int = 1) -> Schema:
    prefixes = [f"members.{m}." for m in range(members)] if members > 1 else [""]
    shapes = {"head.weight": (CLASSES, FEATURES), "head.bias": (CLASSES,)}
    tensors = [TensorSpec(name=p + name, role="p", shape=shape) for p in prefixes for name, shape in shapes.items()]
    if buffered:
        tensors.append(TensorSpec(name="mean", role="b", shape=(FEATURES,)))
    if members > 1:
        tensors.append(TensorSpec(name="trained", role="b", shape=(members,)))
    return Schema(tuple(tensors), tuple(prefixes[-1] + name for name in shapes))


def program(*, buffered: bool = False, members: int = 1) -> Program:
    return Program(
        model="softmax",
        loss="cross-entropy",
        optimizer="sgd",
        schema=schema(buffered=buffered, members=members),
        input=(FEATURES,),
        target=(CLASSES,),
        dtype="float64",
        functions={},
        containers={},
        batch={"numpy": "any"},
        opset=18,
        versions={},
    )


@dataclass
class SoftmaxEngine:
    name: str = "numpy"
    place: str = "cpu"
    fixed_batch: int | None = None

    def update(self, feeds: Tensors, rule: Rule | None = None) -> SoftmaxUpdate:
        return SoftmaxUpdate(self.step, feeds, rule)

    def step(self, feeds: Tensors) -> dict[str, Array]:
        self._check(feeds)
        x, prefixes = _centered(feeds), _members(tuple(feeds))
        loss, error, _ = _forward(feeds, x, prefixes)
        error *= feeds["q"][:, None]
        switches = feeds["buffers/trained"] if "buffers/trained" in feeds else [1.0] * len(prefixes)
        gradient = {}
        for prefix, on in zip(prefixes, switches, strict=True):
            gradient[f"{prefix}head.weight"] = on * (error.T @ x)
            gradient[f"{prefix}head.bias"] = on * error.sum(axis=0)
        out: dict[str, Array] = {"loss": feeds["q"] @ loss}
        if "buffers/trained" in feeds:
            out["buffers/trained"] = feeds["buffers/trained"]
        for name, own in gradient.items():
            pull = feeds["mu"] * (feeds[f"w/{name}"] - feeds[f"anchor/{name}"])
            velocity = feeds["momentum"] * feeds[f"velocity/{name}"] + own + feeds[f"linear/{name}"] + pull
            out[f"velocity/{name}"] = velocity
            out[f"w/{name}"] = feeds[f"w/{name}"] - feeds["lr"] * velocity
        if "buffers/mean" in feeds:
            out["buffers/mean"] = 0.9 * feeds["buffers/mean"] + 0.1 * feeds["x"].mean(axis=0)
        return out

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        self._check(feeds)
        loss, _, logits = _forward(feeds, _centered(feeds), _members(tuple(feeds)))
        return {"loss": loss, "logits": logits}

    def _check(self, feeds: Tensors) -> None:
        assert {value.dtype for value in feeds.values()} == {FLOAT64}
        assert self.fixed_batch in (None, len(feeds["x"]))


def _centered(feeds: Tensors) -> Array:
    return feeds["x"] - feeds["buffers/mean"] if "buffers/mean" in feeds else feeds["x"]


def _forward(feeds: Tensors, x: Array, prefixes: list[str]) -> tuple[Array, Array, Array]:
    """-> the loss of each sample, its gradient by the logits, and the logits."""
    first, *others = [x @ feeds[f"w/{p}head.weight"].T + feeds[f"w/{p}head.bias"] for p in prefixes]
    logits: Array = sum(others, first)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return -(feeds["y"] * log_p).sum(axis=1), np.exp(log_p) - feeds["y"], logits


@cache
def _members(names: tuple[str, ...]) -> list[str]:
    """What stands before the names of each member's weights; nothing, where the model is no sum."""
    return [name[2 : -len("head.weight")] for name in names if name.startswith("w/") and name.endswith("head.weight")]


class SoftmaxUpdate:
    """Carries what a step gives into the next step's feeds."""

    def __init__(self, step: Callable[[Tensors], dict[str, Array]], feeds: Tensors, rule: Rule | None = None) -> None:
        self._step, self._feeds, self._moved, self._rule = step, dict(feeds), dict[str, Array](), rule

    def step(self, feeds: Tensors) -> float:
        result = self._step({**self._feeds, **feeds})
        loss = float(result.pop("loss"))
        if self._rule is not None:
            names = [name.removeprefix("w/") for name in result if name.startswith("w/")]
            w, g = (np.concatenate([result[f"{role}/{name}"].ravel() for name in names]) for role in ("w", "velocity"))
            self._rule(w, g)
            ends = np.cumsum([result[f"w/{name}"].size for name in names])[:-1]
            parts = zip(names, np.split(w, ends), strict=True)
            result |= {f"w/{name}": part.reshape(result[f"w/{name}"].shape) for name, part in parts}
        self._feeds |= result
        self._moved |= result
        return loss

    def read(self) -> dict[str, Array]:
        return {name: value.copy() for name, value in self._moved.items()}


def samples(rng: np.random.Generator, n: int, *, written: Array | None = None) -> Dataset:
    """Points near one corner per class; `written` [CLASSES] renames the classes, as one group of a fleet does."""
    y = rng.integers(CLASSES, size=n)
    x = 3.0 * np.eye(CLASSES, FEATURES)[y] + 0.5 * rng.standard_normal((n, FEATURES))
    return Dataset(x, y if written is None else np.asarray(written)[y])


def grouped_fleet(devices: int, groups: int, *, seed: int = 0, n: int = 40) -> dict[str, DeviceData]:
    """Device i of group i mod `groups`; group g writes class y as y + g. Sizes differ from device to device."""
    rng = np.random.default_rng(seed)
    written = [(np.arange(CLASSES) + g) % CLASSES for g in range(groups)]
    return {
        f"d{i:02d}": DeviceData(
            train=samples(rng, n + i, written=written[i % groups]), test=samples(rng, 20, written=written[i % groups])
        )
        for i in range(devices)
    }


def devices_of(local: Mapping[ClientId, DeviceData], *, buffered: bool = False, members: int = 1) -> EmulatedDevices:
    """Devices whose updates arrive unrounded, in float64."""
    return EmulatedDevices(
        learner=EngineLearner(SoftmaxEngine(), program(buffered=buffered, members=members)),
        local=local,
        wire=no_rounding,
    )


def start_of(seed: int = 0, *, buffered: bool = False, members: int = 1) -> Flat:
    """The first model; a sum begins as its first member."""
    one = 0.1 * np.random.default_rng(seed).standard_normal(schema(buffered=buffered).size)
    return one if members == 1 else np.concatenate([one, np.zeros((members - 1) * len(one)), np.ones(members)])


def folded(model: Flat, members: int) -> Flat:
    """The one softmax regression that a sum of them is."""
    summed: Flat = model[:-members].reshape(members, -1).sum(axis=0) if members > 1 else model
    return summed


def play(
    strategy: Strategy,
    local: Mapping[ClientId, DeviceData],
    *,
    rounds: int = 3,
    seed: int = 0,
    silent: Collection[ClientId] = (),
    buffered: bool = False,
) -> State:
    """Run rounds of a strategy with direct calls; devices in `silent` never answer."""
    devices = devices_of(local, buffered=buffered)
    state = strategy.begin(start_of(buffered=buffered), devices.program.schema, devices.fleet, round_rng(seed, 0))
    for number in range(1, rounds + 1):
        state = drive(
            strategy.round(state, devices.program.schema, devices.fleet, round_rng(seed, number)),
            lambda exchange: {c: devices.answer(c, t) for c, t in exchange.items() if c not in silent},
        )
    return state
