"""The fleets of `python -m tests.figures.nearest`: who trains, who is held out, and devices of unseen distributions.

Some devices of every setting never see the run. Unseen distributions are devices of those held out with their images
or features turned, inverted or shuffled, with labels permuted, or (rotations) the turn that no training device has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import nn

from coordinator.models.registry import ModelEntry
from coordinator.rounds.round import EvaluationPlan
from coordinator.strategies.wecfl import WeCFL
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import Array, ClientId, Flat
from emulator.data import partition_schemes, registry
from emulator.data.fleet_split import FleetData
from emulator.run.execute import run_simulation
from emulator.run.load import open_devices
from emulator.run.settings import RunSettings
from emulator.simulation.emulated_devices import EmulatedDevices

BATCH = 32
HELD_OUT = 4  # every fourth device of a group


def wisdm_mlp() -> ModelEntry:
    """43 features of a phone's movements to six activities; 3,206 parameters."""
    return ModelEntry(
        make=lambda: nn.Sequential(nn.Linear(43, 64), nn.ReLU(), nn.Linear(64, 6)), input=(43,), classes=6
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One fleet and how it is trained."""

    data_set: str
    model: str
    partition: str
    devices: int
    groups: int = 1  # of the partition
    judged_by_group: bool = field(default=False, repr=False)  # else the device's own best center is the right one
    unseen_group: int = -1
    rounds: int = 20
    method: WeCFL = field(default_factory=WeCFL)


def _wecfl(clusters: int, representation: str, lr: float) -> WeCFL:
    return WeCFL(
        clusters=clusters,
        representation=representation,
        local_steps=10,
        batch_size=BATCH,
        learning_rate=lr,
        momentum=0.9,
    )


SETTINGS = {
    "rotated digits": Setting(
        data_set="mnist",
        model="mnist-mlp",
        partition="rotations:groups=4",
        devices=80,
        groups=4,
        unseen_group=3,
        judged_by_group=True,
        rounds=15,
        method=_wecfl(3, "all", 0.05),
    ),
    "Fashion-MNIST (0.1, 10)": Setting(
        data_set="fashion-mnist",
        model="wecfl-cnn",
        partition="cluster-dirichlet:groups=10,alpha-group=0.1,alpha=10",
        devices=80,
        groups=10,
        judged_by_group=True,
        method=_wecfl(10, "classifier", 0.001),
    ),
    "Fashion-MNIST (3, 2)": Setting(
        data_set="fashion-mnist",
        model="wecfl-cnn",
        partition="cluster-n-class:groups=10,classes-group=3,classes=2",
        devices=80,
        groups=10,
        method=_wecfl(10, "classifier", 0.001),
    ),
    "MNIST by writer": Setting(
        data_set="mnist-writers",
        model="wecfl-cnn",
        partition="by-user:least=60",
        devices=80,
        method=_wecfl(3, "all", 0.01),
        rounds=15,
    ),
    "WISDM by user": Setting(
        data_set="wisdm",
        model="tests.figures.nearest_fleets:wisdm_mlp",
        partition="by-user",
        devices=36,
        method=_wecfl(3, "all", 0.02),
        rounds=30,
    ),
}


@dataclass(frozen=True, kw_only=True)
class FinishedFleet:
    """A run that has ended: its centers [K, size], the common start, who trained, and who never did."""

    setting: Setting
    start: Flat
    centers: Array
    assignment: Mapping[ClientId, int]
    trained: Mapping[ClientId, DeviceData]
    held_out: Mapping[ClientId, DeviceData]
    unseen: Mapping[str, Mapping[ClientId, DeviceData]]  # kind -> devices of another distribution
    truth: Mapping[ClientId, int]  # the center of a held-out device's true group, where there is one
    devices: EmulatedDevices


@contextmanager
def fleet(name: str, *, seed: int, data: Path | None, keep: Path | None) -> Iterator[FinishedFleet]:
    """Train the setting `name`, or read its centers from `keep` when an earlier call left them there."""
    setting = SETTINGS[name]
    cut = partition_schemes.parse_scheme(setting.partition).split(
        registry.load_data_set(setting.data_set, data, seed=seed), devices=setting.devices, seed=seed
    )
    trained, held_out, unseen = _three(setting, cut)
    split = replace(cut, devices={c: cut.devices[c] for c in trained})
    with open_devices(setting.model, split, seed=seed, batch=BATCH, engine="lean") as (devices, start):
        centers, assignment = _run(name, split, devices, start, seed=seed, keep=keep)
        groups = cut.groups if setting.groups > 1 else {}
        yield FinishedFleet(
            setting=setting,
            start=start,
            centers=centers,
            assignment=assignment,
            trained=split.devices,
            held_out={c: cut.devices[c] for c in held_out},
            unseen=_unseen({c: cut.devices[c] for c in held_out}, {c: cut.devices[c] for c in unseen}, seed),
            truth={c: _home(groups[c], groups, assignment) for c in held_out if c in groups},
            devices=devices,
        )


def _three(setting: Setting, cut: FleetData) -> tuple[list[ClientId], list[ClientId], list[ClientId]]:
    """Who trains, who is held out, and whose group no device trains."""
    out: tuple[list[ClientId], list[ClientId], list[ClientId]] = ([], [], [])
    for i, c in enumerate(sorted(cut.devices)):
        last = i // setting.groups % HELD_OUT == HELD_OUT - 1
        unseen = i % setting.groups == setting.unseen_group
        if not unseen or last:
            out[2 if unseen else int(last)].append(c)
    return out


def _run(
    name: str, split: FleetData, devices: EmulatedDevices, start: Flat, *, seed: int, keep: Path | None
) -> tuple[Array, Mapping[ClientId, int]]:
    setting = SETTINGS[name]
    mark = hashlib.sha256(repr((setting, seed, sorted(split.devices))).encode()).hexdigest()[:16]
    kept = None if keep is None else keep / f"{mark}.npz"
    if kept is not None and kept.is_file():
        with np.load(kept) as old:
            return old["centers"], dict(zip(old["devices"].tolist(), old["assignment"].tolist(), strict=True))
    result = run_simulation(
        setting.method,
        start,
        devices,
        RunSettings(rounds=setting.rounds, seed=seed, batch=BATCH, evaluation=EvaluationPlan(every=setting.rounds)),
    )
    assignment = dict(result.state.assignment)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        names = sorted(assignment)
        np.savez(kept, centers=result.state.centers, devices=names, assignment=[assignment[c] for c in names])
    return result.state.centers, assignment


def _home(group: int, groups: Mapping[ClientId, int], assignment: Mapping[ClientId, int]) -> int:
    """The center that most training devices of the group are assigned to."""
    return int(np.bincount([k for c, k in assignment.items() if groups[c] == group]).argmax())


def _unseen(
    held_out: Mapping[ClientId, DeviceData], others: Mapping[ClientId, DeviceData], seed: int
) -> dict[str, dict[ClientId, DeviceData]]:
    """Other inputs (a turn that no device has, or scrambled) and other labels (permuted by one derangement)."""
    classes = 1 + max(int(local.train.y.max()) for local in held_out.values())
    rng = np.random.default_rng(1_000 + seed)
    shift = np.roll(np.arange(classes), 1)
    order = rng.permutation(classes)
    rename = np.empty(classes, np.int64)
    rename[order] = order[shift]
    inputs = others or {c: _mapped(local, x=_turned_over) for c, local in held_out.items()}
    return {
        "inputs": dict(inputs),
        "labels": {c: _mapped(local, y=lambda y: rename[y]) for c, local in held_out.items()},
    }


def _turned_over(x: Array) -> Array:
    """Images by a quarter of a circle; the features of anything else in reverse order."""
    return np.ascontiguousarray(np.rot90(x, 1, axes=(2, 3)) if x.ndim == 4 else x[:, ::-1])


def _mapped(local: DeviceData, x=lambda x: x, y=lambda y: y) -> DeviceData:  # type: ignore[no-untyped-def]  # noqa: ANN001
    def of(data: Dataset | None) -> Dataset | None:
        return None if data is None else Dataset(x(data.x), y(data.y))

    train = of(local.train)
    return DeviceData(train=train or local.train, test=of(local.test))
