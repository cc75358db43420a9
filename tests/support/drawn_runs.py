"""A case of drawn_cases.py as runs of a few devices in numpy: whole, interrupted, resumed, divided among workers."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import make_method
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import ClientId
from edge_client.training.learner import EngineLearner
from emulator.options import SimulateArgs
from emulator.parallel.process_pool import WorkerProcess, _set_up_pool
from emulator.parallel.worker import run_worker
from emulator.run.execute import SimulationResult, live_result, open_run, run_rounds
from emulator.run.live_run import LiveRun
from emulator.run.resolve import resolve_run
from emulator.run.settings import RunSettings
from emulator.simulation.checkpoint import Checkpoints
from emulator.simulation.device_profiles import DeviceProfile
from emulator.simulation.drawn_devices import DrawnDevices
from emulator.simulation.emulated_devices import EmulatedDevices
from tests.support.drawn_cases import OURS, DrawnCase
from tests.support.gated_recipe import PlainRecipe
from tests.support.methods import members_of
from tests.support.softmax_program import SoftmaxEngine, grouped_fleet, program, start_of

ROUNDS = 3
STEADY = DeviceProfile(name="steady", step_s=0.01, evaluate_s=0.01, down_bytes_s=1e6, up_bytes_s=1e6, latency_s=0.01)
SLOW = replace(STEADY, name="slow", step_s=0.3)
PROFILES = {
    "": (STEADY,),
    "usual": (STEADY, SLOW),
    "flaky": (replace(STEADY, dropout=0.4),),
    "away": (replace(STEADY, availability=0.5, cycle_s=2.0), replace(SLOW, availability=0.8, cycle_s=5.0)),
    "gone": (replace(STEADY, dropout=1.0), STEADY),
}


@dataclass(frozen=True, kw_only=True)
class DrawnWorld:
    """The parts of a case that may begin its first round."""

    strategy: Strategy
    settings: RunSettings
    local: Mapping[ClientId, DeviceData]
    buffered: bool

    @classmethod
    def of(cls, case: DrawnCase) -> DrawnWorld:
        """Raises ConfigError, UsageError for a combination that is refused."""
        given = dict(case.options)
        ours = {key: given.pop(key, None) for key in OURS}
        strategy = make_method(case.method, **case.asked)
        args = SimulateArgs(method=case.method, settings=case.asked, rounds=ROUNDS, **given)
        run = resolve_run(args, strategy=strategy)
        local = _fleet(ours["fleet"] or "")
        attackers = run.attack.attackers(local, args.seed)
        local = run.attack.poison_data(local, attackers)
        settings = replace(
            run.settings,
            attack=run.attack.make_attack(attackers, args.seed),
            profiles=PROFILES[ours["profiles"] or ""],
            over_select=ours["over_select"] or 1.0,
            deadline_s=ours["deadline_s"] or 60.0,
            metrics={"mine": lambda y, outputs: float((outputs.argmax(axis=1) == y).mean())},
        )
        world = cls(
            strategy=strategy,
            settings=settings,
            local=local,
            buffered=ours["fleet"] == "buffered" and members_of(strategy) == 1,
        )
        world.open()
        return world

    @property
    def learner(self) -> EngineLearner:
        return EngineLearner(SoftmaxEngine(), program(buffered=self.buffered, members=members_of(self.strategy)))

    def open(
        self,
        checkpoints: Checkpoints | None = None,
        local: Mapping[ClientId, DeviceData] | None = None,
        devices: EmulatedDevices | None = None,
    ) -> LiveRun:
        members = members_of(self.strategy)
        if devices is None:
            devices = EmulatedDevices(learner=self.learner, local=self.local if local is None else local)
        start = start_of(buffered=self.buffered, members=members).astype(np.float32)
        return open_run(self.strategy, start, devices, self.settings, checkpoints=checkpoints)

    def play(
        self,
        place: Path,
        *,
        local: Mapping[ClientId, DeviceData] | None = None,
        devices: EmulatedDevices | None = None,
        stop: int = ROUNDS,
        resume: bool = False,
    ) -> SimulationResult:
        checkpoints = Checkpoints(folder=place, every=1, resume=resume, fingerprint={})
        live = self.open(checkpoints, local, devices)
        _play_until(run_rounds(live, self.settings, checkpoints=checkpoints), stop)
        return live_result(live)


@contextmanager
def worker_threads(world: DrawnWorld, count: int) -> Iterator[EmulatedDevices]:
    """The devices divided among workers, which are threads here and processes in a run."""
    recipe = pickle.dumps(PlainRecipe(buffered=world.buffered, members=members_of(world.strategy)))
    with ExitStack() as stack:
        folder, workers, threads = Path(stack.enter_context(tempfile.TemporaryDirectory())), [], []
        for _ in range(min(count, len(world.local))):
            here, there = multiprocessing.Pipe()
            threads.append(threading.Thread(target=run_worker, args=(there,)))
            threads[-1].start()
            workers.append(WorkerProcess(pipe=here, process=multiprocessing.current_process()))
        try:
            yield _set_up_pool(workers, world.learner, [recipe] * len(workers), world.local, folder)
        finally:
            for worker in workers:
                worker.pipe.close()
            for thread in threads:
                thread.join()


def drawn_devices(world: DrawnWorld) -> DrawnDevices:
    """The devices of a fleet "drawn", whose samples are not held."""
    listed = list(world.local.values())
    return DrawnDevices(np.array([len(one.train) for one in listed]), listed.__getitem__, held=3)


def _play_until(rounds: Generator[int, bool | None, None], stop: int) -> None:
    for number in rounds:
        if number == stop:
            with suppress(StopIteration):
                rounds.send(True)  # noqa: FBT003 - of the protocol of `run_rounds`
            return


def _fleet(kind: str) -> dict[str, DeviceData]:
    count = {"one": 1, "two": 2, "twelve": 12}.get(kind, 6)
    local = {who: _with_tests(one, 20 - i) for i, (who, one) in enumerate(grouped_fleet(count, 2, n=20).items())}
    if kind == "drawn":
        return {f"device-{i}": one for i, one in enumerate(local.values())}
    if kind == "uneven":
        first = local["d00"]
        local["d00"] = replace(first, train=Dataset(first.train.x[:1], first.train.y[:1]))
        local["d01"] = DeviceData(train=grouped_fleet(1, 1, n=400)["d00"].train, test=local["d01"].test)
    if kind == "one-class":
        for who, one in list(local.items())[:3]:
            kept = one.train.y == one.train.y[0]
            local[who] = replace(one, train=Dataset(one.train.x[kept], one.train.y[kept]))
    if kind == "untested":
        for who in ("d00", "d03"):
            local[who] = replace(local[who], test=None)
    return local


def _with_tests(one: DeviceData, count: int) -> DeviceData:
    """The device with the first of its samples that test: where all have as many, weighted averages are plain ones."""
    return one if one.test is None else replace(one, test=Dataset(one.test.x[:count], one.test.y[:count]))
