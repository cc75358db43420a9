"""`make boards`: a flashed arm64 system, under emulation, is a device of a real federation.

Nothing here is a mock: Debian's arm64 packages, the wheels that boards get, mosquitto over mutual TLS, the coordinator.
It proves imports, wheels and numbers; of a board's speed, heat, memory or GPU it says nothing. Figures go to
`.boards/figures.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from edge_client.board import wheels
from edge_client.board.flash import LIGHT_ENGINES, PACKAGE
from edge_client.board.profiles import BOARD_PROFILES
from edge_client.board.wheels import WheelSpec
from edge_client.cli import main
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.task import Array
from emulator.testbed.testbed_files import write_toml
from tests.support.arm64_board import PATIENCE_S, ROOT, STORE, EmulatedBoard, new_board, note, size_mb, started, until
from tests.support.guarded_broker import Guarded, guarded_broker
from tests.support.programs import compiled, feeds

pytestmark = [pytest.mark.board, pytest.mark.slow, pytest.mark.timeout(3000)]
DEVICES = {"porch": "onnx", "shed": "litert"}
MODEL, BATCH, SAMPLES, STEPS = "wecfl-cnn", 8, 16, 6
STEP = 1e-5  # both run the same float32 operators; sums may be taken in another order
ON_DISK_MB = 180


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_broker(tmp_path_factory.mktemp("federation"), *DEVICES) as found:
        yield found


@pytest.fixture(scope="module")
def boards(broker: Guarded) -> dict[str, EmulatedBoard]:
    """Two boards, flashed with the command, each with its own data."""
    made = {}
    for cid, engine in DEVICES.items():
        made[cid] = new_board(cid)
        began_s = time.perf_counter()
        about = ["--board", "raspberry-pi-5", "--device-id", cid, "--join", str(broker.work.folder)]
        place = ["--rootfs", str(made[cid].root), "--engine", engine, "--cache", str(STORE / "wheels")]
        port = broker.url.rpartition(":")[2]  # a root file system that was never booted has no name for 127.0.0.1
        assert main(["flash", *about, *place, "--federation", f"mqtts://127.0.0.1:{port}"]) == 0
        note(**{f"flash {engine}, s": round(time.perf_counter() - began_s, 1)})
        data = made[cid].root / "var/lib/fedcenters/data"
        data.mkdir(parents=True)
        x, y = separable(np.random.default_rng(len(made)))
        np.savez(data / "train.npz", x=x, y=y)
        np.savez(data / "test.npz", x=x[:4], y=y[:4])
    return made


def separable(rng: np.random.Generator) -> tuple[Array, Array]:
    """Two of the ten classes, told apart at once, so that a center of one round is better than none."""
    y = np.arange(SAMPLES) % 2
    x = rng.standard_normal((SAMPLES, *compiled_model().program.input)) + 4.0 * y[:, None, None, None]
    return x.astype(np.float32), y


@cache
def compiled_model() -> Any:  # noqa: ANN401 - export's Compiled
    return compiled(MODEL, engines=("onnx", "litert"))


@pytest.mark.parametrize("cid", DEVICES)
def test_the_flashed_client_passes_doctor(boards: dict[str, EmulatedBoard], cid: str) -> None:
    began_s = time.perf_counter()
    done = boards[cid].run(boards[cid].client("doctor", "--config", "/etc/fedcenters/client.toml", "--json"))
    found = json.loads(done.stdout)
    assert found["fit"], (found, done.stderr)
    assert done.returncode == 0
    note(**{f"doctor {DEVICES[cid]}, s": round(time.perf_counter() - began_s, 1)})
    note(**{f"runtime {DEVICES[cid]}": next(c["said"] for c in found["checks"] if c["name"] == "runtime")})


@pytest.mark.parametrize("cid", DEVICES)
def test_a_step_on_arm64_is_x86s(boards: dict[str, EmulatedBoard], cid: str, tmp_path: Path) -> None:
    """The same program, the same feeds, the same engine; wide of each other by rounding alone."""
    made, engine = compiled_model(), DEVICES[cid]
    folder = boards[cid].root / "tmp" / "step"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.json").write_bytes(canonical_json(made.program.to_json()))
    for sha256, data in made.files.items():
        (folder / sha256).write_bytes(data)
    given = {n.replace("/", "|"): v for n, v in feeds(made.program, "step", batch=BATCH).items()}
    np.savez(folder / "feeds.npz", **given)  # type: ignore[arg-type]  # numpy's stub takes no **dict
    (folder / "step.py").write_bytes((Path(__file__).parent / "step.py").read_bytes())
    here = [sys.executable, str(folder / "step.py"), str(folder), engine]
    subprocess.run(here, check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})
    with np.load(folder / f"{engine}.npz") as arrays:
        expected = dict(arrays)
    (folder / f"{engine}.npz").unlink()
    there = "/tmp/step"  # noqa: S108 - on the board
    python = ["/usr/bin/env", "PYTHONPATH=/opt/fedcenters/site", "/usr/bin/python3"]
    done = boards[cid].run(boards[cid].command(*python, f"{there}/step.py", there, engine))
    assert done.returncode == 0, done.stderr
    with np.load(folder / f"{engine}.npz") as arrays:
        worst = max(float(np.abs(arrays[name] - value).max()) for name, value in expected.items())
    note(**{f"step {engine}, s": float(done.stdout), f"step {engine}, from x86": worst})
    assert worst < STEP


def test_both_boards_train_a_round_are_accepted_and_fetch_a_center(
    boards: dict[str, EmulatedBoard], broker: Guarded, tmp_path: Path
) -> None:
    keys, run = broker.work.folder, tmp_path / "run"
    config = tmp_path / "coordinator.toml"
    mine = keys / "coordinator"
    write_toml(
        config,
        {
            "federation": broker.work.plan.federation,
            "broker": broker.url,
            "folder": str(run),
            "ca": str(mine / "ca.crt"),
            "certificate": str(mine / "coordinator.crt"),
            "key": str(mine / "coordinator.key"),
            "signing-folder": str(mine),
            "min-devices": len(DEVICES),
            "start-timeout-s": PATIENCE_S,
            "deadline-s": PATIENCE_S,
            "quorum": 1.0,
            "codec": "f32",
            "formats": ["onnx", "tflite"],
            "model": {"name": MODEL, "batch-size": BATCH, "engines": ["onnx", "litert", "pt2"]},
            "runs": [{"method": "fedavg", "num-rounds": 1, "local-steps": STEPS}],
        },
    )
    began_s = time.perf_counter()
    serve = [sys.executable, "-m", "coordinator", "serve", str(config)]
    commands = [boards[cid].client("join", "-v", "--config", "/etc/fedcenters/client.toml") for cid in DEVICES]
    with started(tmp_path / "serve.log", serve) as service:
        with started(tmp_path / "one.log", commands[0]) as one, started(tmp_path / "two.log", commands[1]) as two:
            events = until(run / "metrics.jsonl", "bundle", (service, one, two), tmp_path)
        (round_,) = [event for event in events if event["event"] == "round"]
        note(**{"round, s": round(time.perf_counter() - began_s, 1), "round": round_["round"]})
        replies = answered(run)
        assert sorted(replies) == sorted(DEVICES)
        for cid, engine in DEVICES.items():
            asked = ("nearest", "--config", "/etc/fedcenters/client.toml", "--json")
            done = boards[cid].run(boards[cid].client(*asked), timeout_s=PATIENCE_S)
            assert done.returncode == 0, done.stderr
            answer = json.loads(done.stdout)
            assert answer["center"] == 0
            assert answer["format"] == {"onnx": "onnx", "litert": "tflite"}[engine]
            note(**{f"nearest {engine}": answer["accuracy"]})


def answered(run: Path) -> set[str]:
    """The devices whose trained update was stored, of the first exchange."""
    import sqlite3

    with sqlite3.connect(f"file:{run / 'store' / 'coordinator.sqlite'}?mode=ro", uri=True) as store:
        return {cid for (cid,) in store.execute("select distinct cid from replies where exchange = 0")}


def test_a_client_with_onnx_runtime_is_small_on_disk(boards: dict[str, EmulatedBoard]) -> None:
    taken = size_mb(boards["porch"].root / "opt" / "fedcenters")
    note(**{"client and onnxruntime on disk, MB": round(taken, 1)})
    note(**{"client and LiteRT on disk, MB": round(size_mb(boards["shed"].root / "opt" / "fedcenters"), 1)})
    assert taken <= ON_DISK_MB


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
@pytest.mark.parametrize("name", BOARD_PROFILES)
def test_wheels_resolve_for_every_board_and_nothing_that_they_need_is_missing(name: str, python: str) -> None:
    """With the conditions of the board's own Python and processor, which pip here does not look at."""
    profile = BOARD_PROFILES[name]
    wish = WheelSpec(profile=profile, python=python, engines=("litert", "onnx"), images=True)
    lines = wheels.lock_wheels(wish, STORE / "wheels").splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
    assert {"numpy", "onnxruntime", "ai-edge-litert", "pillow"} <= pinned
    about = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": profile.machine}
    about |= {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython", "extra": ""}
    if name == "raspberry-pi-5":  # one of them is looked at as it is; the others get the same files
        found = {path.name: needs(path) for path in wheels.fetch_wheels(wish, STORE / "wheels")}
        wanted = {(n, str(need)) for n, all_ in found.items() for need in all_ if applies(need, about)}
        assert {(n, need) for n, need in wanted if canonicalize_name(Requirement(need).name) not in pinned} == set()
    note(**{f"{name}, Python {python}": " ".join(line.split(" ")[0] for line in lines)})


def applies(need: Requirement, about: dict[str, str]) -> bool:
    """Whether a board needs it."""
    return need.marker is None or need.marker.evaluate(about)


def needs(path: Path) -> list[Requirement]:
    """What a wheel says that it needs."""
    import zipfile
    from email import message_from_bytes

    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1]
        found = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [Requirement(text) for text in found]


def test_the_client_on_a_board_is_what_lies_here() -> None:
    assert {e.path.rpartition("/")[2] for e in wheels.client_files(PACKAGE, LIGHT_ENGINES)} >= {
        "cli.py",
        "launcher.py",
        "step.onnx",
    }
