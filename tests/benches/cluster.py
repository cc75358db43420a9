"""`python -m tests.benches.cluster`: what Ray costs beside worker processes and one process, and what it moves.

    one         this process
    processes   two worker processes (`--workers 2`)
    ray 1       a Ray cluster of one node with two CPUs (`--ray`)
    ray 3       three nodes with one CPU each and stores of their own: three raylets on this machine
    ray 3 -1    the same, and one node is killed 3 s after the first round

Each side plays the same run of FeSEM: 60 devices with 320 images of 28 x 28 pixels each, three rounds of 10 steps with
a test. `same` says whether centers and records have the bits of `one`. Seconds are those of the rounds, on the wall and
of the CPU of all processes, Ray's own included: the first round contains the start of Ray's workers, `start_s` is the
wall time until the devices are ready.
`moved` are the bytes that raylets sent to each other (`ss -tinp`), after each round: samples move when a node first
uses them. --only plays some sides, --repeats N plays all of them in turn. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from coordinator.models.registry import build_model
from coordinator.storage.state_codec import encode_state
from coordinator.strategies.registry import make_method
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import ClientId
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.engines.engine_spec import EngineSpec
from emulator.parallel.process_pool import open_pool
from emulator.parallel.ray_pool import connect_to_ray, make_ray_pool
from emulator.run.execute import run_simulation
from emulator.run.settings import RunSettings
from emulator.simulation.emulated_devices import EmulatedDevices
from export.compiler.program import vector_of
from tests.benches.machine import described, load
from tests.benches.work import SHAPE

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

MODEL, DEVICES, ROUNDS, SAMPLES, CLASSES, BATCH = "mnist-mlp", 60, 3, 320, 10, 32
METHOD: Mapping[str, Any] = {"clusters": 3, "local-steps": 10, "batch-size": BATCH}
STORE_BYTES = 200 * 2**20
LOSE_AFTER_S = 3.0  # after the first round, which starts the workers
MB = 10**6


def main() -> None:
    """Play what was asked for, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SIDES), choices=SIDES)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--repeats", type=int, default=1)
    asked = parser.parse_args()
    sys.stderr.write(f"{described()}, load {load():.1f}\n")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ["one", *asked.only]}
    for repeat in range(asked.repeats):
        for name in rows if repeat % 2 == 0 else reversed(list(rows)):
            rows[name].append(played(name, asked.model))
            sys.stderr.write(json.dumps(rows[name][-1]) + "\n")
    for found in rows.values():
        middle = {key: round(statistics.median(row[key] for row in found), 2) for key in ("wall_s", "cpu_s", "start_s")}
        same = all(row["digest"] == rows["one"][0]["digest"] for row in found)
        row = {k: v for k, v in found[-1].items() if k != "digest"} | middle | {"same": same}
        sys.stdout.write(json.dumps(row) + "\n")


def played(side: str, model: str) -> dict[str, Any]:
    """One run on one side."""
    built, local = build_model(model, seed=0), fleet()
    ends: list[tuple[float, float, float | None]] = []
    began_s = time.perf_counter()
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="bench-cluster-") as folder:
        devices, raylets, lose = SIDES[side](stack, model, local, Path(folder))
        ready_s, cpu_s = time.perf_counter(), processors_s()
        losing = None

        def ended(record: Mapping[str, Any]) -> None:
            nonlocal losing
            ends.append((time.perf_counter(), processors_s(), moved_mb(raylets())))
            if lose is not None and record["round"] == 1:
                losing = threading.Timer(LOSE_AFTER_S, lose)
                losing.start()

        learner = cpu_recipe(built).open()
        found = run_simulation(
            make_method("fesem", **METHOD),
            vector_of(built.module, learner.program.schema),
            devices,
            RunSettings(rounds=ROUNDS, seed=0, batch=BATCH),
            progress=ended,
        )
        if losing is not None:
            losing.join()
    sha = hashlib.sha256(encode_state(found.state) + json.dumps(list(found.records)).encode())
    return {
        "side": side,
        "start_s": round(ready_s - began_s, 2),
        "wall_s": round(ends[-1][0] - ready_s, 2),
        "cpu_s": round(ends[-1][1] - cpu_s, 2),
        "rounds_s": [round(end - begin, 2) for begin, end in pairwise([ready_s, *(end for end, _, _ in ends)])],
        "rounds_cpu_s": [round(end - begin, 2) for begin, end in pairwise([cpu_s, *(cpu for _, cpu, _ in ends)])],
        "moved_mb": [None if moved is None else round(moved, 1) for _, _, moved in ends],
        "samples_mb": round(
            sum(data.x.nbytes for one in local.values() for data in (one.train, one.test) if data) / MB
        ),
        "digest": sha.hexdigest(),
        "load": round(load(), 1),
    }


def fleet() -> dict[ClientId, DeviceData]:
    """Three groups whose labels are shifted; images with a pattern for each label."""
    rng = np.random.default_rng(0)
    patterns = rng.standard_normal((CLASSES, *SHAPE)).astype(np.float32)

    def drawn(group: int, n: int) -> Dataset:
        y = rng.integers(CLASSES, size=n)
        x = patterns[y] + rng.standard_normal((n, *SHAPE), np.float32)
        return Dataset(x, (y + 3 * group) % CLASSES)

    names = [f"device-{i:03d}" for i in range(DEVICES)]
    return {
        who: DeviceData(train=drawn(number % 3, SAMPLES), test=drawn(number % 3, SAMPLES // 4))
        for number, who in enumerate(names)
    }


Raylets = Callable[[], dict[int, str]]
Side = tuple[EmulatedDevices, Raylets, "Callable[[], None] | None"]


def one(stack: ExitStack, model: str, local: Mapping[ClientId, DeviceData], folder: Path) -> Side:
    return EmulatedDevices(learner=cpu_recipe(build_model(model, seed=0)).open(), local=local), dict, None


def processes(stack: ExitStack, model: str, local: Mapping[ClientId, DeviceData], folder: Path) -> Side:
    spec = EngineSpec(model=model, seed=0, engine="lean", batch=BATCH, folder=folder)
    return stack.enter_context(open_pool(spec, local, workers=2))[0], dict, None


def on_ray(cpus: list[int], *, loses: bool = False) -> Callable[..., Side]:
    def side(stack: ExitStack, model: str, local: Mapping[ClientId, DeviceData], folder: Path) -> Side:
        cluster = stack.enter_context(nodes(cpus))
        stack.enter_context(connect_to_ray(cluster.address))
        pool = make_ray_pool(cpu_recipe(build_model(model, seed=0)), local)

        def raylets() -> dict[int, str]:
            alive = [cluster.head_node, *cluster.worker_nodes]
            return {node.all_processes["raylet"][0].process.pid: node.unique_id for node in alive}

        def lose() -> None:
            cluster.remove_node(list(cluster.worker_nodes)[-1], allow_graceful=False)

        return pool, raylets, lose if loses else None

    return side


SIDES: dict[str, Callable[..., Side]] = {
    "one": one,
    "processes": processes,
    "ray 1": on_ray([2]),
    "ray 3": on_ray([1, 1, 1]),
    "ray 3 -1": on_ray([1, 1, 1], loses=True),
}


@contextmanager
def nodes(cpus: list[int]) -> Iterator[Cluster]:
    """A node for each number of CPUs, the first one with the head; on loopback."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": cpus[0], "include_dashboard": False, "object_store_memory": STORE_BYTES},
    )
    try:
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count, object_store_memory=STORE_BYTES)
        yield cluster
    finally:
        cluster.shutdown()


def processors_s() -> float:
    """Seconds of CPU of this process and all that it started, as far as they live or were waited for."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    total = 0.0
    for process in family:
        try:
            t = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += t.user + t.system + getattr(t, "children_user", 0.0) + getattr(t, "children_system", 0.0)
    return total


def moved_mb(raylets: Mapping[int, str]) -> float | None:
    """What raylets have sent to each other over the connections that are open, MB; None without any."""
    if not raylets:
        return None
    lines = subprocess.run(["ss", "-Htinp"], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    owner: dict[str, int] = {}
    sent: dict[tuple[str, str], int] = {}
    for head, more in pairwise(lines):
        pid = re.search(r'"raylet",pid=(\d+)', head)
        if pid is None or int(pid[1]) not in raylets:
            continue
        here, there = head.split()[3:5]
        owner[here.rpartition(":")[2]] = int(pid[1])
        count = re.search(r"bytes_sent:(\d+)", more)
        sent[here.rpartition(":")[2], there.rpartition(":")[2]] = int(count[1]) if count else 0
    return sum(n for (a, b), n in sent.items() if b in owner and owner[a] != owner[b]) / MB


if __name__ == "__main__":
    main()
