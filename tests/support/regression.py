"""FedSoft's synthetic problem (Ruan 2022, section 5): linear regression on devices that mix S distributions.

y = <x, theta_s> + noise, x ~ N(0, I), noise ~ N(0, 1), and a tensor theta [FEATURES] as the model, in float64. A model
w has a mean squared error of 1 + ||w - theta_s||^2 on distribution s, so 1 is the noise floor and nothing is sampled to
judge it. The engine is closed-form numpy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.rounds.round import round_rng
from coordinator.strategies.base import State, Strategy, drive
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.engines.base import Rule
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId, Flat, Schema, Tensors, TensorSpec
from edge_client.training.learner import EngineLearner
from emulator.simulation.emulated_devices import EmulatedDevices, no_rounding
from tests.support.softmax_program import SoftmaxUpdate

FEATURES = 10
GAP = 165.0  # ||theta_1 - theta_2||^2 of the paper's draw, which its Table 1 gives away
SCHEMA = Schema((TensorSpec(name="theta", role="p", shape=(1, FEATURES)),), ("theta",))
PROGRAM = Program(
    model="linear",
    loss="squared-error",
    optimizer="sgd",
    schema=SCHEMA,
    input=(FEATURES,),
    target=(1,),
    dtype="float64",
    functions={},
    containers={},
    batch={"numpy": "any"},
    opset=18,
    versions={},
)


class LinearEngine:
    name = "numpy"
    place = "cpu"
    fixed_batch: int | None = None

    def update(self, feeds: Tensors, rule: Rule | None = None) -> SoftmaxUpdate:
        return SoftmaxUpdate(self.step, feeds, rule)

    def step(self, feeds: Tensors) -> dict[str, Array]:
        w, error = feeds["w/theta"], self._error(feeds)
        gradient = 2 * (feeds["q"] * error) @ feeds["x"]
        pull = feeds["mu"] * (w - feeds["anchor/theta"])
        velocity = feeds["momentum"] * feeds["velocity/theta"] + gradient + feeds["linear/theta"] + pull
        return {"loss": feeds["q"] @ error**2, "velocity/theta": velocity, "w/theta": w - feeds["lr"] * velocity}

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        return {"loss": self._error(feeds) ** 2, "logits": feeds["x"] @ feeds["w/theta"].T}

    def _error(self, feeds: Tensors) -> Array:
        error: Array = (feeds["x"] @ feeds["w/theta"].T - feeds["y"])[:, 0]
        return error


@dataclass(frozen=True)
class RegressionWorld:
    """The true models [S, FEATURES], the devices, and the common model [FEATURES] that a run begins with."""

    truth: Array
    devices: EmulatedDevices
    start: Flat

    def errors(self, models: Array) -> Array:
        """[M, FEATURES] models -> [M, S] mean squared errors on fresh data of each distribution."""
        out: Array = 1 + ((models[:, None] - self.truth[None]) ** 2).sum(axis=2)
        return out

    def own_and_other(self, models: Array) -> tuple[float, float]:
        """The mean over distributions of the best model's error, and of the worst model's."""
        errors = self.errors(models)
        return float(errors.min(axis=0).mean()), float(errors.max(axis=0).mean())


def shares(partition: str, devices: int, rng: np.random.Generator, *, s: int = 2) -> Array:
    """[devices, S] which part of a device's samples comes from which distribution, as the paper deals them."""
    k = np.arange(devices)
    if partition == "random":  # S - 1 cuts of the unit interval
        cuts = np.sort(rng.random((devices, s - 1)), axis=1)
        return np.diff(cuts, prepend=0.0, append=1.0, axis=1)
    first = {
        "10:90": np.where(k < devices // 2, 0.1, 0.9),
        "30:70": np.where(k < devices // 2, 0.3, 0.7),
        "linear": (k + 0.5) / devices,
    }[partition]
    return np.stack([first, 1 - first], axis=1)


def world(partition: str, devices: int, *, seed: int, s: int = 2) -> RegressionWorld:
    """Devices with 100 to 200 samples each; two truths are GAP apart."""
    rng = np.random.default_rng(seed)
    truth = np.sqrt(10) * rng.standard_normal((s, FEATURES))
    if s == 2:
        truth *= np.sqrt(GAP / ((truth[0] - truth[1]) ** 2).sum())
    local = {}
    for k, share in enumerate(shares(partition, devices, rng, s=s)):
        n = int(rng.integers(100, 201))
        source = np.repeat(np.arange(s), np.diff(np.round(np.cumsum([0.0, *share]) * n).astype(int)))
        x = rng.standard_normal((n, FEATURES))
        y = (x * truth[source]).sum(axis=1) + rng.standard_normal(n)
        local[f"d{k:03d}"] = DeviceData(train=Dataset(x, y[:, None]))
    start = np.sqrt(2 / (FEATURES + 1)) * rng.standard_normal(FEATURES)  # Xavier
    return RegressionWorld(
        truth, EmulatedDevices(learner=EngineLearner(LinearEngine(), PROGRAM), local=local, wire=no_rounding), start
    )


def play(
    strategy: Strategy, on: RegressionWorld, *, rounds: int, seed: int = 0, silent: Collection[ClientId] = ()
) -> Sequence[State]:
    """The state before the first round and after each; devices in `silent` never answer."""
    fleet = on.devices.fleet
    states = [strategy.begin(on.start, SCHEMA, fleet, round_rng(seed, 0))]
    for number in range(1, rounds + 1):
        exchanges = strategy.round(states[-1], SCHEMA, fleet, round_rng(seed, number))
        states.append(
            drive(exchanges, lambda ask: {c: on.devices.answer(c, t) for c, t in ask.items() if c not in silent})
        )
    return states
