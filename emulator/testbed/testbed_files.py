"""Files that real processes start from: a folder per device with its samples, and every process's configuration.

A device's folder holds the samples of that device only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_client.errors import ConfigError
from edge_client.protocol.program import ENGINES
from edge_client.protocol.task import Array

if TYPE_CHECKING:
    from edge_client.data.dataset import Dataset, DeviceData

DEMO_FEDERATION = "demo"
DEMO_MODEL = "digits-mlp"
REFERENCE_FILE = "reference.npz"  # x [m, ...]: samples that no device holds, to compare exported files with torch
ENGINE_CYCLE = ("onnx", "litert", "onnx", "pt2")  # half, a quarter, a quarter
FORMAT_CYCLE = ("onnx", "tflite")
# Both methods with their defaults, so that `simulate` with the same seed gives the same numbers.
FESEM_RUN: Mapping[str, Any] = {"method": "fesem", "clusters": 3}
FEDAVG_RUN: Mapping[str, Any] = {"method": "fedavg"}


@dataclass(frozen=True, kw_only=True)
class DeviceFiles:
    """One emulated device: its id, the engine that it trains or chooses with, and its configuration file."""

    cid: str
    engine: str
    config: Path


def engine_for(index: int) -> str:
    """Engine of the index-th device."""
    return ENGINE_CYCLE[index % len(ENGINE_CYCLE)]


def engine_and_format_for(index: int) -> tuple[str, str]:
    """Engine and file format of the index-th new device."""
    form = FORMAT_CYCLE[index % len(FORMAT_CYCLE)]
    return ("onnx" if form == "onnx" else "litert"), form


def write_device(  # noqa: PLR0913 - each is one line of the file
    folder: Path, cid: str, local: DeviceData, *, engine: str, broker: str, key: str, federation: str = DEMO_FEDERATION
) -> DeviceFiles:
    """`folder`/<cid>/ with data, a place for its state, and config.toml; `key` is the public signing key in hex."""
    home = folder / cid
    (home / "data").mkdir(parents=True)
    _save(home / "data" / "train.npz", local.train)
    if local.test is not None:
        _save(home / "data" / "test.npz", local.test)
    config = home / "config.toml"
    write_toml(
        config,
        {
            "federation": federation,
            "device-id": cid,
            "broker": broker,
            "engine": engine,
            "data": "data",
            "state": "state",
            "signing-keys": [key],
            "threads": 1,
            "min-battery-percent": 0,  # emulated devices do not care about this computer's battery
        },
    )
    return DeviceFiles(cid=cid, engine=engine, config=config)


def demo_runs(rounds: int) -> list[dict[str, Any]]:
    """The clustered method, then the global one on the same data."""
    return [{**FESEM_RUN, "num-rounds": rounds}, {**FEDAVG_RUN, "num-rounds": rounds}]


def write_coordinator(  # noqa: PLR0913 - each is one line of the file
    path: Path,
    folder: Path,
    *,
    broker: str,
    devices: int,
    runs: Sequence[Mapping[str, Any]],
    seed: int,
    engines: Sequence[str] = ENGINES,
    dashboard: str = "",
    **more: Any,  # noqa: ANN401 - TOML values
) -> None:
    """The coordinator's configuration at `path`; with `formats` it reads REFERENCE_FILE beside it at its start.

    `more` are other keys of the file, and values that replace those here.
    """
    write_toml(
        path,
        {
            "federation": DEMO_FEDERATION,
            "broker": broker,
            "folder": str(folder.resolve()),
            "min-devices": devices,
            "start-timeout-s": 120,
            "deadline-s": 120,
            "quorum": 1.0,
            "keep-rounds": 0,  # results and pictures look at every round
            "codec": "f32",
            "seed": seed,
            "formats": list(FORMAT_CYCLE) if "pt2" in engines else [],  # files are made from that program
            "reference": REFERENCE_FILE,
            "dashboard": dashboard,
            "model": {"name": DEMO_MODEL, "engines": list(engines)},
            "runs": [dict(run) for run in runs],
            **{key.replace("_", "-"): value for key, value in more.items()},
        },
    )


def write_reference(folder: Path, x: Array) -> None:
    """REFERENCE_FILE in the folder that the coordinator reads it from: samples [m, ...] that no device holds."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / REFERENCE_FILE, x=x)


def new_folder(parent: Path, stem: str) -> Path:
    """A new folder `parent`/`stem`, with a number when that name is taken; or ConfigError."""
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for folder in map(parent.joinpath, names):
            with suppress(FileExistsError):  # also of another process, just now
                folder.mkdir()
                break
    except OSError as wrong:
        raise ConfigError(
            f"cannot write in {parent}: {wrong.strerror}", hint="choose another folder with --out"
        ) from wrong
    return folder


def write_toml(path: Path, table: Mapping[str, Any]) -> None:
    """One configuration file."""
    import tomli_w

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(dict(table)), encoding="utf-8")


def _save(path: Path, data: Dataset) -> None:
    np.savez(path, x=data.x, y=data.y)
