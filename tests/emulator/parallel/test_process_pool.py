"""Devices in several processes answer as in one, to the last bit, with everything that they keep between tasks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.strategies.base import Exchange
from coordinator.strategies.registry import Setting, make_method
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import FedcentersError, UsageError
from edge_client.protocol.task import OWN_MODEL, Fit, Flat, OwnModel, Probe, Reply, Task
from emulator.data import registry
from emulator.data.fleet_split import FleetData
from emulator.data.partition_schemes import parse_scheme
from emulator.engines.base import Recipe
from emulator.engines.engine_spec import EngineSpec
from emulator.parallel.process_pool import WorkerPool, _without_main, balance, open_pool
from emulator.parallel.worker import run_worker
from emulator.run.execute import run_simulation
from emulator.run.settings import RunSettings
from emulator.simulation.emulated_devices import EmulatedDevices


@dataclass(frozen=True, kw_only=True)
class WorkerStage:
    """One compiled program and a small fleet."""

    split: FleetData
    spec: EngineSpec
    recipe: Recipe
    start: Flat
    folder: Path

    def alone(self) -> EmulatedDevices:
        return EmulatedDevices(learner=self.recipe.open(), local=self.split.devices)

    @contextmanager
    def crew(self, workers: int) -> Iterator[WorkerPool]:
        with open_pool(self.spec, self.split.devices, workers=workers) as (pool, _):
            yield pool


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> WorkerStage:
    folder = tmp_path_factory.mktemp("workers")
    spec = EngineSpec(model="digits-mlp", seed=0, engine="onnx", batch=8, folder=folder)
    made = spec.resolve()
    return WorkerStage(
        split=parse_scheme("iid").split(registry.load_data_set("digits"), devices=5, seed=0),
        spec=spec,
        recipe=made.recipe,
        start=made.initial_model(made.recipe.open().program),
        folder=folder,
    )


@pytest.fixture(scope="module")
def pair(stage: WorkerStage) -> Iterator[tuple[EmulatedDevices, WorkerPool]]:
    with stage.crew(2) as many:
        yield stage.alone(), many


def asked(devices: EmulatedDevices, task: Task) -> Exchange:
    return dict.fromkeys(devices.fleet, task)


def contents(answer: Reply | str) -> object:
    return vars(answer) if isinstance(answer, Reply) else answer


def test_fits_probes_own_models_and_posteriors_are_the_same_bits(
    stage: WorkerStage, pair: tuple[EmulatedDevices, WorkerPool]
) -> None:
    (alone, many), w = pair, stage.start
    tasks: list[Task] = [
        Fit(start=w, steps=3, lr=0.1, batch=8, seed=1, momentum=0.9),
        Fit(start=OWN_MODEL, anchor=w, mu=0.1, steps=2, lr=0.1, batch=8, seed=2),
        Probe(models=[w, -w], want=frozenset({"loss", "votes", "posterior"}), batch=8, seed=0),
        Fit(start=w, steps=2, lr=0.1, batch=8, seed=3, rows="posterior:1", slot="second"),
        Probe(models=[OwnModel(slot="second")], want=frozenset({"confusion"}), batch=8, seed=0, split="test"),
        Fit(start=OWN_MODEL, steps=1, lr=0.1, batch=8, seed=2, slot="empty"),  # refused: nothing to resume
    ]
    for task in tasks:
        one, other = alone.answers(asked(alone, task)), many.answers(asked(many, task))
        assert list(one) == list(other)
        for c in one:
            np.testing.assert_equal(contents(one[c]), contents(other[c]))
            assert [v.size for v in alone.fetched(c, task)] == [v.size for v in many.fetched(c, task)]


def test_what_a_device_keeps_is_sent_when_it_is_wanted(
    stage: WorkerStage, pair: tuple[EmulatedDevices, WorkerPool]
) -> None:
    alone, many = pair
    fit = Fit(start=stage.start, steps=2, lr=0.1, batch=8, seed=1, slot="wanted")
    for devices in pair:
        devices.answers(asked(devices, fit))
    for who in alone.fleet:
        np.testing.assert_array_equal(many.own_model(who, "wanted"), alone.own_model(who, "wanted"), strict=True)
        assert many.own_model(who, "no such slot") is None


def test_models_that_a_disk_does_not_take_are_the_systems_error_and_the_workers_go_on(
    stage: WorkerStage, tmp_path: Path
) -> None:
    fit = Fit(start=stage.start, steps=1, lr=0.1, batch=8, seed=1)
    with stage.crew(2) as many:
        before = many.answers(asked(many, fit))
        many.keep(tmp_path)
        first = min(tmp_path.glob("own-*.npz"))
        first.unlink()
        first.mkdir()  # in the place of its file
        with pytest.raises(IsADirectoryError):
            many.keep(tmp_path)
        again = many.answers(asked(many, fit))
    assert list(again) == list(before)
    for who in before:
        np.testing.assert_equal(contents(again[who]), contents(before[who]))


def test_what_a_probe_left_is_forgotten_in_every_worker_when_a_round_opens(
    stage: WorkerStage, pair: tuple[EmulatedDevices, WorkerPool]
) -> None:
    many, w = pair[1], stage.start
    fit = Fit(start=w, steps=1, lr=0.1, batch=8, seed=3, rows="posterior:0")
    many.answers(asked(many, Probe(models=[w, -w], want=frozenset({"posterior"}), batch=8, seed=0)))
    assert all(isinstance(answer, Reply) for answer in many.answers(asked(many, fit)).values())
    many.open_round()
    assert all(isinstance(answer, str) for answer in many.answers(asked(many, fit)).values())


def test_a_whole_run_has_the_same_centers_and_records(
    stage: WorkerStage, pair: tuple[EmulatedDevices, WorkerPool]
) -> None:
    strategy = make_method("fesem", **{"clusters": 2, "local-steps": 3, "batch-size": 8})
    one, other = (
        run_simulation(strategy, stage.start, devices, RunSettings(rounds=2, seed=0, batch=8)) for devices in pair
    )
    np.testing.assert_array_equal(one.state.centers, other.state.centers)
    assert one.records == other.records


@pytest.mark.parametrize("method", ["fesem", "fedsoft", "fedem", "pfedme"])
def test_devices_that_are_summed_take_the_steps_and_the_time_that_they_take_in_one_process(
    stage: WorkerStage, method: str
) -> None:
    """A later stage of a sum costs what was trained before nothing, and this process tells the costs."""
    asked: dict[str, Setting] = {"secure": "updates", "least-members": 2, "local-steps": 3, "batch-size": 8}
    strategy = make_method(method, **asked, **({} if method == "pfedme" else {"clusters": 2}))
    plan = RunSettings(rounds=3, seed=0, batch=8)
    with stage.crew(2) as many:
        one, other = (run_simulation(strategy, stage.start, devices, plan) for devices in (stage.alone(), many))
    np.testing.assert_array_equal(one.state.centers, other.state.centers)
    assert one.records == other.records


def test_updates_are_rows_of_one_matrix_and_stay_when_the_next_come(
    pair: tuple[EmulatedDevices, WorkerPool], stage: WorkerStage
) -> None:
    many = pair[1]
    first, second = (
        many.answers(asked(many, Fit(start=stage.start, steps=1, lr=0.1, batch=8, seed=seed))) for seed in (1, 2)
    )
    rows = [answer.update for answer in first.values() if isinstance(answer, Reply) and answer.update is not None]
    assert len(rows) == len(many.fleet)
    address = [row.__array_interface__["data"][0] for row in rows]
    assert {b - a for a, b in pairwise(address)} == {stage.start.nbytes}
    kept = [row.copy() for row in rows]
    again = many.answers(asked(many, Fit(start=stage.start, steps=1, lr=0.1, batch=8, seed=1)))
    for row, copy, answer in zip(rows, kept, again.values(), strict=True):
        assert isinstance(answer, Reply)
        np.testing.assert_array_equal(row, copy)
        np.testing.assert_array_equal(row, answer.update)
    assert not any(np.array_equal(row, answer.update) for row, answer in zip(rows, second.values(), strict=True))  # type: ignore[union-attr, arg-type]


@given(st.lists(st.integers(1, 900), min_size=1, max_size=60), st.integers(1, 8))
def test_workers_hold_as_many_devices_and_about_as_many_samples(sizes: list[int], workers: int) -> None:
    data = Dataset(np.zeros((max(sizes), 1), np.float32), np.zeros(max(sizes), np.int64))
    local = {f"d{i:02}": DeviceData(train=Dataset(data.x[:n], data.y[:n]), test=None) for i, n in enumerate(sizes)}
    home = balance(local, workers)
    assert home.keys() == local.keys()
    shares = [[len(local[who].train) for who in home if home[who] == worker] for worker in range(workers)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert max(map(sum, shares)) - min(map(sum, shares)) <= max(sizes)


def test_a_run_in_workers_leaves_no_memory_file_or_process(stage: WorkerStage) -> None:
    before, held = workers(), len(shared_rows())
    with stage.crew(2) as many:
        answers = many.answers(asked(many, Fit(start=stage.start, steps=1, lr=0.1, batch=8, seed=1)))
    assert (workers(), len(shared_rows())) == (before, held + 1)
    del answers
    assert len(shared_rows()) == held
    assert not list(stage.folder.glob("worker-*"))


class Deadly(EngineSpec):
    """A spec that ends the process that reads it."""

    def __reduce__(self) -> tuple[Callable[[int], NoReturn], tuple[int]]:
        return os._exit, (3,)


def test_a_worker_that_dies_before_it_has_begun_is_told_of(stage: WorkerStage) -> None:
    with (
        pytest.raises(FedcentersError, match="a worker process ended"),
        open_pool(Deadly(**vars(stage.spec)), stage.split.devices, workers=2),
    ):
        pass


def test_a_worker_that_dies_before_its_first_task_is_told_of(stage: WorkerStage) -> None:
    with stage.crew(2) as many:
        many.workers[1].process.kill()
        many.workers[1].process.join()
        with pytest.raises(FedcentersError, match="a worker process ended"):
            many.answers(asked(many, Fit(start=stage.start, steps=1, lr=0.1, batch=8, seed=1)))
    for left in stage.folder.glob("worker-*"):
        left.unlink()


STOPPED = """
from emulator.data.partition_schemes import parse_scheme
from emulator.data import registry
from emulator.run.load import open_devices
from edge_client.protocol.task import Fit

if __name__ == "__main__":
    split = parse_scheme("iid").split(registry.load_data_set("digits"), devices=4, seed=0)
    with open_devices("digits-mlp", split, seed=0, batch=8, workers=2) as (devices, start):
        fit = Fit(start=start, steps=1, lr=0.1, batch=8, seed=1)
        devices.answers(dict.fromkeys(devices.fleet, fit))
        print("ready", flush=True)
        devices.answers(dict.fromkeys(devices.fleet, Fit(start=start, steps=100_000, lr=0.1, batch=8, seed=1)))
"""


def test_ctrl_c_ends_a_run_with_its_workers_and_leaves_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPPED, encoding="utf-8")
    short = tmp_path_factory.mktemp("t")  # sockets lie in it, and their paths may have 107 characters
    environment = {**os.environ, "TMPDIR": str(short), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # a terminal tells the whole group
        process.wait(60)
    gone, alive = psutil.wait_procs(family, 30)
    assert (len(gone) >= 2, alive) == (True, [])
    assert list(short.iterdir()) == []


SIMULATED = """
import sys
from pathlib import Path
from emulator.options import SimulateArgs
from emulator.simulate import simulate_json

if __name__ == "__main__":
    args = SimulateArgs(method="fedavg", devices=4, rounds=1, workers=2, out=Path(sys.argv[1]), model=sys.argv[2])
    simulate_json(args)
    print(*(name for name in ("torch", "onnx", "scipy") if name in sys.modules))
"""


def simulated(out: Path, model: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[3])}
    script = out / "script.py"
    script.write_text(SIMULATED, encoding="utf-8")
    command = [sys.executable, str(script), str(out), model]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_run_whose_devices_live_in_workers_loads_no_torch_nor_does_one_that_replaces_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Another one of the same settings takes the first one's place."""
    temporary = tmp_path_factory.mktemp("t")
    for _ in range(2):
        done = simulated(tmp_path, "digits-mlp", temporary)
        assert (done.returncode, "torch" in done.stdout.split()) == (0, False), done.stderr
    assert [path.name for path in tmp_path.glob("simulate-*")] == ["simulate-fedavg-0"]


def test_two_threads_that_start_workers_at_once_leave_the_users_script_where_it_is() -> None:
    main, inside, left = sys.modules["__main__"], threading.Event(), threading.Event()

    def start() -> None:
        with _without_main():
            inside.set()
            left.wait(60)

    other = threading.Thread(target=start)
    with _without_main():
        other.start()
        inside.wait(0.2)  # where both may be in it at once
    left.set()
    other.join()
    assert sys.modules["__main__"] is main


def test_what_the_first_worker_refuses_is_the_same_error_here(stage: WorkerStage) -> None:
    spec = EngineSpec(model="no-such-model", seed=0, engine="lean", batch=8, folder=stage.folder)
    with pytest.raises(UsageError, match="no-such-model"), open_pool(spec, stage.split.devices, workers=2):
        pass


def test_a_folder_too_deep_for_a_socket_is_told_of_before_anything_is_trained(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    done = simulated(tmp_path, "digits-mlp", deep)
    assert "ConfigError: no process for workers" in done.stderr
    assert "TMPDIR" in done.stderr


def test_a_model_that_is_asked_for_numbers_here_gives_the_workers(stage: WorkerStage) -> None:
    spec = EngineSpec(model="digits-mlp", seed=0, engine="lean", batch=8, folder=stage.folder)
    data = stage.split.devices[min(stage.split.devices)].train
    with open_pool(spec, stage.split.devices, workers=2) as (many, start):
        probe = Probe(models=[start], want=frozenset({"loss"}), batch=8, seed=0)
        answer = many.answers({min(many.fleet): probe})[min(many.fleet)]
        losses, _ = many.learner.evaluate([start], data, batch=8)
    assert isinstance(answer, Reply)
    assert answer.losses is not None
    np.testing.assert_allclose(losses.mean(axis=1), answer.losses, rtol=1e-12)  # two sums of the same numbers


def test_a_worker_that_dies_ends_the_run_with_a_word_and_leaves_no_process(stage: WorkerStage) -> None:
    before = workers()
    fit = Fit(start=stage.start, steps=1, lr=0.1, batch=8, seed=1)
    with stage.crew(2) as many:
        os.kill(min(workers() - before), signal.SIGKILL)
        with pytest.raises(FedcentersError, match="a worker process ended"):
            many.answers(asked(many, fit))
    assert workers() == before


def test_a_worker_whose_run_was_killed_ends_without_a_traceback() -> None:
    here, there = socket.socketpair()
    with here, Connection(there.detach()) as pipe:
        pipe.send_bytes(b"not read")
        here.close()  # with a message that was not read, the other end is told of a reset
        run_worker(pipe)


def shared_rows() -> list[str]:
    """Matrices that this process still holds; they have no name that anyone else could find."""
    return [region.path for region in psutil.Process().memory_maps() if "fedcenters-rows" in region.path]


def workers() -> set[int]:
    """Copies of the one child that has imported everything."""
    return {p.pid for p in psutil.Process().children(recursive=True) if p.ppid() != os.getpid()}
