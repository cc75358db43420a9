"""Devices on a Ray cluster of two nodes on loopback answer as in one process, to the last bit; one node may leave."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from coordinator.strategies.base import Exchange
from coordinator.strategies.registry import Setting, make_method
from edge_client.errors import FedcentersError, NetworkError
from edge_client.protocol.summed_task import SummedFit, SumScale
from edge_client.protocol.task import OWN_MODEL, ClientId, Fit, OwnModel, Probe, Reply, Task
from emulator.engines.base import Recipe
from emulator.parallel.ray_pool import RayWorkerPool, connect_to_ray, make_ray_pool
from emulator.run.execute import run_simulation
from emulator.run.settings import RunSettings
from emulator.simulation import spill
from emulator.simulation.emulated_devices import EmulatedDevices, no_rounding
from tests.support.gated_recipe import FailingRecipe, GatedRecipe, PlainRecipe
from tests.support.requirements import skip_without
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.cluster_utils import Cluster

LOCAL = grouped_fleet(24, 2)
W = start_of()
STORE = 80 * 2**20  # bytes; Ray takes no less than 75 MiB
FIT = Fit(start=OWN_MODEL, init=W, steps=3, lr=0.1, batch=8, seed=1)

# Ray warns of its own changes to come, and leaves sockets and processes to its exit hooks.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _ray_is_installed() -> None:
    if find_spec("ray") is None:
        skip_without("ray is not installed (pip install '.[ray]')")


@contextmanager
def started_nodes(count: int = 2) -> Iterator[Cluster]:
    """A cluster with one CPU and a store of its own on each of `count` nodes; nothing of it is left afterwards."""
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    node = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=1, object_store_memory=STORE)
        yield cluster
    finally:
        started = set(psutil.Process().children(recursive=True)) - before
        cluster.shutdown()
        _, alive = psutil.wait_procs(started, timeout=30)
        assert not alive


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster | None]:
    if find_spec("ray") is None:
        yield None
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with started_nodes() as nodes:
        yield nodes


def asked(task: Task, local: Mapping[ClientId, object] = LOCAL) -> Exchange:
    return dict.fromkeys(sorted(local), task)


def same(one: Mapping[ClientId, Reply | str], other: Mapping[ClientId, Reply | str]) -> None:
    assert list(one) == list(other)
    for c in one:
        mine, theirs = (vars(a) if isinstance(a, Reply) else a for a in (one[c], other[c]))
        np.testing.assert_equal(mine, theirs)


@contextmanager
def opened(recipe: Recipe, cluster: Cluster) -> Iterator[RayWorkerPool]:
    with connect_to_ray(cluster.address):
        yield make_ray_pool(recipe, LOCAL)


def unrounded(crew: RayWorkerPool) -> RayWorkerPool:
    crew.wire = no_rounding
    return crew


def test_fits_probes_own_models_and_posteriors_are_the_same_bits(cluster: Cluster) -> None:
    tasks: list[Task] = [
        Fit(start=W, steps=3, lr=0.1, batch=8, seed=1, momentum=0.9),
        Fit(start=OWN_MODEL, anchor=W, mu=0.1, steps=2, lr=0.1, batch=8, seed=2, upload=False),
        Probe(models=[W, -W], want=frozenset({"loss", "votes", "posterior"}), batch=8, seed=0),
        Fit(start=W, steps=2, lr=0.1, batch=8, seed=3, rows="posterior:1", slot="second"),
        Probe(models=[OwnModel(slot="second")], want=frozenset({"confusion"}), batch=8, seed=0, split="test"),
        Fit(start=OWN_MODEL, steps=1, lr=0.1, batch=8, seed=2, slot="empty"),  # refused: nothing to resume
        Fit(start=OWN_MODEL, steps=1, lr=0.1, batch=8, seed=4),
    ]
    alone = devices_of(LOCAL)
    with opened(PlainRecipe(), cluster) as crew:
        for task in tasks:
            same(unrounded(crew).answers(asked(task)), alone.answers(asked(task)))
            for c in LOCAL:
                assert [v.size for v in crew.fetched(c, task)] == [v.size for v in alone.fetched(c, task)]
        crew.open_round()
        refused = crew.answers(asked(Fit(start=W, steps=1, lr=0.1, batch=8, seed=3, rows="posterior:1")))
        assert set(refused.values()) == {"no_posterior"}


def test_running_statistics_that_stay_on_devices_go_with_their_tasks(cluster: Cluster) -> None:
    w = start_of(buffered=True)
    fit = Fit(start=w, steps=3, lr=0.1, batch=8, seed=1, buffers="own")
    tested = Probe(models=[w], want=frozenset({"loss"}), batch=8, seed=0, split="test", buffers="own")
    alone = devices_of(LOCAL, buffered=True)
    with opened(PlainRecipe(buffered=True), cluster) as crew:
        for task in (fit, tested, fit):
            same(unrounded(crew).answers(asked(task)), alone.answers(asked(task)))


@pytest.mark.parametrize("more", [{}, {"secure": "updates"}])
def test_a_whole_run_rounds_on_the_wire_and_has_the_same_centers_and_records(
    cluster: Cluster, more: Mapping[str, Setting]
) -> None:
    """Of sums, the next stage and the test need what the devices trained and chose before."""
    strategy = make_method("fesem", **{"clusters": 2, "local-steps": 3, "batch-size": 8, **more})
    alone = EmulatedDevices(learner=PlainRecipe().open(), local=LOCAL)
    with opened(PlainRecipe(), cluster) as crew:
        one, other = (
            run_simulation(strategy, W, devices, RunSettings(rounds=2, seed=0, batch=8)) for devices in (alone, crew)
        )
    np.testing.assert_array_equal(one.state.centers, other.state.centers)
    assert one.records == other.records


def test_the_words_of_a_sum_come_one_by_one_from_as_many_devices_as_have_room(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "MAX_MEMORY_BYTES", 3 * W.nbytes)
    centers = np.stack([W])
    scale = SumScale(bits=32, devices=len(LOCAL), clip=1.0)
    task = SummedFit(
        start=W, steps=1, lr=0.1, batch=8, seed=1, upload=False,
        stage="add", choose="only", centers=centers, scale=scale, open=(0,),
    )  # fmt: skip
    with opened(PlainRecipe(), cluster) as crew:
        words = crew.each_answer(asked(task))
        next(words)
        assert len(crew.sums.models) == 3
        assert len(list(words)) == len(LOCAL) - 1


def test_what_fails_over_there_is_said_here(cluster: Cluster) -> None:
    with opened(PlainRecipe(), cluster) as crew:
        crew.recipe = _put(FailingRecipe())
        with pytest.raises(FedcentersError, match="no such engine here"):
            crew.answers(asked(FIT))


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "nowhere"])
def test_no_cluster_is_an_error_with_a_hint(free_port: int, address: str) -> None:
    with (
        pytest.raises(NetworkError, match="start one with"),
        connect_to_ray(address.format(port=free_port)),
    ):
        pass


def test_a_node_lost_in_the_middle_of_a_round_changes_nothing() -> None:
    """Both nodes are held at work on the second of three exchanges that build on each other; one of them is killed."""
    alone = devices_of(LOCAL)
    learned = [alone.answers(asked(FIT)) for _ in range(3)]
    with (
        Gate() as gate,
        started_nodes() as nodes,
        opened(GatedRecipe(port=gate.port), nodes) as crew,
    ):
        unrounded(crew)
        same(crew.answers(asked(FIT)), learned[0])
        (leaving,) = nodes.worker_nodes
        raylet = leaving.all_processes["raylet"][0].process.pid
        gate.close()

        def lose() -> None:
            gate.wait_until(lambda pid: raylet in {parent.pid for parent in psutil.Process(pid).parents()})
            nodes.remove_node(leaving, allow_graceful=False)
            gate.open()

        loser = threading.Thread(target=lose)
        loser.start()
        same(crew.answers(asked(FIT)), learned[1])
        loser.join()
        same(crew.answers(asked(FIT)), learned[2])
        workers = [psutil.Process(pid) for pid in gate.seen if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(workers, timeout=30)[1]


@pytest.mark.slow
def test_a_run_on_three_nodes_goes_on_with_the_same_bits_when_one_is_killed_at_work() -> None:
    strategy = make_method("fesem", **{"clusters": 2, "local-steps": 3, "batch-size": 8})
    settings = RunSettings(rounds=4, seed=0, batch=8)
    alone = run_simulation(strategy, W, EmulatedDevices(learner=PlainRecipe().open(), local=LOCAL), settings)
    losers: list[threading.Thread] = []
    with (
        Gate() as gate,
        started_nodes(3) as nodes,
        opened(GatedRecipe(port=gate.port), nodes) as crew,
    ):
        leaving = list(nodes.worker_nodes)[-1]
        raylet = leaving.all_processes["raylet"][0].process.pid

        def lose() -> None:
            gate.wait_until(lambda pid: raylet in {parent.pid for parent in psutil.Process(pid).parents()})
            nodes.remove_node(leaving, allow_graceful=False)
            gate.open()

        def ended(record: Mapping[str, object]) -> None:
            if record["round"] == 1:
                gate.close()
                losers.append(threading.Thread(target=lose))
                losers[0].start()

        found = run_simulation(strategy, W, crew, settings, progress=ended)
        losers[0].join()
        workers = [psutil.Process(pid) for pid in gate.seen if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(workers, timeout=30)[1]
    np.testing.assert_array_equal(found.state.centers, alone.state.centers)
    assert found.records == alone.records


class Gate:
    """Where the work of `GatedRecipe` waits. It begins open; `seen` are the processes that came by."""

    def __enter__(self) -> Gate:  # noqa: PYI034 - Self is not in Python 3.10
        self.seen: set[int] = set()
        self._held: list[tuple[int, socket.socket]] = []
        self._closed, self._news = False, threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._porter = threading.Thread(target=self._receive)
        self._porter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the porter
        self._porter.join()
        self._listener.close()
        self.open()

    def close(self) -> None:
        """Who comes from now on waits."""
        self._closed = True

    def open(self) -> None:
        """Let go whoever waits, and whoever comes."""
        with self._news:
            self._closed = False
            while self._held:
                self._held.pop()[1].close()

    def wait_until(self, wanted: Callable[[int], bool]) -> None:
        """Until a process for which this holds waits here."""
        with self._news:
            assert self._news.wait_for(lambda: any(wanted(pid) for pid, _ in self._held), timeout=60)

    def _receive(self) -> None:
        with suppress(OSError):  # the listener is shut
            while True:
                visitor, _ = self._listener.accept()
                pid = int(visitor.makefile().readline())
                with self._news:
                    self.seen.add(pid)
                    if self._closed:
                        self._held.append((pid, visitor))
                    else:
                        visitor.close()
                    self._news.notify_all()


def _put(recipe: FailingRecipe) -> ObjectRef[FailingRecipe]:
    import ray

    return ray.put(recipe)
