"""A newer version of the coordinator continues a round that an older version began, or refuses the store.

Version N of the store wrote `stores/N` in the middle of round 2: three of four devices had replied. Its database is
an SQL dump. Before the schema or the task message changes, write_store.py writes the next one with the old code.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.artifacts.stored_settings import CATALOG_FACT
from coordinator.config_sections import RunConfig
from coordinator.status_in_words import status_lines
from coordinator.storage.database import SCHEMA_VERSION, UPGRADES
from coordinator.storage.status import read_status
from coordinator.storage.store import Store
from coordinator.strategies.plans.asynchronous_plan import AsynchronousPlan
from edge_client.errors import ConfigError
from edge_client.protocol import codecs
from edge_client.protocol.blocks import manifest_of
from edge_client.protocol.messages import canonical_json
from edge_client.protocol.nearest.catalog import Catalog
from edge_client.protocol.nearest.router_file import read_router
from edge_client.protocol.task import Reply
from tests.faults.write_store import leave, write, write_key
from tests.support import softmax_program
from tests.support.virtual_federation import BLOCK, Federation, Spy, config, program
from tests.support.virtual_time import VirtualWorld

STORES = Path(__file__).with_name("stores")


def restored(folder: Path, kept: Path = STORES / "1") -> Federation:
    """A federation whose run folder holds the store `kept`."""
    run = folder / "run"
    shutil.copytree(kept, run / "store", ignore=shutil.ignore_patterns("*.sql", "*.jsonl"))
    for blobs in (run / "store" / "blobs", *(run / "store" / "updates").iterdir()):
        (blobs / "partial").mkdir()
    with closing(sqlite3.connect(run / "store" / "coordinator.sqlite")) as db:
        db.executescript((kept / "coordinator.sql").read_text(encoding="utf-8"))
    shutil.copy(kept / "metrics.jsonl", run)
    write_key(run)
    return Federation(VirtualWorld(folder), config(run))


def test_there_is_a_store_of_every_older_version_that_this_one_reads() -> None:
    assert {folder.name for folder in STORES.iterdir()} - {SCHEMA_VERSION} == set(UPGRADES)


@pytest.mark.parametrize("version", sorted(UPGRADES))
def test_a_new_version_finishes_the_round_that_an_old_one_began(tmp_path: Path, version: str) -> None:
    fed = restored(tmp_path / "upgraded", STORES / version)
    spy = Spy(fed.world.broker)
    fed.play()
    calm = Federation.of(tmp_path / "calm").play()
    upgraded, expected = fed.final_state(), calm.final_state()
    assert upgraded.assignment == expected.assignment
    # Round 1 was computed on another machine, whose sums may differ in the last bit.
    np.testing.assert_allclose(upgraded.centers, expected.centers, rtol=1e-5, atol=1e-6)
    assert [(r["round"], sorted(r["per_device"])) for r in fed.rounds()] == [
        (number, sorted(softmax_program.grouped_fleet(4, 2))) for number in (1, 2)
    ]
    asked_again = [rdy for rdy in spy.said("rdy") if (rdy["round"], rdy["exchange"]) == (2, 0)]
    assert len(asked_again) == 1  # the three answers from before the upgrade stand


def test_a_store_of_this_version_can_be_written_down_and_goes_on(tmp_path: Path) -> None:
    """The next version of the store needs a store of this version."""
    write(leave(tmp_path / "left"), tmp_path / "written")
    fed = restored(tmp_path / "restored", tmp_path / "written")
    fed.play()
    assert [record["round"] for record in fed.rounds()] == [1, 2]
    assert all(len(record["per_device"]) == 4 for record in fed.rounds())


@pytest.mark.parametrize("version", ["0", "99", "two"])
def test_a_store_of_a_version_that_it_does_not_know_is_refused_and_left_as_it_was(tmp_path: Path, version: str) -> None:
    fed = restored(tmp_path)
    database = fed.config.folder / "store" / "coordinator.sqlite"
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("update meta set value = ? where key = 'schema'", (version,))
    with pytest.raises(ConfigError, match=r"written by another version[^~]*or restore the backup"):
        Store(fed.config.folder / "store")
    with closing(sqlite3.connect(database)) as db:
        tables = {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}
        assert db.execute("select value from meta where key = 'schema'").fetchall() == [(version,)]
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript((STORES / "1" / "coordinator.sql").read_text(encoding="utf-8"))
        assert tables == {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}


@pytest.mark.parametrize("version", sorted(UPGRADES))
def test_the_status_of_an_older_folder_is_told_or_what_to_do_to_read_it(tmp_path: Path, version: str) -> None:
    folder = restored(tmp_path, STORES / version).config.folder
    if version == "1":
        with pytest.raises(ConfigError, match=r"older version[^~]*start `serve`"):
            read_status(folder)
    else:
        assert "round 1/2" in "\n".join(status_lines(read_status(folder)))


def leave_the_first_guide(fed: Federation) -> None:
    """What a coordinator of 22 November left after `teach-newcomers`: it asked for losses alone."""
    schema = program().schema
    with closing(Store(fed.config.folder / "store")) as store:
        guide = canonical_json({"v": 1, "centers": 2, "sizes": [40], "usual": {}, "ways": {}, "sketch": None})
        store.blobs.put(guide)
        catalog = Catalog.from_bytes(store.blobs.read(store.facts.get(CATALOG_FACT) or ""))
        catalog = replace(catalog, router=manifest_of(guide, "router", block=BLOCK))
        store.facts.put(CATALOG_FACT, store.blobs.put(catalog.to_bytes()))
        rows = store.database.rows("select cid, sha256, n from replies where round = 3")
        assert len(rows) == 4
        for cid, sha256, n in rows:
            answer = codecs.decode_stats(store.updates(cid).read(sha256), schema, n)
            data = codecs.encode_stats(Reply(n=n, losses=answer.losses), schema)
            where = (store.updates(cid).put(data), len(data), cid)
            with store.database.transaction():
                store.database.execute("update replies set sha256 = ?, size = ? where round = 3 and cid = ?", where)


@pytest.mark.parametrize("lost", ["guide", "catalog", "center"])
def test_a_finished_run_of_whose_catalog_a_part_is_damaged_publishes_it_again(tmp_path: Path, lost: str) -> None:
    fed = Federation.of(tmp_path, teach_newcomers=True).play()
    assert fed.catalog is not None
    assert fed.catalog.router is not None
    parts = {"guide": fed.catalog.router.sha256, "center": fed.catalog.centers[1].model.sha256}
    with closing(Store(fed.config.folder / "store")) as store:
        catalog = store.facts.get(CATALOG_FACT)
        damaged = store.blobs.path(parts.get(lost, catalog or ""))
        damaged.write_bytes(b"rot")
    again = Federation.of(tmp_path, teach_newcomers=True)
    again.start_coordinator()
    again.complete()
    assert again.catalog == fed.catalog
    assert damaged.read_bytes() != b"rot"


def test_a_finished_run_with_the_guide_of_an_older_version_publishes_one_that_devices_read(tmp_path: Path) -> None:
    """New devices ended with "guide lacks inputs, answers"."""
    fed = Federation.of(tmp_path, teach_newcomers=True).play()
    before = fed.final_states()
    leave_the_first_guide(fed)
    again = Federation.of(tmp_path, teach_newcomers=True)
    again.start_coordinator()
    again.complete()
    assert again.final_states() == before
    assert again.catalog is not None
    assert again.catalog.router is not None
    with closing(Store(fed.config.folder / "store")) as store:
        assert read_router(store.blobs.read(again.catalog.router.sha256)).usual.keys() == {"loss"}


def test_a_round_that_an_older_version_began_without_waiting_goes_on_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the first round of `start = "loss"` alone; this one waits for three, and asked other things."""
    settings = {"clusters": 2, "start": "loss", "least-members": 2, "local-steps": 3, "batch-size": 8}
    run = RunConfig(method="fesem", rounds=5, name="fesem", settings=settings)
    fed = Federation.of(tmp_path, runs=(run,), devices=5, concurrency=3, buffer=3)
    with monkeypatch.context() as older:
        older.setattr(AsynchronousPlan, "needs_round", lambda _, state: not state.assignment)
        fed.start()
        fed.world.run(lambda: fed.live is not None and fed.live.key.round == 2)
        fed.world.kill("coordinator.0")
    fed.start_coordinator()
    fed.complete()
    assert ["asynchronous" in record for record in fed.rounds()] == [False, True, True, True, True]
