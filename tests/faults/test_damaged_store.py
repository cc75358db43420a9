"""A disk that rots: a damaged blob is kept aside and its round is played again; a lost database is refused."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.storage.database import DATABASE_FILE
from coordinator.storage.event_log import EventLog
from coordinator.storage.store import Store
from edge_client.errors import ConfigError, Malformed
from edge_client.transport.blobs import BlobFolder
from tests.support.virtual_federation import Federation


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def make_unreadable(path: Path) -> None:
    """Reading gives EIO from now on, as of a bad sector: the first page of a process is not mapped."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def state_blobs(fed: Federation, rounds: int) -> list[Path]:
    """The files of the states after the last `rounds` rounds, newest first."""
    folder = fed.config.folder / "store"
    with sqlite3.connect(folder / DATABASE_FILE) as db:
        rows = db.execute("select blob from states order by round desc limit ?", (rounds,)).fetchall()
    return [folder / "blobs" / blob for (blob,) in rows]


def stopped_after(folder: Path, rounds: int, *, of: int = 3, keep_rounds: int = 10) -> Federation:
    """A run `of` rounds whose coordinator was killed after some of them; its devices have ended."""
    fed = Federation.of(folder, rounds=of, keep_rounds=keep_rounds)
    fed.start()
    fed.world.run(lambda: sum(event["event"] == "round" for event in fed.events) == rounds)
    fed.world.end()
    return fed


@pytest.mark.parametrize(("damaged", "damage"), [(1, flip), (2, flip), (3, flip), (1, make_unreadable)])
def test_a_damaged_state_costs_a_replay_and_no_bit_of_the_outcome(
    tmp_path: Path, damaged: int, damage: Callable[[Path], None]
) -> None:
    undisturbed = Federation.of(tmp_path / "undisturbed", rounds=3).play()
    fed = stopped_after(tmp_path / "rotten", 2)
    blobs = state_blobs(fed, damaged)
    for blob in blobs:
        damage(blob)
    fed.world.end()
    again = Federation(type(fed.world)(tmp_path / "rotten"), fed.config)
    again.play()
    assert again.outcome() == undisturbed.outcome()
    assert [record["round"] for record in again.rounds()] == [1, 2, 3]
    kept = sorted(path.name for path in (blobs[0].parent / "quarantine").iterdir())
    assert kept == sorted(blob.name for blob in blobs)
    assert all(blob.exists() for blob in blobs)  # replayed


def test_a_damaged_blob_is_kept_aside_and_named(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path)
    sha256 = folder.put(b"a model")
    flip(tmp_path / sha256)
    with pytest.raises(Malformed, match=r"quarantine") as damaged:
        folder.read(sha256)
    assert damaged.value.code == "bad_hash"
    assert (tmp_path / "quarantine" / sha256).read_bytes() == b"a modem"
    assert not folder.has(sha256)


@pytest.mark.parametrize("damage", [flip, make_unreadable])
@pytest.mark.parametrize("read", [BlobFolder.read, BlobFolder.verified])
def test_a_device_with_a_small_disk_keeps_no_damaged_copy(
    tmp_path: Path, damage: Callable[[Path], None], read: Callable[[BlobFolder, str], object]
) -> None:
    """And fetches it again; one that its disk could not read stayed, and each task with it was refused."""
    folder = BlobFolder(tmp_path, budget_bytes=100, evict=True)
    sha256 = folder.put(b"a model")
    damage(tmp_path / sha256)
    with pytest.raises(Malformed) as told:
        read(folder, sha256)
    assert told.value.code == "bad_hash"
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": empty,
    "deleted": Path.unlink,
    "truncated": truncate,
    "overwritten": overwrite,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fed = Federation.of(tmp_path_factory.mktemp("finished")).play()
    return fed.config.folder


@pytest.mark.parametrize("name", DAMAGES)
def test_a_lost_or_damaged_database_is_refused_in_one_line_and_nothing_is_begun_anew(
    tmp_path: Path, finished: Path, name: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for beside in (folder / "store").glob(f"{DATABASE_FILE}-*"):
        beside.unlink()
    DAMAGES[name](folder / "store" / DATABASE_FILE)
    blobs = sorted(path.name for path in (folder / "store" / "blobs").iterdir())
    with pytest.raises(ConfigError, match=r"coordinator\.sqlite") as refused:
        Store(folder / "store")
    assert "backup" in (refused.value.hint or "")
    assert "\n" not in refused.value.message
    assert sorted(path.name for path in (folder / "store" / "blobs").iterdir()) == blobs
    shown = CliRunner().invoke(app, ["status", str(folder)])
    assert shown.exit_code == 3
    assert "Traceback" not in shown.output


@pytest.mark.parametrize("damage", [Path.unlink, empty, overwrite])
def test_a_database_that_was_copied_without_its_log_is_refused_and_nothing_is_begun_anew(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """After a kill all tables are in the write-ahead log: what is in the database alone is an empty one."""
    store, copy = Store(tmp_path / "store"), tmp_path / "copy"
    store.blobs.put(b"a model")
    shutil.copytree(tmp_path / "store", copy)  # as after a kill
    store.close()
    damage(copy / f"{DATABASE_FILE}-wal")
    (copy / f"{DATABASE_FILE}-shm").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"holds nothing \(was it copied without"):
        Store(copy)


@pytest.mark.parametrize("change", ["a line is zeros", "more lines", "an empty line", "lines of another time"])
def test_a_file_of_metrics_that_differs_from_the_database_is_kept_aside_and_written_anew(
    tmp_path: Path, change: str
) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "metrics.jsonl"

    def write(*rounds: int) -> None:
        written = EventLog(path, store.events, lambda _: None, lambda: 0)
        for number in rounds:
            written.write("round", round=number)

    write(1, 2, 3)
    right = path.read_bytes()
    changed = {
        "a line is zeros": right.replace(b'"round":2', b"\0" * 9),
        "more lines": right + right[: right.index(b"\n") + 1],
        "an empty line": right + b"\n",
        "lines of another time": right.replace(b'"unix_ms":0', b'"unix_ms":1'),
    }[change]
    path.write_bytes(changed)
    write(4)
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert path.read_bytes().startswith(right)
    assert path.with_name("metrics.jsonl.old").read_bytes() == changed
    path.write_bytes(b"{}\n")  # damaged a second time
    write(5)
    kept = {file.name: file.read_bytes() for file in tmp_path.glob("metrics.jsonl.*")}
    assert kept == {"metrics.jsonl.old": changed, "metrics.jsonl.old.2": b"{}\n"}
    store.close()


def test_a_refused_database_is_not_left_locked(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "blobs").mkdir(parents=True)
    (store / DATABASE_FILE).write_bytes(b"no database" * 1_000)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"coordinator\.sqlite"):
            Store(store)
    (store / DATABASE_FILE).unlink()
    Store(store).close()
