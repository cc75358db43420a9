"""Every registered method on the tests' small problem: settings that suit it, and rounds played one after another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.robust import TRIMMED_REDUCERS
from coordinator.models.members import SumLayout
from coordinator.rounds.metrics import RoundReport
from coordinator.rounds.round import round_rng, run_round
from coordinator.strategies.base import Exchange, Fleet, Replies, State, Strategy, drive, learned
from coordinator.strategies.registry import METHODS, Setting, make_method, method_settings
from edge_client.data.dataset import DeviceData
from edge_client.protocol.task import ClientId, Flat, OwnModel, Schema
from emulator.simulation.emulated_devices import EmulatedDevices
from tests.support.softmax_program import devices_of, start_of

SMALL: dict[str, Setting] = {"local-steps": 3, "batch-size": 8, "first-steps": 10, "level-rounds": 1}
FULL: Setting = 1_000  # a batch of all samples: then seeds, which follow names and exchanges, decide nothing
COUNTS = ("clusters", "components", "runs")  # what methods call the number of their models

VARIANTS = (  # settings under which a method takes other ways
    "cam start=loss least-members=2",
    "cfl warm-up=0",
    "clove start=groups",
    "fedsoft select=2",
    "fedcenters trial-rounds=2",
    "feddane optimiser=adam learning-rate=0.05",
    "fesem e-step=k-means",
    "fesem optimiser=adamw weight-decay=0.1 learning-rate=0.05",
    "fesem start=loss least-members=2",
    "flhc warm-up=0",
    "ifca start=k-means",
    "ifca start=loss least-members=2",
    "ifca start=redraw",
    "pfedme optimiser=adam learning-rate=0.05",
    "wecfl server-momentum=0.5",
)
CASES = (*sorted(METHODS), *VARIANTS)


def build(case: str, more: Mapping[str, Setting] | None = None, *, k: int = 2) -> Strategy:
    """A case of CASES with `k` models where that is a setting, few local steps, and whatever of `more` it knows."""
    name, *words = case.split()
    own = dict(word.split("=") for word in words)
    known = method_settings(make_method(name))
    asked = {**SMALL, **dict.fromkeys(COUNTS, k), **own, **(more or {})}
    return make_method(name, **{key: value for key, value in asked.items() if key in known})


def reduced_by(reduce: str, trim: float) -> dict[str, Setting]:
    """The settings of this reduce, with `trim` where it leaves out a share of the updates."""
    return {"reduce": reduce, **({"trim-updates": trim} if reduce in TRIMMED_REDUCERS else {})}


def members_of(strategy: Strategy) -> int:
    """How many models the method adds."""
    return int(getattr(strategy, "members", 1))


@dataclass
class MethodWorld:
    """A method and its devices, which keep their own models and posteriors from round to round."""

    strategy: Strategy
    devices: EmulatedDevices
    state: State
    seed: int = 0
    number: int = 0
    exchanges: list[Exchange] = field(default_factory=list)  # of the last round, that of evaluation included

    def round(
        self,
        *,
        silent: Collection[ClientId] = (),
        silent_in: Mapping[int, Collection[ClientId]] = MappingProxyType({}),
        fleet: Fleet | None = None,
        last: bool = True,
    ) -> RoundReport:
        """One more round and its evaluation, as the last one of its run or not.

        Devices in `silent` answer neither, those of `silent_in` not the exchange of that number, from 0 on.
        """
        self.number, self.exchanges = self.number + 1, []
        self.devices.open_round()

        def ask(exchange: Exchange) -> Replies:
            quiet = {*silent, *silent_in.get(len(self.exchanges), ())}
            self.exchanges.append(exchange)
            return learned(
                exchange, {c: self.devices.answer(c, task) for c, task in exchange.items() if c not in quiet}
            )

        rng, present = round_rng(self.seed, self.number), self.fleet if fleet is None else fleet
        of = self.number + (not last)
        made = run_round(self.strategy, self.state, self.schema, present, rng, batch=64, round=self.number, of=of)
        self.state, report = drive(made, ask)
        return report

    @property
    def fleet(self) -> Fleet:
        return self.devices.fleet

    @property
    def schema(self) -> Schema:
        return self.devices.program.schema

    @property
    def members(self) -> int:
        return members_of(self.strategy)

    @property
    def own_places(self) -> NDArray[np.bool_]:
        """[size] which numbers of a center are its own: of a sum those of its last member."""
        alone = np.ones(self.schema.size, dtype=np.bool_)
        return SumLayout(self.schema, self.members).places[-1] if self.members > 1 else alone

    def served(self, who: ClientId | None) -> list[tuple[float, Flat]]:
        """The mixture that serves `who`, with the models that the device keeps itself put in."""
        return [(weight, self._model(model, who)) for weight, model in self.strategy.predictor(self.state, who)]

    def _model(self, model: Flat | OwnModel, who: ClientId | None) -> Flat:
        if not isinstance(model, OwnModel):
            return model
        found = None if who is None else self.devices.own.get((who, model.slot), model.init)
        assert found is not None, f"{who} is to be served a model that does not exist"
        return found


def world(strategy: Strategy, local: Mapping[ClientId, DeviceData], *, seed: int = 0, rounds: int = 0) -> MethodWorld:
    """A fleet at its start, then `rounds` rounds."""
    members = members_of(strategy)
    devices = devices_of(local, members=members)
    state = strategy.begin(start_of(members=members), devices.program.schema, devices.fleet, round_rng(seed, 0))
    made = MethodWorld(strategy, devices, state, seed)
    for _ in range(rounds):
        made.round()
    return made


def copied(state: State) -> State:
    return State(
        centers=state.centers.copy(),
        assignment=dict(state.assignment),
        extra={name: value.copy() for name, value in state.extra.items()},
    )


def same(a: State, b: State) -> bool:
    return (
        np.array_equal(a.centers, b.centers)
        and a.centers.dtype == b.centers.dtype
        and dict(a.assignment) == dict(b.assignment)
        and a.extra.keys() == b.extra.keys()
        and all(np.array_equal(a.extra[name], b.extra[name], equal_nan=True) for name in a.extra)
    )
