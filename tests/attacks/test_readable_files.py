"""Another user of the machine reads the devices' updates, a run, or what a device trained and the keys of its sums."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.config import read_config
from coordinator.storage.store import Store
from edge_client.runtime.state import DeviceState
from tests.coordinator.test_service import PATIENCE_S, heard, started, written


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("before", [0o755, None])
def test_a_run_folder_is_for_its_owner_alone(tmp_path: Path, free_port: int, before: int | None) -> None:
    path = written(tmp_path, "one", f"embedded:{free_port}")
    folder = read_config(path).folder
    if before is None:
        (folder / "store").rename(tmp_path / "kept")
        folder.rmdir()
    else:
        folder.chmod(before)
        (folder / "store").chmod(before)
    with started("serve", str(path)) as process:
        heard(process, "leading one, epoch 1")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    found = modes(folder)
    assert found["store"] == 0o700  # nothing below it can be reached by another user
    assert before is not None or found["."] == 0o700
    made = {"config.toml", "metrics.jsonl", "status.json", "signing.key"}
    assert {name: found[name] for name in made} == dict.fromkeys(made, 0o600)
    if before is None:
        assert all(mode & 0o077 == 0 for mode in found.values())


def test_the_store_of_an_older_version_is_closed_to_others_when_it_is_opened(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    (tmp_path / "store").chmod(0o755)
    Store(tmp_path / "store").close()
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


def test_what_provision_makes_is_for_no_other_user_to_change_whatever_the_umask(tmp_path: Path) -> None:
    words = ["provision", str(tmp_path / "keys"), "--federation", "demo", "--host", "localhost", "--token", "pump-8"]
    subprocess.run([sys.executable, "-m", "coordinator", *words], check=True, capture_output=True, umask=0)
    assert [name for name, mode in modes(tmp_path / "keys").items() if mode & stat.S_IWOTH] == []


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """Files are made for others to read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
def test_what_a_device_trained_and_the_keys_of_its_sums_are_for_its_owner_alone(tmp_path: Path) -> None:
    """Also in the folder of an older version, and where a crash left a file."""
    (tmp_path / "kept").mkdir(mode=0o755)
    for name in ("state.json.tmp", "state.json"):
        (tmp_path / name).write_text("{}")
    state = DeviceState(tmp_path, federation="demo", device_id="d1")
    state.see_epoch(3, "1" * 16)
    found = modes(tmp_path)
    assert {name: found[name] for name in ("kept", "state.json")} == {"kept": 0o700, "state.json": 0o600}
