"""The centers of a finished run of this process, as the source of a choice: for `Result.nearest` and for bundles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.strategies.base import State, Strategy
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.center_tree import SplitTree
from coordinator.strategies.common.local_sgd import LocalSgd
from edge_client.data.dataset import DeviceData
from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import Router
from edge_client.protocol.nearest.selection_rule import guessing_loss
from edge_client.protocol.program import Program
from edge_client.protocol.task import ClientId, Flat, OwnModel
from edge_client.training.learner import Learner
from emulator.data.fleet_split import FleetData
from emulator.router_training import FinishedTraining, fit_router
from export.own_thread import outside_inference_mode

if TYPE_CHECKING:
    from coordinator.models.registry import Model


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunCenters:
    """See `CenterSource`: the centers of a run. Its devices teach the rule when it is first asked for.

    `get_model` gives the run's model, `first` is the common first model [schema.size]. `taught` is the router that the
    devices of a loaded run taught, whose samples are not here. `own` gives the model that a device keeps in a slot,
    None where it keeps none; it raises UsageError where the run did not keep them. `whole` is false where `state` has
    the centers alone.
    """

    method: Strategy
    state: State
    first: Flat
    data: FleetData
    seed: int
    get_model: Callable[[], Model]
    taught: Router | None = None
    own: Callable[[ClientId, str], Flat | None] = lambda _who, _slot: None
    whole: bool = True

    @property
    def devices(self) -> Mapping[ClientId, DeviceData]:
        return self.data.devices

    @cached_property
    def opened(self) -> Learner:
        from emulator.engines.cpu.cpu_engine import cpu_recipe

        return outside_inference_mode(lambda: cpu_recipe(self.get_model()).open())()

    @property
    def program(self) -> Program:
        return self.opened.program

    @property
    def centers(self) -> int:
        return len(self.state.centers)

    def check_trained(self) -> None:
        """Raise UsageError where devices keep their own models, and the centers are the untrained start."""
        start = self.first.astype(np.float32)
        if any(not np.array_equal(center.astype(np.float32), start) for center in self.state.centers):
            return
        served = self.method.predictor(self.state, next(iter(self.devices)))
        if any(isinstance(model, OwnModel) for _, model in served):
            told = f"{self.method!r} trains no center: each device keeps a model of its own"
            raise UsageError(told, hint="predict(x, device=...) is by a device's own; fc.FedAvg() trains a center")

    @property
    def _by_center(self) -> bool:
        """Whether the centers and the assignment alone say what model a device is served."""
        known = type(self.method).predictor in (LocalSgd.predictor, FedAvg.predictor)
        return known and isinstance(self.method, LocalSgd) and self.method.label_prior == "model"

    def measured(self, last: Mapping[str, Any]) -> bool:
        """Whether the accuracies of `last`, the record of a run's last round, are those of the centers too.

        A run that was stopped has not measured its centers, which may be others than what devices are served.
        """
        exported = self._by_center and isinstance(self.method, LocalSgd) and self.method.batch_norm == "average"
        return "centers" in last or last["round"] == last["of"] or exported

    def check_served(self) -> None:
        """Raise ConfigError where what a device is served depends on more than the centers, and there is no more."""
        if not self.whole and not self._by_center:
            told = f"this folder has not what {self.method!r} knew of its devices after the last round"
            raise ConfigError(told, hint="resume the run to its end; predict(x, center=...) is by a center alone")

    @cached_property
    def router(self) -> Router | None:
        if self.taught is not None:
            return self.taught
        try:
            self.check_trained()
        except UsageError:
            return None
        state, devices = self.state, self.devices
        assignment = state.assignment or (dict.fromkeys(devices, 0) if self.centers == 1 else {})
        if not assignment or not isinstance(self.method, LocalSgd) or any(d.test is None for d in devices.values()):
            return None
        log.info("the devices teach the rule that chooses centers for new ones")
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
