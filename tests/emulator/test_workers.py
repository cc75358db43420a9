"""Devices in several processes answer as in one, to the last bit, with everything that they keep between tasks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from coordinator.models.registry import build
from coordinator.strategies.base import Exchange
from coordinator.strategies.registry import make
from edge_client.errors import FedcentersError
from edge_client.protocol.task import OWN, Fit, Flat, OwnModel, Probe, Reply, Task
from emulator import datasets
from emulator.engines.runtime import Runtime
from emulator.partitions import Split
from emulator.schemes import parse
from emulator.simulation import run
from emulator.virtual import Devices
from emulator.workers import Crew, crew
from export.program import compile_program, vector_of


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One compiled program and a small fleet."""

    split: Split
    recipe: Runtime
    start: Flat
    folder: Path

    def alone(self) -> Devices:
        return Devices(learner=self.recipe.open(), local=self.split.devices)

    def crew(self, workers: int) -> AbstractContextManager[Crew]:
        return crew(self.recipe, self.split.devices, workers=workers, folder=self.folder)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    folder = tmp_path_factory.mktemp("workers")
    model = build("digits-mlp", seed=0)
    compiled = compile_program(model.module, name=model.name, input=model.input, batch=8, engines=("onnx",))
    for sha256, blob in compiled.files.items():
        (folder / sha256).write_bytes(blob)
    files = {name: folder / c.sha256 for name, c in compiled.program.containers["onnx"].items()}
    return Stage(
        split=parse("iid").split(datasets.load("digits"), devices=5, seed=0),
        recipe=Runtime(engine="onnx", program=compiled.program, files=files),
        start=vector_of(model.module, compiled.program.schema),
        folder=folder,
    )


@pytest.fixture(scope="module")
def pair(stage: Stage) -> Iterator[tuple[Devices, Crew]]:
    with stage.crew(2) as many:
        yield stage.alone(), many


def asked(devices: Devices, task: Task) -> Exchange:
    return dict.fromkeys(devices.fleet, task)


def contents(answer: Reply | str) -> object:
    return vars(answer) if isinstance(answer, Reply) else answer


def test_fits_probes_own_models_and_posteriors_are_the_same_bits(stage: Stage, pair: tuple[Devices, Crew]) -> None:
    (alone, many), w = pair, stage.start
    tasks: list[Task] = [
        Fit(start=w, steps=3, lr=0.1, batch=8, seed=1, momentum=0.9),
        Fit(start=OWN, anchor=w, mu=0.1, steps=2, lr=0.1, batch=8, seed=2),
        Probe(models=[w, -w], want=frozenset({"loss", "votes", "posterior"}), batch=8, seed=0),
        Fit(start=w, steps=2, lr=0.1, batch=8, seed=3, rows="posterior:1", slot="second"),
        Probe(models=[OwnModel(slot="second")], want=frozenset({"confusion"}), batch=8, seed=0, split="test"),
        Fit(start=OWN, steps=1, lr=0.1, batch=8, seed=2, slot="empty"),  # refused: nothing to resume
    ]
    for task in tasks:
        one, other = alone.answers(asked(alone, task)), many.answers(asked(many, task))
        assert list(one) == list(other)
        for c in one:
            np.testing.assert_equal(contents(one[c]), contents(other[c]))
            assert [v.size for v in alone.fetched(c, task)] == [v.size for v in many.fetched(c, task)]


def test_what_a_probe_left_is_forgotten_in_every_worker_when_a_round_opens(
    stage: Stage, pair: tuple[Devices, Crew]
) -> None:
    many, w = pair[1], stage.start
    fit = Fit(start=w, steps=1, lr=0.1, batch=8, seed=3, rows="posterior:0")
    many.answers(asked(many, Probe(models=[w, -w], want=frozenset({"posterior"}), batch=8, seed=0)))
    assert all(isinstance(answer, Reply) for answer in many.answers(asked(many, fit)).values())
    many.open_round()
    assert all(isinstance(answer, str) for answer in many.answers(asked(many, fit)).values())


def test_a_whole_run_has_the_same_centers_and_records(stage: Stage, pair: tuple[Devices, Crew]) -> None:
    strategy = make("fesem", **{"clusters": 2, "local-steps": 3, "batch-size": 8})
    one, other = (run(strategy, stage.start, devices, {}, rounds=2, seed=0, batch=8) for devices in pair)
    np.testing.assert_array_equal(one.state.centers, other.state.centers)
    assert one.records == other.records


def test_a_worker_that_dies_ends_the_run_with_a_word_and_leaves_no_process(stage: Stage) -> None:
    before = workers()
    fit = Fit(start=stage.start, steps=1, lr=0.1, batch=8, seed=1)
    with stage.crew(2) as many:
        os.kill(min(workers() - before), signal.SIGKILL)
        with pytest.raises(FedcentersError, match="a worker process ended"):
            many.answers(asked(many, fit))
    assert workers() == before


def workers() -> set[int]:
    return {p.pid for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())}
