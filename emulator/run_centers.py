"""The centers of a finished run of this process, as the source of a choice: for `Result.nearest` and for bundles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from coordinator.strategies.base import State, Strategy
from coordinator.strategies.common.center_tree import SplitTree
from coordinator.strategies.common.local_sgd import LocalSgd
from edge_client.data.dataset import DeviceData
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import Router
from edge_client.protocol.nearest.selection_rule import guessing_loss
from edge_client.protocol.program import Program
from edge_client.protocol.task import ClientId, Flat
from edge_client.training.learner import Learner
from emulator.data.fleet_split import FleetData
from emulator.router_training import FinishedTraining, fit_router

if TYPE_CHECKING:
    from coordinator.models.registry import Model


@dataclass(frozen=True, kw_only=True)
class RunCenters:
    """See `CenterSource`: the centers of a run. Its devices teach the rule when it is first asked for.

    `get_model` gives the run's model, `first` is the common first model [schema.size]. `taught` is the router that the
    devices of a loaded run taught, whose samples are not here.
    """

    method: Strategy
    state: State
    first: Flat
    split: FleetData
    seed: int
    get_model: Callable[[], Model]
    taught: Router | None = None

    @property
    def devices(self) -> Mapping[ClientId, DeviceData]:
        return self.split.devices

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
        if self.taught is not None:
            return self.taught
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
