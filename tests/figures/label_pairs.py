"""`python -m tests.figures.label_pairs`: why WeCFL on devices with pairs of labels is below the paper.

The figures are in docs/results-trials.md. 10,000 training samples of Fashion-MNIST stand for its test part, so that
nothing is chosen on it. Each variant trains 60 devices in ten groups, about two CPU minutes; `ways` are how its
centers are tested afterwards. `turns` say how each center's last move lies to the one before: the cosine is near 1
where it creeps, and near -1 where it goes to and fro. `labels` are those that a device holds: with the published
code's quirks (emulator/data/wecfl_compat.py) a draw may lose some. `pairs` counts the different pairs of them,
`shirts` those with class 6, which three others are mistaken for. Of one training of Ditto, `center` tests the common
model with `label-prior = device`, `personal` the devices' own, `both` their mixture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from coordinator.models.registry import build_model
from coordinator.strategies.base import Fleet, Round, State, Strategy
from coordinator.strategies.baselines.ditto import Ditto
from coordinator.strategies.baselines.nonfed import NonFed
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.wecfl import WeCFL
from edge_client.data.dataset import Dataset
from edge_client.protocol.task import Array, ClientId, Schema
from edge_client.training.label_prior import LABEL_PRIOR_SAMPLES
from emulator.data import partition_schemes, registry
from emulator.data.fleet_split import FleetData
from emulator.data.loaders.samples import RawSamples
from emulator.run.execute import SimulationResult, run_simulation
from emulator.run.load import open_devices
from emulator.run.settings import RunSettings
from export.compiler.program import load_vector

PARTITION = "cluster-n-class:groups=10,classes-group=3,classes=2"
SERVED = {"center": 1.0, "personal": 0.0, "both": 0.5}  # the common model's weight
VARIANTS = (  # published with one cluster: FedAvg; alone: NonFed; quirks: published, cut as the public code cuts
    *SERVED,
    "published",
    "alone",
    "faster",
    "all",
    "delta",
    "groups",
    "pairs",
    "quirks",
)
BATCH, HELD_OUT, CLASSES, SHIRT = 32, 10_000, 10, 6
PULL = 30.0  # of Ditto's personal models: alone it takes them most of the way to the center in ten steps
FASTER = 0.0024  # what momentum of 0.9 amounts to in ten steps when it survives rounds


@dataclass(frozen=True, kw_only=True)
class RecordingWeCFL(WeCFL):
    """WeCFL, and the centers [K, size] with which each round began."""

    began: list[Array] = field(default_factory=list, metadata={"setting": False})

    def round(self, state: State, schema: Schema, fleet: Fleet, rng: np.random.Generator) -> Round:
        """WeCFL's own."""
        self.began.append(state.centers)
        return (yield from super().round(state, schema, fleet, rng))

    def turns(self, result: SimulationResult) -> list[float]:
        """The cosine of each center's last two moves, of its parameters alone."""
        last, before = (
            (now - then)[:, : result.schema.n_params].astype(np.float64)
            for now, then in ((result.state.centers, self.began[-1]), (self.began[-1], self.began[-2]))
        )
        lengths = np.linalg.norm(last, axis=1) * np.linalg.norm(before, axis=1)
        cosines: list[float] = ((last * before).sum(axis=1) / lengths).round(2).tolist()
        return cosines


def fleet(data: Path | None, *, devices: int, seed: int, quirks: bool = False) -> FleetData:
    """The devices, without a look at the test part; with `quirks` as the published code cuts them."""
    whole = registry.load_data_set("fashion-mnist", data, seed=seed)
    order = np.random.default_rng(123 + seed).permutation(len(whole.train.y))
    train, held_out = (
        RawSamples(x=whole.train.x[rows], y=whole.train.y[rows]) for rows in (order[:-HELD_OUT], order[-HELD_OUT:])
    )
    scheme = partition_schemes.parse_scheme(f"{PARTITION},paper-quirks={int(quirks)}")
    return scheme.split(replace(whole, train=train, test=held_out), devices=devices, seed=seed)


def pairs_of(split: FleetData) -> dict[ClientId, tuple[int, ...]]:
    """The labels that each device holds."""
    return {who: tuple(np.unique(local.train.y).tolist()) for who, local in split.devices.items()}


def given_clusters(variant: str, split: FleetData) -> Mapping[ClientId, int] | None:
    """Each device's cluster where the variant gives it away; None where k-means finds it."""
    if variant == "groups":
        return split.groups
    pairs = pairs_of(split)
    names = sorted(set(pairs.values()))
    return {who: names.index(pair) for who, pair in pairs.items()} if variant == "pairs" else None


def method(variant: str, given: Mapping[ClientId, int] | None, *, clusters: int = 10, momentum: float = 0) -> Strategy:
    """WeCFL as the paper sets it, but for the variant and the server's momentum."""
    sgd = LocalSgd(
        local_steps=10,
        batch_size=BATCH,
        learning_rate=0.001,
        momentum=0.9,
        server=ServerOptions(server_momentum=momentum),
    )
    if variant == "alone":
        return NonFed(**vars(sgd))
    if variant in SERVED:  # one training, tested in three ways
        return Ditto(**vars(replace(sgd, label_prior="device")), lam=PULL, common_weight=SERVED[variant])
    strategy = RecordingWeCFL(
        **vars(sgd),
        clusters=clusters if given is None else max(given.values()) + 1,
        representation=variant if variant in {"all", "delta"} else "classifier",
    )
    if variant == "faster":
        strategy = replace(strategy, learning_rate=FASTER)
    if given is not None:

        def told(_state, updates, *_rest):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
            return np.array([given[who] for who in updates.clients]), np.ones(len(updates.clients), dtype=bool)

        object.__setattr__(strategy, "_e_step", told)
    return strategy


def ways(model: nn.Module, local: tuple[Dataset, Dataset], seen: Tensor) -> list[float]:
    """Accuracy with running statistics, the training samples', shuffled test batches', and sorted ones'.

    Last, with running statistics and with the training samples', corrected from the labels that the center has `seen`
    [CLASSES] to those of the device, as `label-prior = device` does.
    """
    (x, y), (inputs, labels) = (tuple(map(torch.from_numpy, (part.x, part.y))) for part in reversed(local))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    shift = torch.log((_counts(labels) + LABEL_PRIOR_SAMPLES) / (seen + LABEL_PRIOR_SAMPLES))
    whole = [torch.arange(len(y))]
    found, last = [_right(model.eval(), x, y, whole)], [_right(model.eval(), x, y, whole, shift)]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.train()(inputs[:512])
    found.append(_right(model.eval(), x, y, whole))
    last.append(_right(model.eval(), x, y, whole, shift))
    for order in (shuffled, torch.argsort(y, stable=True)):
        model.load_state_dict(kept)
        found.append(_right(model.train(), x, y, [b for b in torch.split(order, BATCH) if len(b) > 1]))
    return found + last


def _counts(labels: Tensor) -> Tensor:
    return torch.bincount(labels, minlength=CLASSES)


def _right(model: nn.Module, x: Tensor, y: Tensor, batches: list[Tensor], shift: Tensor | float = 0.0) -> float:
    hits = sum(int(((model(x[b]) + shift).argmax(1) == y[b]).sum()) for b in batches)
    return hits / sum(map(len, batches))


def _accuracies(result: SimulationResult) -> list[float]:
    """The accuracy over all samples, round by round."""
    return [share for record in result.records if (share := record["accuracy"]["micro"]) is not None]


@torch.no_grad()
def tested(result: SimulationResult, split: FleetData) -> list[float]:
    """Percent of all held-out samples in each of the `ways`."""
    model = build_model("wecfl-cnn", seed=0).module
    rows, n, assignment = [], [], result.state.assignment
    seen = torch.zeros(len(result.state.centers), CLASSES)
    for who, local in split.devices.items():
        seen[assignment[who]] += _counts(torch.from_numpy(local.train.y))
    for who, local in split.devices.items():
        if local.test is not None:
            load_vector(model, result.schema, result.state.centers[assignment[who]])
            rows.append(ways(model, (local.train, local.test), seen[assignment[who]]))
            n.append(len(local.test))
    percent: list[float] = (100 * np.average(rows, axis=0, weights=n)).round(2).tolist()
    return percent


def main() -> None:
    """One JSON object a line for each variant and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder of data sets; else FEDCENTERS_DATA")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--devices", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument(
        "--momentum", type=float, default=0.0, help="of the server; what 0.8 does: docs/results-trials.md"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for variant in asked.variants:
        for seed in asked.seeds:
            split = fleet(asked.data, devices=asked.devices, seed=seed, quirks=variant == "quirks")
            given = given_clusters(variant, split)
            strategy = method(variant, given, clusters=asked.clusters, momentum=asked.momentum)
            with open_devices("wecfl-cnn", split, seed=seed, batch=BATCH, engine="lean") as (devices, start):
                settings = RunSettings(rounds=asked.rounds, seed=seed, batch=BATCH)
                result = run_simulation(strategy, start, devices, settings)
            told = {name: getattr(asked, name) for name in ("clusters", "momentum", "rounds")}
            pairs = set(pairs_of(split).values())
            found = {"variant": variant, "seed": seed, **told, "labels": len(set[int]().union(*pairs))}
            found |= {"pairs": len(pairs), "shirts": sum(SHIRT in pair for pair in pairs)}
            found |= {"ari": result.scores(split.groups)["ari"]}
            found |= {"curve": [round(100 * share, 1) for share in _accuracies(result)]}
            if isinstance(strategy, RecordingWeCFL):
                found |= {"turns": strategy.turns(result), "percent": tested(result, split)}
            else:  # a device's own models, as it is served them
                found["percent"] = [100 * _accuracies(result)[-1]]
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
