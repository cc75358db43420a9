"""Bench: client updates. Ours against pfl, FedJAX and the DataLoader loop, the same samples in the same order.

CPU seconds count, except against FedJAX, whose threads cannot be held to one: there two worker processes of ours and
its two threads race on the wall. Before a ratio counts, both sides must have ended with the same averaged update.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from coordinator.models.registry import build_model
from edge_client.data.dataset import DeviceData
from emulator.engines.engine_spec import EngineSpec
from emulator.parallel.process_pool import open_pool
from tests.benches.loop import PlainLoop
from tests.benches.peer import PeerMissing, running
from tests.benches.results import BenchFigure
from tests.benches.turns import Contestant, Turn, interleaved, timed, with_workers
from tests.benches.work import BATCH, Work, apart, prepared, save, train

CLIENTS = {"mnist-mlp": 40, "wecfl-cnn": 6, "femnist-cnn": 1}
SHORT = {"mnist-mlp": "mlp", "wecfl-cnn": "wecfl", "femnist-cnn": "femnist"}
ZOO = {"mnist-mlp": "mnist_mlp", "wecfl-cnn": "wecfl_cnn"}
# Of the averaged update, relative, in float32. Dense layers: sums in another order, 1e-6 were seen. If rounding makes
# a max-pool or a ReLU choose differently, a whole gradient changes, and batch norm passes that on: up to 5e-3 were seen
# for one client, while the same engines are 1e-14 apart in float64 (tests/emulator/engines/). A wrong term (no prox,
# no momentum, another order of samples) shows as 1e-1.
TOLERANCE = {"mnist-mlp": 1e-4, "wecfl-cnn": 2e-2, "femnist-cnn": 2e-2}


def run(repeats: int) -> tuple[list[BenchFigure], dict[str, str]]:
    """The rows of all three models, and the peers' versions."""
    figures: list[BenchFigure] = []
    versions: dict[str, str] = {}
    for name in CLIENTS:
        with tempfile.TemporaryDirectory(prefix="fedcenters-") as folder:
            found, seen = one_model(name, repeats, Path(folder))
        figures += found
        versions |= seen
    return figures, versions


def one_model(name: str, repeats: int, folder: Path) -> tuple[list[BenchFigure], dict[str, str]]:
    """Ours, the loop and pfl on one core each; the MLP also against FedJAX on two."""
    work, recipe = prepared(build_model(name, seed=0), CLIENTS[name])
    learner, loop, short = recipe.open(), PlainLoop(work), SHORT[name]
    mine = [np.zeros(0)]
    contestants: dict[str, Contestant] = {
        "ours": timed(lambda: mine.__setitem__(0, train(learner, work))),
        "loop": timed(loop.turn),
    }
    figures: list[BenchFigure] = []
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        if name in ZOO:
            try:
                pfl = stack.enter_context(running("pfl", "pfl_rounds", str(save(work, folder / "work.npz")), ZOO[name]))
                contestants["pfl"], versions = pfl.turn, pfl.versions
            except PeerMissing as missing:
                figures.append(BenchFigure(row=f"updates-{short}-pfl", unmeasured=str(missing)))
        took = interleaved(contestants, repeats)
        updates = {"loop": loop.update} | ({"pfl": pfl.update()} if "pfl" in took else {})
    for peer, theirs in updates.items():
        figures.append(_per_core(f"updates-{short}-{peer}", name, took["ours"], took[peer], apart(mine[0], theirs)))
    if name == "mnist-mlp":
        found, seen = against_fedjax(work, repeats, folder)
        figures += found
        versions |= seen
    return figures, versions


def against_fedjax(work: Work, repeats: int, folder: Path) -> tuple[list[BenchFigure], dict[str, str]]:
    """Two worker processes against FedJAX with both cores, by jit and by pmap: the faster one counts."""
    rows = ("updates-mlp-fedjax", "updates-mlp-fedjax-core")
    names = [f"device-{i:03d}" for i in range(len(work.tasks))]
    local = {who: DeviceData(train=data) for who, data in zip(names, work.data, strict=True)}
    tasks = dict(zip(names, work.tasks, strict=True))
    path = str(save(work, folder / "work.npz"))
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with ExitStack() as stack:
        try:
            jit = stack.enter_context(running("fedjax", "fedjax_rounds", path, "jit"))
            pmap = stack.enter_context(running("fedjax", "fedjax_rounds", path, "pmap", extra=two))
        except PeerMissing as missing:
            return [BenchFigure(row=row, unmeasured=str(missing)) for row in rows], {}
        spec = EngineSpec(model="mnist-mlp", seed=0, engine="lean", batch=BATCH, folder=folder)
        devices, _ = stack.enter_context(open_pool(spec, local, workers=2))
        mine = [np.zeros(0)]

        def ours() -> None:
            replies = devices.answers(tasks)
            vectors = [reply.update for reply in replies.values() if not isinstance(reply, str)]
            mine[0] = np.mean([v for v in vectors if v is not None], axis=0) - work.start

        contestants = {"ours": with_workers(ours), "jit": jit.turn, "pmap": pmap.turn}
        took = interleaved(contestants, repeats)
        updates = {"jit": jit.update(), "pmap": pmap.update()}
    best = min(("jit", "pmap"), key=lambda backend: took[backend].wall_s)
    off = apart(mine[0], updates[best])
    n, name = len(work.tasks), "mnist-mlp"
    wall = {side: n / turn.wall_s for side, turn in took.items()}
    note = f"wall; FedJAX by {best}, jit {wall['jit']:.0f} and pmap {wall['pmap']:.0f} per second"
    checked = _unequal(name, off)
    return [
        BenchFigure(
            row=rows[0],
            ours=wall["ours"],
            theirs=wall[best],
            score=wall["ours"] / wall[best],
            note=f"{note}; updates {off:.0e} apart",
            unmeasured=checked,
        ),
        _per_core(rows[1], name, took["ours"], took[best], off),
    ], jit.versions


def _per_core(row: str, name: str, ours: Turn, theirs: Turn, off: float) -> BenchFigure:
    """Updates per CPU second of both sides."""
    n = CLIENTS[name]
    return BenchFigure(
        row=row,
        ours=n / ours.cpu_s,
        theirs=n / theirs.cpu_s,
        score=theirs.cpu_s / ours.cpu_s,
        note=f"averaged updates {off:.0e} apart; on the wall {theirs.wall_s / ours.wall_s:.2f}x",
        unmeasured=_unequal(name, off),
    )


def _unequal(name: str, off: float) -> str:
    return "" if off <= TOLERANCE[name] else f"the averaged updates are {off:.0e} apart: not the same work"
