from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.storage.run_reader import STORE_FOLDER, device_models, open_database, read_program
from edge_client.errors import ConfigError
from tests.support.virtual_federation import Federation, program


def test_what_the_devices_learned_in_a_round_can_be_read_back(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.finish()
    fed.world.end()
    assert read_program(fed.config.folder).schema == program().schema
    vectors = dict(device_models(fed.config.folder, "fesem", 2)[1])
    assert sorted(vectors) == ["d00", "d01", "d02", "d03"]
    apart = {cid: float(np.linalg.norm(vectors["d00"] - vector)) for cid, vector in vectors.items()}
    assert apart["d00"] == 0.0 < apart["d02"] < min(apart["d01"], apart["d03"])  # d00 and d02 are of one group
    assert device_models(fed.config.folder, "fesem", 9)[0] == []


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in"):
        read_program(tmp_path)


def test_a_run_folder_that_cannot_be_written_is_read_without_a_file_beside_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.finish()
    fed.world.end()
    store = fed.config.folder / STORE_FOLDER
    files = sorted(path.name for path in store.iterdir())
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with open_database(fed.config.folder) as db:
        assert db.execute("select count(*) from events").fetchone()[0] > 0
        assert sorted(path.name for path in store.iterdir()) == files


def test_a_log_that_its_coordinator_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question whether it is there and that for its size: `status` then ended with "No such file"."""
    Federation.of(tmp_path).play()
    there = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name.endswith("-wal") or there(path))
    with open_database(tmp_path / "run") as db:
        assert db.execute("select count(*) from events").fetchone()[0] > 0


def test_a_log_that_cannot_be_merged_is_named_and_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.finish()
    fed.world.end()
    (fed.config.folder / STORE_FOLDER / "coordinator.sqlite-wal").write_bytes(b"of a killed coordinator")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="must be merged"), open_database(fed.config.folder):
        pass
