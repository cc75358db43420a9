"""Bench: two worker processes against one, on the wall, the same devices and tasks. It needs idle cores."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from coordinator.models.registry import build_model
from edge_client.data.dataset import DeviceData
from emulator.engines.engine_spec import EngineSpec
from emulator.parallel.process_pool import open_pool
from tests.benches.results import BenchFigure
from tests.benches.turns import interleaved, with_workers
from tests.benches.work import BATCH, prepared

CLIENTS = {"wecfl-cnn": 12, "mnist-mlp": 60}
SHORT = {"wecfl-cnn": "wecfl", "mnist-mlp": "mlp"}


def run(repeats: int) -> tuple[list[BenchFigure], dict[str, str]]:
    """A row for each model: updates per second of the wall with two workers and with one."""
    return [one_model(name, repeats) for name in CLIENTS], {}


def one_model(name: str, repeats: int) -> BenchFigure:
    """Both crews live all the time and take turns."""
    work, _ = prepared(build_model(name, seed=0), CLIENTS[name])
    names = [f"device-{i:03d}" for i in range(len(work.tasks))]
    local = {who: DeviceData(train=data) for who, data in zip(names, work.data, strict=True)}
    tasks = dict(zip(names, work.tasks, strict=True))
    with ExitStack() as stack:
        crews = []
        for workers in (1, 2):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fedcenters-"))
            spec = EngineSpec(model=name, seed=0, engine="lean", batch=BATCH, folder=Path(folder))
            crews.append(stack.enter_context(open_pool(spec, local, workers=workers))[0])
        one, two = crews
        took = interleaved(
            {"one": with_workers(lambda: one.answers(tasks)), "two": with_workers(lambda: two.answers(tasks))}, repeats
        )
    wall = {side: turn.wall_s for side, turn in took.items()}
    cpu = took["two"].cpu_s / took["one"].cpu_s
    return BenchFigure(
        row=f"scaling-{SHORT[name]}",
        ours=len(tasks) / wall["two"],
        theirs=len(tasks) / wall["one"],
        score=wall["one"] / wall["two"],
        note=f"updates per second of the wall; two cost {cpu:.2f} times the CPU seconds of one",
    )
