"""`python -m tests.figures.nearest_strangers --data DIR`: which devices get the answer that a center fits?

The figures are in docs/results-nearest.md.

Small fleets train WeCFL with two centers on digits and on WISDM's activities. Devices that never trained then ask for
their center with `SAMPLES` samples, with and without labels: held-out devices of the fleet's groups, and the same
devices with their inputs or labels spoilt. Three guides are compared: that of an emulated run (a bundle), that of a
coordinator with `teach-newcomers` (taught), and that of a coordinator without. A JSON object a line for each fleet,
seed and kind; `--table FILE` prints their table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from coordinator.nearest.learn_from_replies import learn_from_replies, limits_from_tests, look_of_a_device
from coordinator.rounds.round import EvaluationPlan
from coordinator.strategies.wecfl import WeCFL
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.nearest.choose_center import choose_center
from edge_client.protocol.nearest.center_tree import CenterTree
from edge_client.protocol.nearest.router import Router
from edge_client.protocol.nearest.selection_rule import guessing_loss
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, Flat, Probe
from edge_client.training.fit_probe import run_probe
from edge_client.training.learner import Learner
from emulator.data import registry
from emulator.data.fleet_split import FleetData, label_permutation_groups
from emulator.router_training import FinishedTraining, fit_router
from emulator.run.execute import run_simulation
from emulator.run.load import open_devices
from emulator.run.settings import RunSettings

FLEETS = (5, 10, 20, 50)
SAMPLES = 20
HELD_OUT = 12  # devices that never train
CENTERS, BATCH, ROUNDS, TEST_SHARE = 2, 32, 20, 0.2
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}  # of Student's distribution
KINDS = ("known", "noise", "reversed", "permuted", "labels")
WITHOUT_LABELS = KINDS[:-1]  # permuted labels cannot be seen without them
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StrangersCase:
    """A data set, its model, the method's learning rate, and which halves of its users take part."""

    data_set: str
    model: str
    learning_rate: float
    first: int = 0  # the first user that takes part, by number
    every: int = 1  # and each so many later one


CASES = {
    "digits": StrangersCase(data_set="digits", model="digits-mlp", learning_rate=0.05),
    "WISDM": StrangersCase(
        data_set="wisdm", model="tests.figures.nearest_fleets:wisdm_mlp", learning_rate=0.02, first=1, every=2
    ),
    "WISDM, all users": StrangersCase(
        data_set="wisdm", model="tests.figures.nearest_fleets:wisdm_mlp", learning_rate=0.02
    ),
}
DEVELOPMENT = {  # what the features, the shrinkage and the levels were chosen on
    "MNIST by writer": StrangersCase(data_set="mnist-writers", model="mnist-mlp", learning_rate=0.05),
    "WISDM, other half": StrangersCase(
        data_set="wisdm", model="tests.figures.nearest_fleets:wisdm_mlp", learning_rate=0.02, first=0, every=2
    ),
}


@dataclass(frozen=True, kw_only=True)
class InProcessSource:
    """The centers of a run in this process: a `CenterSource`."""

    vectors: Sequence[Flat]
    router: Router | None
    evaluator: Learner
    abstain: float
    tree: CenterTree | None = None
    begin: Flat | None = None

    @property
    def program(self) -> Program:
        """The run's."""
        return self.evaluator.program

    @property
    def centers(self) -> int:
        """How many."""
        return len(self.vectors)

    def learner(self, *, training: bool) -> Learner:
        """The run's."""
        return self.evaluator

    def models(self, centers: Sequence[int]) -> list[Flat]:
        """Their weights."""
        return [self.vectors[k] for k in centers]

    def start(self) -> Flat | None:
        """Where a local round begins."""
        return self.begin

    def split(self, number: int) -> Flat:
        """There is no tree."""
        raise NotImplementedError(number)


def cut(case: StrangersCase, devices: int, *, seed: int, data: Path | None) -> tuple[FleetData, list[DeviceData]]:
    """The fleet, and the devices that never train."""
    found = registry.load_data_set(case.data_set, data)
    if found.train.user is None:
        fleet = label_permutation_groups(found, devices=devices, new=HELD_OUT, groups=CENTERS, seed=seed)
        return fleet, list(fleet.new_devices.values())
    rng = np.random.default_rng(seed)
    users, counts = np.unique(found.train.user, return_counts=True)
    users = rng.permutation(users[counts >= 2 * SAMPLES][case.first :: case.every])
    spans = 1 if len(users) >= devices + HELD_OUT // 2 else 2  # too few users: each is two devices
    trained, others = users[: -(-devices // spans)], users[-(-devices // spans) :][:HELD_OUT]

    def device(rows: Array) -> DeviceData:
        rows = rng.permutation(rows)
        x, y = found.ready(found.train.x[rows]), found.train.y[rows]
        test = max(1, int(TEST_SHARE * len(rows)))
        return DeviceData(train=Dataset(x[test:], y[test:]), test=Dataset(x[:test], y[:test]))

    def rows(user: int) -> Array:
        mine: Array = np.flatnonzero(found.train.user == user)
        return mine

    parts = [part for user in trained for part in np.array_split(rows(user), spans)][:devices]
    template = label_permutation_groups(registry.load_data_set("digits"), devices=2, groups=1, seed=0)
    fleet = replace(template, devices={f"device-{i:02d}": device(part) for i, part in enumerate(parts)}, groups={})
    return fleet, [device(rows(user)) for user in others]


def spoilt(kind: str, data: Dataset, rng: np.random.Generator) -> Dataset:
    """A device's samples as this kind has them.

    "reversed": the first axis of a sample that is longer than one, an activity's only axis or an image's rows, runs
    backwards. "permuted": the last axis, time or an image's columns, in one random order. "noise": normal numbers of
    the samples' mean and variance, with random labels. "labels": only the labels, in random order.
    """
    x, y = data.x, data.y
    if kind == "noise":
        x = rng.normal(x.mean(), x.std(), size=x.shape).astype(x.dtype)
        y = rng.integers(y.max() + 1, size=len(y))
    elif kind == "reversed":
        x = np.ascontiguousarray(np.flip(x, axis=next(a for a in range(1, x.ndim) if x.shape[a] > 1)))
    elif kind == "permuted":
        x = np.ascontiguousarray(x[..., rng.permutation(x.shape[-1])])
    elif kind == "labels":
        y = rng.permutation(y)
    return Dataset(x, y)


@contextmanager
def finished(
    case: StrangersCase, devices: int, *, seed: int, data: Path | None
) -> Iterator[tuple[FinishedTraining, list[DeviceData]]]:
    """A fleet that has trained, and the devices that never did."""
    fleet, held_out = cut(case, devices, seed=seed, data=data)
    method = WeCFL(
        clusters=CENTERS,
        representation="all",
        local_steps=10,
        batch_size=BATCH,
        learning_rate=case.learning_rate,
        momentum=0.9,
    )
    with open_devices(case.model, fleet, seed=seed, batch=BATCH, engine="lean") as (opened, start):
        settings = RunSettings(rounds=ROUNDS, seed=seed, batch=BATCH, evaluation=EvaluationPlan(every=ROUNDS))
        state = run_simulation(method, start, opened, settings).state
        ended = FinishedTraining(
            learner=opened.learner,
            method=method,
            start=start,
            centers=list(state.centers),
            assignment=state.assignment,
            devices=fleet.devices,
        )
        yield ended, held_out


def rows_of(name: str, case: StrangersCase, devices: int, *, seed: int, data: Path | None) -> Iterator[Row]:
    """The rows of one fleet."""
    with finished(case, devices, seed=seed, data=data) as (ended, held_out):
        learner, centers = ended.learner, list(ended.centers)
        look = look_of_a_device(learner.program.loss, learner.program.classes)
        asked = Probe(models=centers, want=look, split="test", batch=BATCH, seed=0)
        replies = {c: run_probe(learner, asked, local) for c, local in ended.devices.items()}
        guides = {
            "bundle": fit_router(ended, seed=seed, by_round=False),
            "taught": learn_from_replies(replies, ended.assignment, centers=len(centers), round=None),
            "coordinator": limits_from_tests(
                {c: float(np.asarray(reply.losses)[ended.assignment[c]]) for c, reply in replies.items()},
                samples=int(np.median([reply.n for reply in replies.values()])),
                centers=len(centers),
            ),
        }
        for guide, router in guides.items():
            source = InProcessSource(
                vectors=centers, router=router, evaluator=learner, abstain=guessing_loss(learner.program)
            )
            for labels in (True, False):
                for kind in KINDS if labels else WITHOUT_LABELS:
                    rng = np.random.default_rng([seed, devices, KINDS.index(kind)])
                    answers = []
                    for local in held_out:
                        few = rng.permutation(len(local.train))[:SAMPLES]
                        known = Dataset(local.train.x[few], local.train.y[few])
                        answers.append(choose_center(source, spoilt(kind, known, rng), labels=labels))
                    facts = {"set": name, "devices": devices, "seed": seed, "guide": guide, "labels": labels}
                    yield facts | {
                        "kind": kind,
                        "none": float(np.mean([answer.center is None for answer in answers])),
                        "well": float(np.mean([answer.fit == "well" for answer in answers])),
                        "guesses": float(
                            np.mean([a.distances.get("loss", {}).get(a.best, 0.0) > source.abstain for a in answers])
                        ),
                        "asked": len(answers),
                    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: % answered none, with a 95 % interval over seeds; for known devices also % "fits well"."""
    found: dict[tuple[Any, ...], dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["set"], row["devices"], row["guide"], row["labels"]][row["kind"]].append(row)
    head = ["fleet", "devices", "guide", "labels", "known", "worse than guessing", "known: well", *KINDS[1:], "seeds"]
    lines = ["| " + " | ".join(head) + " |", "| --- | ---: | --- | --- |" + " ---: |" * (len(head) - 4)]
    for (name, devices, guide, labels), kinds in found.items():
        cells = [
            _percent(kinds["known"], "none"),
            _percent(kinds["known"], "guesses") if labels else "",
            _percent(kinds["known"], "well"),
            *(_percent(kinds[kind], "none") if kinds[kind] else "" for kind in KINDS[1:]),
        ]
        facts = [name, str(devices), guide, "yes" if labels else "no", *cells, str(len(kinds["known"]))]
        lines.append("| " + " | ".join(facts) + " |")
    return "\n".join(lines)


def _percent(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    values = 100 * np.array([row[name] for row in rows])
    if len(values) < 2 or np.ptp(values) == 0:  # of equal values the deviation can be 1e-14
        return f"{values.mean():.0f}"
    return f"{values.mean():.0f} ± {T_975[len(values) - 1] * values.std(ddof=1) / np.sqrt(len(values)):.0f}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder of data sets; else FEDCENTERS_DATA")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fleets", type=int, nargs="+", default=FLEETS)
    parser.add_argument("--development", action="store_true", help="the sets that the rule was chosen on")
    parser.add_argument("--table", type=Path, help="a file of lines: print their table and train nothing")
    asked = parser.parse_args()
    if asked.table is not None:
        lines = asked.table.read_text(encoding="utf-8").splitlines()
        sys.stdout.write(table([json.loads(line) for line in lines]) + "\n")
        return
    torch.set_num_threads(1)
    for name, case in (DEVELOPMENT if asked.development else CASES).items():
        for devices in asked.fleets:
            if (devices > FLEETS[1]) != (name == "WISDM, all users") and case.data_set == "wisdm":
                continue  # half of the users are too few for a larger fleet
            for seed in range(asked.first, asked.first + asked.seeds):
                began = process_time()
                for row in rows_of(name, case, devices, seed=seed, data=asked.data):
                    sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
                sys.stderr.write(f"{name}, {devices} devices, seed {seed}: {process_time() - began:.0f} CPU s\n")


if __name__ == "__main__":
    main()
