"""A full disk: nothing is acknowledged that is not on it, nothing is corrupted, and it goes on when there is room.

The disk of one participant is full where its bytes reach the system: at `fsync`, at a write of a block, and for the
database by SQLite's own limit. full_disk.py does the same on a real file system of two megabytes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config_sections import RunConfig
from coordinator.identity.revoked_list import REVOKED_FILE
from edge_client.errors import FedcentersError, NetworkError
from edge_client.transport import blobs
from tests.faults import full_disk
from tests.support import softmax_program
from tests.support.one_round import ONE_ROUND
from tests.support.virtual_federation import BALLAST, Federation, Spy

DEVICES = 3


class Disk:
    """Full, or not, for the participant `owner`. `at_sync`: as where room is looked for late, it says so only then."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: str, *, at_sync: bool = False) -> None:
        self.full, self._owner, self._write_at = False, owner, blobs._write_at
        patch.setattr("os.fsync", self.fsync)
        if not at_sync:
            patch.setattr(blobs, "_write_at", self.write_at)

    def fsync(self, _descriptor: int) -> None:
        self._check()

    def write_at(self, descriptor: int, data: bytes, offset: int) -> None:
        if self.full and threading.current_thread().name == self._owner:
            self._write_at(descriptor, data[: len(data) // 2], offset)  # some of it still fits
        self._check()
        self._write_at(descriptor, data, offset)

    def _check(self) -> None:
        if self.full and threading.current_thread().name == self._owner:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDatabase:
    """A connection whose commits find no room while `full`, as SQLite says it."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db, self.full, self.tries = db, True, 0

    def execute(self, query: str, *values: Any) -> sqlite3.Cursor:  # noqa: ANN401 - SQL values
        if self.full and query == "commit":
            self.tries += 1
            assert self.tries < 1_000, "it tries without a pause"
            raise sqlite3.OperationalError("database or disk is full")
        return self._db.execute(query, *values)

    def __getattr__(self, name: str) -> object:
        return getattr(self._db, name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation.of(tmp_path_factory.mktemp("undisturbed"), ballast=BALLAST, devices=DEVICES).play()


@pytest.mark.parametrize(
    ("ballast", "at_sync"), [(0, False), (BALLAST, False), (BALLAST, True)], ids=["inline", "blocks", "whole"]
)
def test_what_does_not_fit_is_not_acknowledged_is_logged_once_and_is_taken_when_there_is_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ballast: int,
    *,
    at_sync: bool,
) -> None:
    calm, fed = (Federation.of(tmp_path / name, ballast=ballast, devices=DEVICES) for name in ("calm", "full"))
    disk = Disk(monkeypatch, "coordinator.0", at_sync=at_sync)
    calm.play()
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.world.run(lambda: fed.happened("program"))
    fed.start_devices(DEVICES)
    fed.world.run(lambda: len(spy.said("task")) == DEVICES)
    disk.full = True
    fed.world.run(lambda: len(spy.said("ack")) >= 2 * DEVICES)  # each of them twice
    assert {(ack["status"], ack["detail"]) for ack in spy.said("ack")} == {
        ("retry", "storage: No space left on device")
    }
    said = [record.getMessage() for record in caplog.records if "could not be stored" in record.message]
    assert len(said) == 1
    assert said[0].endswith("could not be stored: No space left on device; devices try again every 30 s")
    disk.full = False
    fed.complete()
    assert fed.outcome() == calm.outcome()


def test_a_disk_that_stays_full_until_the_deadline_is_told_as_what_kept_the_answers_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=DEVICES, deadline_s=60.0)
    disk = Disk(monkeypatch, "coordinator.0")
    spy = Spy(fed.world.broker)
    fed.start()
    fed.world.run(lambda: len(spy.said("task")) == DEVICES)
    disk.full = True
    with pytest.raises(NetworkError) as told:
        fed.finish()
    assert told.value.message.endswith("updates could not be stored: No space left on device")
    assert told.value.hint == "free or mend the coordinator's disk, then start again to repeat the exchange"


def test_a_disk_that_had_room_again_is_not_told_as_what_keeps_a_silent_device_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=DEVICES, deadline_s=90.0)
    disk = Disk(monkeypatch, "coordinator.0")
    spy = Spy(fed.world.broker)
    fed.start(2)
    fed.start_mute_device("d02")
    fed.world.run(lambda: len(spy.said("task")) == DEVICES)
    disk.full = True
    fed.world.run(lambda: len(spy.said("ack")) >= DEVICES - 1)
    disk.full = False
    with pytest.raises(NetworkError) as told:
        fed.finish()
    assert {ack["status"] for ack in spy.said("ack")} == {"retry", "ok"}
    assert told.value.message.endswith("no answer from d02")
    assert told.value.hint.startswith("look at those devices")


def test_a_reply_whose_row_does_not_fit_is_not_acknowledged_and_is_taken_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Federation
) -> None:
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=DEVICES)
    spy = Spy(fed.world.broker)
    fed.start()
    fed.world.run(lambda: len(spy.said("task")) == DEVICES)
    assert fed.store is not None
    database = FullDatabase(fed.store.database._connection)
    monkeypatch.setattr(fed.store.database, "_connection", database)
    fed.world.run(lambda: len(spy.said("ack")) >= 2 * DEVICES)
    assert {ack["status"] for ack in spy.said("ack")} == {"retry"}
    assert all("database or disk is full" in ack["detail"] for ack in spy.said("ack"))
    database.full = False
    fed.complete()
    assert fed.outcome() == undisturbed.outcome()


def test_what_devices_do_while_there_is_no_room_ends_no_training_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that came, or one that was revoked, is an event, for which there was no room either."""
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=DEVICES, quorum=0.5)
    spy = Spy(fed.world.broker)
    process = fed.start(2)
    fed.start_mute_device("d02")
    fed.world.run(lambda: len(spy.said("task")) == DEVICES)
    assert fed.store is not None
    database = FullDatabase(fed.store.database._connection)
    monkeypatch.setattr(fed.store.database, "_connection", database)
    fed.start_mute_device("d09")
    (fed.config.folder / REVOKED_FILE).write_text("d02\n")
    fed.world.run(lambda: process.ended or len(spy.said("ack")) >= 4)
    assert not process.ended
    database.full = False
    fed.complete()
    assert [text for text in caplog.messages if text.startswith("no room for the event joined of d09: ")]
    assert sorted(fed.rounds()[-1]["per_device"]) == ["d00", "d01"]


@pytest.mark.parametrize(("part", "write"), [("exchanges", "close"), ("states", "put")])
def test_where_it_cannot_go_on_it_ends_with_what_is_wrong_and_a_restart_with_room_keeps_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Federation, part: str, write: str
) -> None:
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=DEVICES)
    process = fed.start()
    fed.world.run(lambda: fed.live is not None)

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(getattr(fed.store, part), write, no_room)
    with pytest.raises(OSError, match="No space left on device"):
        fed.finish()
    assert process.ended
    fed.start_coordinator()
    fed.complete()
    assert fed.outcome() == undisturbed.outcome()


def test_a_start_on_a_full_disk_is_no_fault_of_the_configuration_so_a_service_manager_tries_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(ONE_ROUND)
    disk = Disk(monkeypatch, threading.current_thread().name)
    disk.full = True
    result = CliRunner().invoke(app, ["serve", str(path)])
    assert "No space left on device" in result.stderr
    assert "hint: free disk space" in result.stderr
    assert result.exit_code == FedcentersError.exit_code
    unit = Path(__file__).parents[2] / "docs" / "deploy" / "fedcenters-coordinator@.service"
    (prevented,) = re.findall(r"^RestartPreventExitStatus=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE)
    assert str(result.exit_code) not in prevented.split()


def test_a_start_on_a_disk_that_fails_is_tried_again_and_does_not_ask_for_room_alone(tmp_path: Path) -> None:
    """It said "No space left on device" of every input or output error of SQLite, as here of a limit of the system."""
    path = tmp_path / "coordinator.toml"
    path.write_text(ONE_ROUND)
    limited = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (4096, 4096)); from coordinator.__main__ import "
    command = [sys.executable, "-c", limited + "start; start()", "serve", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "disk I/O error" in done.stderr
    assert "look at dmesg whether the disk fails" in done.stderr
    assert done.returncode == FedcentersError.exit_code


def test_a_device_whose_disk_is_full_says_so_and_takes_part_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, "d02")
    fed = Federation.of(tmp_path, ballast=BALLAST, devices=DEVICES, quorum=0.6)
    spy = Spy(fed.world.broker)
    fed.start()
    fed.world.run(lambda: len(spy.said("get", cid="d02")) == 1)
    disk.full = True
    fed.world.run(lambda: len(spy.said("nack")) == 1)
    disk.full = False
    fed.complete()
    assert [(nack["code"], nack["detail"]) for nack in spy.said("nack")] == [
        ("no_space", "[Errno 28] No space left on device")
    ]
    last = {cid for record in fed.rounds() for cid in record["per_device"]}
    assert last == set(softmax_program.grouped_fleet(DEVICES, 2))


def test_on_a_real_file_system_that_fills_up_the_outcome_is_the_same(tmp_path: Path) -> None:
    """In a mount namespace of its own, for which no root is needed where the kernel lets users have one."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    allowed = subprocess.run([*inside, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"this system gives users no mount namespaces: {allowed.stderr.decode().strip()}")
    command = [*inside, sys.executable, "-m", "tests.faults.full_disk", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, check=True, text=True)
    told = json.loads(ran.stdout)
    assert told["states"] == full_disk.hashes(full_disk.calm(tmp_path / "calm"))
    assert set(told["said"]) == {"storage: No space left on device"}


def test_a_refusal_that_cannot_be_written_down_counts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Federation.of(tmp_path, devices=DEVICES, quorum=0.6)
    spy = Spy(fed.world.broker)
    fed.start(2)
    mute = fed.start_mute_device("d02")
    fed.world.run(lambda: len(spy.said("ack")) == 2)
    assert fed.store is not None
    database = FullDatabase(fed.store.database._connection)
    monkeypatch.setattr(fed.store.database, "_connection", database)
    task = spy.said("task", cid=mute.name)[-1]
    key = {name: task[name] for name in ("run", "round", "exchange")}
    spy.say(mute.name, "nack", re=task["id"], code="no_data", **key)
    with pytest.raises(OSError, match="database or disk is full"):  # of the closing, which the refusal brought about
        fed.world.run(lambda: False)
    fed.world.end()


def test_a_run_without_rounds_tries_again_every_few_seconds_while_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the end of a task whose time is over meanwhile; devices are heard, and told to announce again."""
    run = RunConfig(method="fedavg", rounds=3, name="run", settings={"local-steps": 3, "batch-size": 8})
    plan: dict[str, Any] = {"concurrency": 3, "buffer": 2, "quorum": 0.5, "deadline_s": 50.0}
    fed = Federation.of(tmp_path, devices=DEVICES, runs=(run,), **plan)
    spy = Spy(fed.world.broker)
    fed.start(2)
    fed.start_mute_device("d02")
    fed.world.run(lambda: bool(spy.said("task", cid="d02")))
    assert fed.store is not None
    database = FullDatabase(fed.store.database._connection)
    monkeypatch.setattr(fed.store.database, "_connection", database)
    until_s = fed.world.clock.time_s + 100.0
    fed.world.run(lambda: fed.world.clock.time_s >= until_s)
    assert {ack["status"] for ack in spy.said("ack")} == {"retry"}
    assert database.tries >= 10
    database.full = False
    fed.complete()
    assert [record["asynchronous"]["counted"] for record in fed.rounds()] == [2, 2, 2]
    assert sum(record["asynchronous"]["expired"] for record in fed.rounds()) >= 1
