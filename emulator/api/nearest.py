"""The nearest center for a device that never trained, from a result in this process, and predictions by centers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.strategies.base import State, Strategy
from coordinator.strategies.common.center_tree import SplitTree
from coordinator.strategies.common.local_sgd import LocalSgd
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import UsageError
from edge_client.nearest.choose_center import Selection, choose_center
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import Router
from edge_client.protocol.nearest.selection_rule import guessing_loss
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, ClientId, Flat, OwnModel
from edge_client.training.learner import Learner, log_softmax
from emulator.router_training import FinishedTraining, fit_router

if TYPE_CHECKING:
    from coordinator.models.registry import Model


@dataclass(frozen=True, kw_only=True)
class RunCenters:
    """See `CenterSource`: the centers of a run. Its devices teach the rule when it is first asked for.

    `get_model` gives the run's model, `first` is the common first model [schema.size].
    """

    method: Strategy
    state: State
    first: Flat
    devices: Mapping[ClientId, DeviceData]
    seed: int
    get_model: Callable[[], Model]

    @cached_property
    def opened(self) -> Learner:
        from emulator.engines.cpu.cpu_engine import cpu_recipe

        return cpu_recipe(self.get_model()).open()

    @property
    def program(self) -> Program:
        return self.opened.program

    @property
    def centers(self) -> int:
        return len(self.state.centers)

    @cached_property
    def router(self) -> Router | None:
        state, devices = self.state, self.devices
        assignment = state.assignment or (dict.fromkeys(devices, 0) if self.centers == 1 else {})
        if not assignment or not isinstance(self.method, LocalSgd) or any(d.test is None for d in devices.values()):
            return None
        run = FinishedTraining(
            learner=self.opened,
            method=self.method,
            start=self.first,
            centers=list(state.centers),
            assignment=assignment,
            devices=devices,
        )
        return fit_router(run, seed=self.seed)

    @property
    def abstain(self) -> float:
        return guessing_loss(self.program)

    @cached_property
    def split_tree(self) -> SplitTree:
        return SplitTree.from_state(self.state)

    @property
    def tree(self) -> CenterTree | None:
        tree = self.split_tree
        return CenterTree(tuple((int(a), int(b)) for a, b in tree.edges), self.centers) if len(tree.models) else None

    def learner(self, *, training: bool) -> Learner:  # noqa: ARG002 - this one does both
        return self.opened

    def models(self, centers: Sequence[int]) -> list[Flat]:
        return [self.state.centers[k] for k in centers]

    def start(self) -> Flat | None:
        return self.first

    def split(self, number: int) -> Flat:
        model: Flat = self.split_tree.models[number]
        return model


def choose(source: RunCenters, x: Any, y: Any = None) -> Selection:  # noqa: ANN401 - arrays of any kind
    """The nearest center for samples `x` [n, ...], with labels `y` [n] or without. Raises UsageError for no samples."""
    data = Dataset(_samples(x, source.program), np.zeros(len(x), np.int64) if y is None else np.asarray(y))
    return choose_center(source, data, labels=y is not None)


def predict_samples(source: RunCenters, x: Any, *, device: ClientId | None, center: int | None) -> Array:  # noqa: ANN401
    """Classes [n], or targets [n, ...], for samples `x` [n, ...]. Raises UsageError for an unknown device or center."""
    if device is not None and center is not None:
        raise UsageError("predict by a device and by a center", hint="give one of them")
    served = _served(source, device) if device is not None else [(1.0, _center(source, x, center))]
    samples = _samples(x, source.program)
    data = Dataset(samples, np.zeros((len(samples), *_target(source.program)), np.int64))
    outputs = source.opened.evaluate([model for _, model in served], data, batch=len(data))[1]
    if len(served) > 1:
        outputs = np.tensordot([w for w, _ in served], np.exp(log_softmax(outputs)), axes=1)[None]
    found: Array = outputs[0].argmax(axis=-1) if source.program.loss == "cross-entropy" else outputs[0]
    return found


def _target(program: Program) -> tuple[int, ...]:
    """Shape of y of one sample."""
    return () if program.loss == "cross-entropy" else program.target


def _center(source: RunCenters, x: Array, center: int | None) -> Flat:
    chosen = choose(source, x).best if center is None else center
    if not 0 <= chosen < source.centers:
        raise UsageError(f"there is no center {chosen}", hint=f"there are {source.centers}, from 0 on")
    return source.models([chosen])[0]


def _served(source: RunCenters, device: ClientId) -> list[tuple[float, Flat]]:
    if device not in source.devices:
        raise UsageError(f"no device {device!r}", hint=f"the run has {', '.join(sorted(source.devices)[:3])} ...")
    served = source.method.predictor(source.state, device)
    if any(isinstance(model, OwnModel) for _, model in served):
        raise UsageError(f"{device} keeps its model, which no result has", hint="predict by a center: center=0")
    return [(weight, model) for weight, model in served if not isinstance(model, OwnModel)]


def _samples(x: Any, program: Program) -> Array:  # noqa: ANN401
    samples = np.ascontiguousarray(np.asarray(x), dtype=np.float32)
    if samples.shape[1:] != program.input or not len(samples):
        raise UsageError(f"samples of shape {samples.shape}", hint=f"give [n, {', '.join(map(str, program.input))}]")
    if not np.isfinite(samples).all():
        raise UsageError("samples that are not finite", hint="replace NaN and infinity")
    return samples
